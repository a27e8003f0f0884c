"""How little a node trusts its own clock and links: what looks like everyone's silence is often our own.

Doubt comes in units, from an event loop that stood still and from others who suspect us; each unit stretches all
timeouts by half, and fades with time. When the loop stood still is remembered too, for answers that were under way.
"""

from __future__ import annotations

import math
from collections import deque

MAX_STOPS = 8
"""Of our own, remembered: an answer is waited for for two seconds, in which a loop says `Late` six times at most."""


class SelfDoubt:
    """Of one node. `now` is seconds on any monotonic clock, never going back."""

    def __init__(self, most: float, fades_seconds: float) -> None:
        """At most `most` units, of which one fades in `fades_seconds`."""
        self._most, self._fades_seconds = most, fades_seconds
        self._units = 0.0
        """As of `_since`; they fade from then on."""
        self._since = 0.0
        self._stops: deque[tuple[float, float]] = deque(maxlen=MAX_STOPS)
        """From when to when our own loop stood still, the last times that it did."""

    def units(self, now: float) -> float:
        """0: this node trusts itself."""
        return max(0.0, self._units - (now - self._since) / self._fades_seconds)

    def stretch(self, now: float) -> float:
        """By what timeouts are multiplied."""
        return 1 + self.units(now) / 2

    def add(self, units: float, now: float) -> None:
        self._units = min(self._most, self.units(now) + units)
        self._since = now

    def stood_still(self, seconds: float, now: float) -> None:
        """Our loop, until now."""
        self._stops.append((now - seconds, now))

    def without_stops(self, seconds: float, now: float) -> float:
        """Of the last so many `seconds`, those in which our own loop ran."""
        since = now - seconds
        return seconds - math.fsum(end - max(begun, since) for begun, end in self._stops if end > since)
