"""A process that does one job, waited for while its progress is shown, and over when the wait is."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

from meshinfer.base.errors import DeadlineExceeded

LOOK_SECONDS = 0.2
"""Between two looks: a bar that moves."""
KILLED_SECONDS = 5.0
"""From the kill to the end. One that hangs in the kernel (a dead disk) may never end, and nobody waits for it."""


def wait_watched(
    process: subprocess.Popen[Any], seconds: float, what: str, look: Callable[[], None], *, do: str
) -> int:
    """Its exit code; until then `look` is called again and again, and may raise. Killed, if the wait ends first.

    Raises:
        DeadlineExceeded: `what` took more than `seconds`; `do` says what then.
    """
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                return process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                look()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{what} took more than {seconds:.0f} s", do=do)
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_SECONDS)
