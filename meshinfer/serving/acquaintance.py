"""Whom this node has met: nobody mourns whom they were not introduced to.

A node that has just joined, or a mesh that meets another, hears of an instance from one of its seats, and of the
nodes of its other seats a few gossips later. In between those nodes are not alive in its view, and yet not lost: if it
is the one elected for the model, it would "repair" what serves everyone else well. So a node that was never alive here
is a stranger for as long as its announcement may still be on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from meshinfer.base.ids import NodeId
from meshinfer.topology.graph import Topology

STRANGER_SECONDS = 3.0
"""A node says every two seconds that it is there, to whoever does not hold its card yet. A repair that really is needed
waits this long only where its planner came after the death."""


class Acquaintance:
    """Of one node, with those that it hears of. Its size is that of the view."""

    def __init__(self) -> None:
        self._met: AbstractSet[NodeId] = frozenset()
        """Alive here now, or once, and still named by a seat."""
        self._strangers: dict[NodeId, float] = {}
        """And when their names were first heard."""

    def strangers(self, topology: Topology, now: float) -> AbstractSet[NodeId]:
        """Nodes that seats name, and whose own announcement may still be on its way."""
        live = topology.by_id.keys()
        named = set(_named(topology))
        self._met = live | (self._met & named)
        self._strangers = {node: self._strangers.get(node, now) for node in named - self._met}
        return {node for node, heard in self._strangers.items() if now < heard + STRANGER_SECONDS}

    def next_wakeup(self, now: float) -> float:
        """When the next stranger is lost; infinite if there is none."""
        lost_at = (heard + STRANGER_SECONDS for heard in self._strangers.values())
        return min((at for at in lost_at if at > now), default=math.inf)


def _named(topology: Topology) -> Iterable[NodeId]:
    return (seat.node_id for card in topology.nodes for placement in card.placements for seat in placement.seats)
