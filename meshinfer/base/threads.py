"""A process does not live on without one of its threads.

A thread that reads or writes a channel, and is refused memory, ends; its channel stays open, and everybody waits for
what it will never bring. Python only prints the exception. So the whole process ends, which its agent knows at once.
"""

from __future__ import annotations

import os
import threading

EXIT_CODE = 71
"""EX_OSERR of sysexits(3): the system gave no memory, or no thread."""


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
