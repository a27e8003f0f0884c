"""This node's coordinate on its card: for a planner that counts on pairs which nobody measures.

Where everyone measures everyone it would only make cards longer, so it comes and goes with the size of the mesh. How it
follows from round trips is `coordinates`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from meshinfer.base.ids import NodeId
from meshinfer.mesh.coordinates import Coordinates
from meshinfer.mesh.own_card import OwnCard
from meshinfer.topology.graph import Topology

FROM_NODES = 12
"""Announced a little before it is needed, so that it is good by then; dropped below half of that."""
PULLS_APART_SECONDS = 1.0
"""Each neighbour pulls once in that time, however often a probe ends."""
TOLD_APART_SECONDS = 5.0


class OwnCoordinate:
    """The one writer of the card's `coordinate`."""

    def __init__(self, own_card: OwnCard, rng: random.Random) -> None:
        """`rng` says which way two nodes at one place part."""
        self._own_card = own_card
        self._coordinates = Coordinates(rng)
        self._pull_at = self._tell_at = float("-inf")

    def look(self, topology: Topology, rtt_seconds: Iterable[tuple[NodeId, float]], now: float) -> None:
        """Work it out anew and announce it, if that is due; `rtt_seconds` to each neighbour, 0 where it is not known."""
        if len(topology.nodes) < FROM_NODES:
            if self._own_card.card.coordinate is not None and len(topology.nodes) < FROM_NODES // 2:
                self._own_card.update(coordinate=None)
            return
        if now < self._pull_at:
            return
        self._pull_at = now + PULLS_APART_SECONDS
        for peer, seconds in rtt_seconds:
            card = topology.by_id.get(peer)
            if card is not None and card.coordinate is not None and seconds > 0:
                self._coordinates.measured(peer, card.coordinate, seconds)
        if now >= self._tell_at:
            self._tell_at = now + TOLD_APART_SECONDS
            self._own_card.update(coordinate=self._coordinates.announced())

    def forget(self, peers: Iterable[NodeId]) -> None:
        """These are gone."""
        self._coordinates.forget(peers)
