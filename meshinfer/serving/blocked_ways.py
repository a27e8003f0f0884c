"""Ways that agents get through and channels do not: a firewall that knows the agent and not its runners, a router that
drops what it does not know. Pure.

Such a way looks sound to the mesh, and every epoch over it ends as the one before. So who dialled in vain says so on its
card for a while, and planners go round it if they can. Time alone tells that it is over, or a channel that opens all the
same, since nobody tries as long as there is another way.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshinfer.base.ids import NodeId

FIRST_SECONDS = 30.0
"""A machine too busy to answer is no firewall, and should not be without work for long."""
MOST_SECONDS = 600.0
"""Each time costs an answer some seconds: once in ten minutes, if there is a firewall."""
REMEMBERED_SECONDS = 3600.0
"""Since the last time. After that the next one is a first one."""
MAX_WAYS = 16
"""Fits on a card; whoever is cut off from more should be looked at by a person."""


@dataclass(slots=True)
class _Way:
    last_at: float
    seconds: float

    def is_blocked(self, now: float) -> bool:
        return now < self.last_at + self.seconds


class BlockedWays:
    """Of one node. `now` is seconds on any monotonic clock, never going back."""

    def __init__(self) -> None:
        self._ways: dict[NodeId, _Way] = {}

    def unanswered(self, node: NodeId, now: float) -> None:
        """A runner of it was dialled, and nothing came back."""
        way = self._ways.get(node)
        if way is None or now >= way.last_at + REMEMBERED_SECONDS:
            self._ways.pop(node, None)
            if len(self._ways) >= MAX_WAYS:
                del self._ways[min(self._ways, key=lambda other: self._ways[other].last_at)]
            self._ways[node] = _Way(now, FIRST_SECONDS)
        elif not way.is_blocked(now):  # else several dials of one attempt
            way.seconds = min(MOST_SECONDS, 2 * way.seconds)
            way.last_at = now

    def opened(self, node: NodeId) -> None:
        """A channel to it: there is a way."""
        self._ways.pop(node, None)

    def blocked(self, now: float) -> frozenset[NodeId]:
        return frozenset(node for node, way in self._ways.items() if way.is_blocked(now))
