"""One agent per home: two agents with one identity would answer for each other and neither could be reached.

The lock is the operating system's own, so it dies with the process that holds it, however that ends.
Beside it lies the holder's process id, for the message only, and where its API answers, for commands that are
about this home. Neither proves that an agent runs: a killed one leaves them behind. Only the lock does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from meshinfer.base.errors import BadInput

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.3
"""How long a start waits for the lock: a command that looks whether an agent runs holds it for a moment."""

_LOCK, _PID, _API = "agent.lock", "agent.pid", "agent.api"


@contextmanager
def one_agent(home: Path) -> Generator[None]:
    """Holds `home` for this process.

    Raises:
        BadInput: another live agent holds it; or it cannot be written.
    """
    lock = filelock.FileLock(home / _LOCK, timeout=LOOK_SECONDS)
    make_home(home)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise BadInput(
            f"another agent (pid {_pid(home / _PID)}) runs in {home}",
            expected="one agent per home",
            do="stop that one, or give this one a home of its own with --home or MESHINFER_HOME",
        ) from None
    except OSError as error:
        raise _unusable(home, error) from error
    try:
        (home / _API).unlink(missing_ok=True)  # a killed agent's
        _note(home / _PID, str(os.getpid()))
        yield
    finally:
        for note in (_PID, _API):
            (home / note).unlink(missing_ok=True)
        lock.release()


def make_home(home: Path) -> None:
    """Make `home`, if it is not there, its owner's alone: keys will lie in it.

    Raises:
        BadInput: it cannot be made.
    """
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(home, error) from error


def agent_runs(home: Path) -> bool:
    """Whether a live agent holds `home`.

    Raises:
        BadInput: it is somebody else's, and cannot be looked into.
    """
    lock = filelock.FileLock(home / _LOCK, timeout=0)
    try:
        if not (home / _LOCK).exists():
            return False
        lock.acquire()
    except filelock.Timeout:
        return True
    except OSError as error:
        raise _unusable(home, error) from error
    lock.release()
    return False


def pid_of(home: Path) -> int | None:
    """The process id of the agent that holds `home`; None if none runs."""
    pid = _pid(home / _PID)
    return int(pid) if pid != "unknown" and agent_runs(home) else None


def note_api(home: Path, url: str) -> None:
    """Leave word where the agent of `home` answers; `one_agent` takes it away."""
    _note(home / _API, url)


def api_of(home: Path) -> str | None:
    """Where the agent of `home` answers; None while it does not yet, or if none runs."""
    try:
        noted = (home / _API).read_text()[:256].strip()
    except OSError:
        return None
    return noted if noted and agent_runs(home) else None


def _note(path: Path, text: str) -> None:
    """A note is worth no agent: one on a full disk runs without, and says so."""
    try:
        path.write_text(f"{text}\n")
    except OSError as error:
        with suppress(OSError):  # a file system that is read-only by now
            path.unlink(missing_ok=True)  # half a note misleads
        log.warning("cannot write %s (%s); commands about this home will not find its agent", path, error)


def _unusable(home: Path, error: OSError) -> BadInput:
    return BadInput(
        f"{home} cannot be used: {error.strerror}", do="name a directory of yours with --home or MESHINFER_HOME"
    )


def _pid(pid_file: Path) -> str:
    try:
        text = pid_file.read_text()[:20].strip()
    except OSError:
        return "unknown"
    return text if text.isdecimal() else "unknown"
