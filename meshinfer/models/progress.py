"""How far a long job is, and whether it should stop.

A pull runs for minutes in a thread of its own. Between two chunks it calls its `Watch`, which shows
the progress to whoever draws a bar, and raises `Stopped` once that person has had enough. There is
no other way to interrupt a pull, and none is needed: what is on disk then is what a killed process
would leave, and the next pull goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from meshinfer.base.errors import MeshinferError

CHUNK_BYTES = 1024 * 1024
"""Read, hashed or copied between two looks at the watch: under 2 ms from a warm disk, under 20 ms from a slow one."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of a job."""

    what: str
    """What is being done now, as a person reads it: `downloading model.safetensors`."""
    done_bytes: int
    total_bytes: int
    """0 where it is not known."""


class Stopped(MeshinferError):
    """The one who asked for the job called it off; what is done so far is kept."""

    code: ClassVar[str] = "stopped"


def _unseen(progress: Progress) -> None:
    """Nobody looks."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Watch:
    """Called between chunks: `watch(what, done_bytes, total_bytes)`."""

    progress: Callable[[Progress], None] = field(default=_unseen)
    should_stop: Callable[[], bool] = field(default=_never)

    def __call__(self, what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Show this moment.

        Raises:
            Stopped: the caller wants no more of it.
        """
        if self.should_stop():
            raise Stopped(f"stopped while {what}", do="the same pull goes on from here")
        self.progress(Progress(what, done_bytes, total_bytes))
