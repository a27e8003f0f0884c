"""One agent per home: two agents with one identity would answer for each other and neither could be reached.

The lock is the operating system's own, so it dies with the process that holds it, however that ends.
Beside it lies the holder's process id, for the message only.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import filelock

from meshinfer.base.errors import BadInput


@contextmanager
def one_agent(home: Path) -> Generator[None]:
    """Holds `home` for this process.

    Raises:
        BadInput: another live agent holds it; or it cannot be written.
    """
    pid_file = home / "agent.pid"
    lock = filelock.FileLock(home / "agent.lock", timeout=0)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise BadInput(
            f"another agent (pid {_pid(pid_file)}) runs in {home}",
            expected="one agent per home",
            do="stop that one, or give this one a home of its own with MESHINFER_HOME",
        ) from None
    except OSError as error:
        raise BadInput(
            f"{home} cannot be used: {error.strerror}", do="set MESHINFER_HOME to a directory of yours"
        ) from error
    try:
        pid_file.write_text(f"{os.getpid()}\n")
        yield
    finally:
        pid_file.unlink(missing_ok=True)
        lock.release()


def _pid(pid_file: Path) -> str:
    try:
        text = pid_file.read_text()[:20].strip()
    except OSError:
        return "unknown"
    return text if text.isdecimal() else "unknown"
