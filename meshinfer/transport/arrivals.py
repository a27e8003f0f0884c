"""How fast the bytes of one frame came in: the second half of it, timed where it arrived.

The receiver is the one who knows: a sender only sees how fast the kernel takes what it gives. And the
second half is what counts: the first goes through TCP's slow start, through token buckets' savings and
into empty buffers, so timed as a whole a frame says more about its beginning than about the link.

A reader that comes late finds a full socket buffer and empties it at the speed of memory. So a frame whose
first byte did not have to be waited for says nothing. Pure: times come in by the door.
"""

from __future__ import annotations

from dataclasses import dataclass

WAITED_SECONDS = 200e-6
"""A read that took this long has waited for the wire; one that finds its bytes at hand takes 10 µs with TLS."""
MAX_MARKS = 512
"""A TLS record is 16 KiB, so 8 MiB are timed record by record; of larger frames every other mark is dropped."""

MAX_SPEED_UP = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """One frame's coming."""

    total_bytes: int
    whole_seconds: float
    """From its first bytes to its last."""
    half_bytes: int
    half_seconds: float
    """Its second half, as near as the reads allow; 0 if it came in one piece."""
    waited: bool
    """The reader was there before the first byte was."""

    def tells(self, least_bytes: int) -> bool:
        """Whether it says something of the link: large, waited for, in more than one piece."""
        return self.waited and self.total_bytes >= least_bytes and self.half_seconds > 0 and self.half_bytes > 0


class Arrivals:
    """Told of each read of one channel; gives each frame's `Arrival`."""

    def __init__(self, now: float) -> None:
        self._ready = now
        """When the reader was ready for the frame's first byte."""
        self._marks: list[tuple[int, float]] = []
        """Bytes of this frame so far, and when."""

    def came(self, count: int, now: float) -> None:
        """A read brought `count` bytes."""
        total = self._marks[-1][0] if self._marks else 0
        self._marks.append((total + count, now))
        if len(self._marks) > MAX_MARKS:
            # The first stays, since time runs from it, and the last, which counts the bytes.
            self._marks = [self._marks[0], *self._marks[1:-1:2], self._marks[-1]]

    def end(self) -> Arrival:
        """The frame is complete."""
        total, end = self._marks[-1]
        first = self._marks[0][1]
        half, reached = next(mark for mark in self._marks if 2 * mark[0] >= total)
        whole_seconds, half_bytes = end - first, total - half
        # A reader that was held up in the middle empties a full buffer in no time: 8 Gbit/s were seen where 1 is true.
        # On no real link is the second half more than twice as fast as the whole, slow start included.
        half_seconds = max(end - reached, whole_seconds * half_bytes / total / MAX_SPEED_UP)
        self._marks = []
        return Arrival(total, whole_seconds, half_bytes, half_seconds, first - self._ready >= WAITED_SECONDS)

    def ready(self, now: float) -> None:
        """The reader begins to wait for the next frame."""
        self._ready = now
