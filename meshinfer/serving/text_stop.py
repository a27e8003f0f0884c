"""Stop strings: where an answer ends, found before anybody sees that part of it. Pure.

Text arrives in pieces cut anywhere, so a stop string may begin in one piece and end three pieces
later. The scanner lets through what can no longer be part of a stop string and holds back the rest:
the longest end of the text that is a proper beginning of one. That end is at most
`len(longest stop) − 1` characters, so little is delayed.

The stop string that counts is the one that is complete first, and of two complete at the same
character the longer one. This does not depend on how the text was cut (a property test says so), so
streamed and whole answers end alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a piece of text led to."""

    text: str
    """What may be shown now."""
    stop: str | None = None
    """The stop string that was hit: the answer ends before it, and nothing more is shown."""


class StopScanner:
    """One answer's text on its way out."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings; none lets all text through at once."""
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise ValueError("an empty stop string would end every answer before it begins")
        self._held = ""
        """An end of the text so far that is a proper beginning of some stop string; the longest such."""
        self._over = False

    def push(self, text: str) -> Scanned:
        """Add the next piece; after a hit, everything is swallowed."""
        if self._over:
            return Scanned("")
        text = self._held + text
        hit = self._first_hit(text)
        if hit is not None:
            start, stop = hit
            self._over, self._held = True, ""
            return Scanned(text[:start], stop)
        kept = self._longest_beginning(text)
        self._held = text[len(text) - kept :]
        return Scanned(text[: len(text) - kept])

    def flush(self) -> str:
        """The answer ended by itself: what was held back is text after all."""
        held, self._held, self._over = self._held, "", True
        return held

    def _first_hit(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _longest_beginning(self, text: str) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
