"""When this node tells the others of its seats anew, and of the ways that are blocked. Pure.

What happens to a seat, or to a way, is news at once. How far a load has come changes all the time, and an announcement
for its sake may hold up the one that matters: that waits. What only counts (sessions, resident bytes) goes on the card
every now and then (others hear it with this node's next announcement).
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshinfer.base.ids import NodeId
from meshinfer.topology.card import SeatReport

PROGRESS_SECONDS = 1.0
"""Between two announcements for the sake of a load's progress alone. A node may announce six times at once, then twice
a second: a load of 0.3 s that tells each tenth of it has `ready` wait for half a second."""


class SeatNews:
    """What was told last, and whether there is more to tell."""

    def __init__(self) -> None:
        self._told: tuple[tuple[SeatReport, ...], ...] = ()
        """The last announcement's substance, with and without progress."""
        self._told_at = -math.inf
        self._counted: tuple[SeatReport, ...] | None = None
        """The last announcement as it was."""
        self._blocked: tuple[NodeId, ...] = ()

    def is_due(
        self, reports: tuple[SeatReport, ...], blocked: tuple[NodeId, ...], now: float, *, counters: bool = False
    ) -> bool:
        """Whether these are to be announced; with `counters`, also for what only counts."""
        has_time = now >= self._told_at + PROGRESS_SECONDS
        what_happened = tuple(report.substance if has_time else _without_progress(report) for report in reports)
        is_news = what_happened not in self._told or blocked != self._blocked
        return is_news or (counters and reports != self._counted)

    def told(self, reports: tuple[SeatReport, ...], blocked: tuple[NodeId, ...], now: float) -> None:
        """These have been announced."""
        self._told = (tuple(report.substance for report in reports), tuple(map(_without_progress, reports)))
        self._told_at, self._counted, self._blocked = now, reports, blocked


def _without_progress(report: SeatReport) -> SeatReport:
    return replace(report.substance, progress=0.0)
