"""Threads: how one waits, and that a process does not live on without one of them.

A thread that is refused memory ends, and cannot be relied on to say so first; Python prints the exception and goes on,
and everybody waits for what that thread will never bring. So the whole process ends, which its agent knows at once. Of
any other mishap a thread tells whoever waits for it (`pipeline.channel`): a stranger's bytes must not end a process.
"""

from __future__ import annotations

import os
import threading

EXIT_CODE = 71
"""EX_OSERR of sysexits(3): the system gave no memory, or no thread."""


def pause(seconds: float) -> None:
    """Let the calling thread wait. Not `time.sleep`: libfaketime, with which wrong clocks are tested, makes that an invalid
    argument.
    """
    threading.Event().wait(seconds)


def end_with_a_starved_thread() -> None:
    """From now on this process ends when one of its threads ends for want of memory, or cannot start another."""
    before = threading.excepthook

    def ended(what: threading.ExceptHookArgs) -> None:
        is_starved = issubclass(what.exc_type, MemoryError) or "can't start new thread" in str(what.exc_value)
        try:
            before(what)
        finally:
            if is_starved:
                os._exit(EXIT_CODE)

    threading.excepthook = ended
