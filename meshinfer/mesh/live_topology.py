"""The topology as it follows from what this node sees now: the cards of everyone alive, and the links among them.

It is derived on demand and kept until something changes. Readers are woken when it has changed in substance; a link
that drifts by a few per cent wakes nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from meshinfer.mesh.changes import Changes
from meshinfer.mesh.membership import Membership
from meshinfer.mesh.own_card import OwnCard
from meshinfer.mesh.view import View
from meshinfer.topology.graph import Topology

log = logging.getLogger(__name__)

CHANGES_APART_SECONDS = 0.05
"""Two wake-ups of readers are at least this far apart; what happens between travels in the second."""


class LiveTopology:
    """This node's, as of now."""

    def __init__(self, view: View, membership: Membership, own_card: OwnCard, on_others: Callable[[], None]) -> None:
        """
        Args:
            view: what everyone said last.
            membership: who of the neighbours is alive.
            own_card: this node's, which may be a moment ahead of what it announced.
            on_others: others are alive than a moment ago.
        """
        self._view, self._membership, self._own_card, self._on_others = view, membership, own_card, on_others
        self._live = frozenset((own_card.card.node_id,))
        """As of the last look."""
        self._topology = view.topology(self._live, own_card.card)
        self._is_stale = False
        """Something may have changed since `_topology` was made."""
        self._substance_changed = False
        """Something that `changes` should tell, since it last did."""
        self._looks = Changes()
        self.changes = Changes()
        """Of its substance."""

    def now(self) -> Topology:
        if self._is_stale:
            self._is_stale = False
            self._look()
            self._topology = self._view.topology(self._live, self._own_card.card)
        return self._topology

    def note(self, *, substance: bool = False) -> None:
        """Something changed that the topology is made of."""
        self._is_stale = True
        self._substance_changed |= substance
        self._looks.notify()

    async def run(self) -> None:
        """Wake readers until cancelled."""
        async for _ in self._looks.watch():
            self._look()
            if self._substance_changed:
                self._substance_changed = False
                self.changes.notify()
                await trio.sleep(CHANGES_APART_SECONDS)

    def _look(self) -> None:
        """See who is alive now."""
        live = self._view.live(self._membership.vouched(), self._membership.dead(), trio.current_time())
        if live != self._live:
            for node in sorted(live - self._live):
                log.info("%s joined", self._view.called(node))
            self._live = live
            self._substance_changed = True
            self._on_others()
