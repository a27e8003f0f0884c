"""`meshinfer leave`: this node goes, politely."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshinfer.base.errors import DeadlineExceeded, Refused
from meshinfer.cli.options import HomeOption, home_or_default
from meshinfer.cli.terminal import err

if TYPE_CHECKING:
    import psutil

# ruff: noqa: PLC0415 - the other commands start without it

LEAVE_SECONDS = 60.0
"""The agent gives the hand-over of its seats and its own answers 45 s together; then it has ended, whatever came of it."""
LOOK_SECONDS = 0.1


def leave(home: HomeOption = None) -> None:
    """End this node's agent: its layers move to other nodes, its clients' answers come to their end, then it goes.

    The same as Ctrl-C in the terminal of `meshinfer up`. Given again, it only waits, too; what ends the agent at once
    is a second Ctrl-C there.
    """
    import psutil

    from meshinfer.transport.home_lock import pid_of

    place = home_or_default(home)
    pid = pid_of(place)
    if pid is None:
        raise Refused(f"no agent runs in {place}", do="name the home of the one that should leave with --home")
    try:
        agent = psutil.Process(pid)
        agent.terminate()
    except psutil.Error as error:
        raise Refused(
            f"the agent (process {pid}) cannot be told: {error}", do="run this as the user who started it"
        ) from error
    deadline = time.monotonic() + LEAVE_SECONDS
    with err.status("leaving: layers move to other nodes, answers end …"):
        while _is_there(agent):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the agent (process {pid}) has not ended after {LEAVE_SECONDS:.0f} s",
                    do=f"`kill -9 {pid}` ends it",
                )
            time.sleep(LOOK_SECONDS)
    err.print("Left.")


def _is_there(process: psutil.Process) -> bool:
    """Its home is free a moment sooner than its memory. One that is dead and not buried is gone."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
