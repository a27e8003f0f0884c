"""When to try which address. Pure: the driver says what happened, and asks what is due.

Per address there is a back-off: the next try comes after a quarter of the time that the address has
been failing, at least a quarter second, at most three. So a node that was gone for a moment is tried
again at once, and one behind a cut cable is back within three seconds of its mending. What has been
failing for ten minutes is tried once a minute: the address book remembers laptops that went home.
Waits are spread by a quarter either way, so that a room that lost its power does not dial in step.

Of two nodes that hear of each other at once, the one with the lower id dials, and the other gives it
a third of a second: two connections would do no harm, but cost two handshakes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from meshinfer.base.ids import NodeId
from meshinfer.mesh.addresses import nearness, worth_dialling
from meshinfer.mesh.neighbours import Wanted

MIN_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 3.0
OLD_AFTER_SECONDS = 600.0
OLD_WAIT_SECONDS = 60.0
COURTESY_SECONDS = 0.3
ADDRESSES_PER_NODE = 16
MAX_NODES = 2048
MAX_FAILING = 8192
"""Addresses whose failures are remembered."""
FAILING_AFTER_SECONDS = 5.0
"""A node none of whose addresses has worked for this long does not count as one to be connected to."""


@dataclass(frozen=True, slots=True)
class Dial:
    """One attempt: the addresses of one node, in turn, until one works."""

    node: NodeId | None
    """None: whoever is there (an address that a person gave)."""
    addresses: tuple[str, ...]


@dataclass(slots=True)
class _Try:
    failing_since: float
    not_before: float


class DialPlan:
    """All known addresses, and how they fared."""

    def __init__(
        self,
        own: NodeId,
        own_addresses: Callable[[], Iterable[str]],
        rng: random.Random,
        seeds: Iterable[str] = (),
    ) -> None:
        self._own, self._own_addresses, self._rng = own, own_addresses, rng
        self._seeds: dict[str, NodeId | None] = dict.fromkeys(seeds)
        """Addresses that a person gave, and who was last there."""
        self._addresses: dict[NodeId, dict[str, None]] = {}
        """Per node, the one that worked last in front; the node heard of last at the end."""
        self._tries: dict[str, _Try] = {}
        """All and only addresses that failed last time or that must wait; oldest first."""
        self._busy: set[NodeId | str] = set()
        """Nodes and seeds that are being dialled."""

    # --- what is known --------------------------------------------------------------------------

    def learn(self, node: NodeId, addresses: Iterable[str], now: float, *, fresh: bool = False) -> None:
        """`node` says, or someone says of it, that it is at `addresses`.

        `fresh`: it was heard itself just now, so it is worth a try at once whatever failed before.
        """
        if node == self._own:
            return
        known = self._addresses.pop(node, {})
        added = [address for address in worth_dialling(addresses, ADDRESSES_PER_NODE) if address not in known]
        # The one in front, which worked last if any did, keeps its place: hints are anyone's word.
        merged = dict.fromkeys([*[*known][:1], *added, *known], None)
        self._addresses[node] = dict.fromkeys([*merged][:ADDRESSES_PER_NODE], None)
        if len(self._addresses) > MAX_NODES:
            del self._addresses[next(iter(self._addresses))]
        for address in self._addresses[node] if fresh else added:
            self._tries.pop(address, None)
            if self._own > node:
                self._tries[address] = _Try(now, now + COURTESY_SECONDS)

    def nodes(self) -> frozenset[NodeId]:
        return frozenset(self._addresses)

    def failing(self, now: float) -> frozenset[NodeId]:
        """Nodes all of whose addresses have been failing for a while."""
        return frozenset(
            node
            for node, addresses in self._addresses.items()
            if all(
                address in self._tries and now - self._tries[address].failing_since >= FAILING_AFTER_SECONDS
                for address in addresses
            )
        )

    # --- what is due ----------------------------------------------------------------------------

    def due(self, wanted: Wanted, connected: Collection[NodeId], now: float) -> list[Dial]:
        """What to dial now. Every `Dial`, here and below, must be followed by `ended`."""
        dials: list[Dial] = []
        for seed, node in self._seeds.items():
            if seed not in self._busy and (node is None or node not in connected) and self._may(seed, now):
                self._busy.add(seed)
                dials.append(Dial(None, (seed,)))
        dials += self._due_of(wanted.neighbours, connected, now, len(wanted.neighbours))
        strangers_busy = sum(node in self._busy for node in wanted.strangers)
        room = max(0, wanted.strangers_at_once - strangers_busy)
        return dials + self._due_of(wanted.strangers, connected, now, room)

    def is_busy(self, node: NodeId) -> bool:
        """It is being dialled."""
        return node in self._busy

    def redial(self, node: NodeId) -> Dial | None:
        """Its connection was lost just now: try all its addresses at once. None if none is known, or one is tried."""
        known = self._addresses.get(node)
        if not known or node in self._busy:
            return None
        for address in known:
            self._tries.pop(address, None)
        self._busy.add(node)
        return Dial(node, self._nearest_first(known))

    def next_wakeup(self, wanted: Wanted, connected: Collection[NodeId], now: float) -> float:
        """When to ask again unless something happens first; infinite if nothing waits."""
        waiting = [
            address
            for node in (*wanted.neighbours, *wanted.strangers)
            if node not in connected and node not in self._busy
            for address in self._addresses.get(node, ())
        ]
        waiting += [
            seed for seed, node in self._seeds.items() if seed not in self._busy and (not node or node not in connected)
        ]
        times = (self._tries[address].not_before for address in waiting if address in self._tries)
        return min((time for time in times if time > now), default=float("inf"))

    def worked(self, address: str, node: NodeId) -> None:
        """`node` was reached at `address`."""
        self._tries.pop(address, None)
        if address in self._seeds:
            self._seeds[address] = node
        known = self._addresses.pop(node, {})
        self._addresses[node] = dict.fromkeys(
            [address, *(other for other in known if other != address)][:ADDRESSES_PER_NODE], None
        )

    def failed(self, address: str, now: float) -> None:
        """Nobody, or the wrong one, was reached at `address`."""
        since = self._tries[address].failing_since if address in self._tries else now
        age = now - since
        wait = OLD_WAIT_SECONDS if age >= OLD_AFTER_SECONDS else min(max(age / 4, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
        self._tries.pop(address, None)
        self._tries[address] = _Try(since, now + wait * self._rng.uniform(0.75, 1.25))
        if len(self._tries) > MAX_FAILING:
            del self._tries[next(iter(self._tries))]

    def ended(self, dial: Dial) -> None:
        """The attempt is over, whatever came of it."""
        self._busy.discard(dial.node if dial.node is not None else dial.addresses[0])

    # --- inside ---------------------------------------------------------------------------------

    def _may(self, address: str, now: float) -> bool:
        return address not in self._tries or self._tries[address].not_before <= now

    def _due_of(self, nodes: Iterable[NodeId], connected: Collection[NodeId], now: float, limit: int) -> list[Dial]:
        dials: list[Dial] = []
        for node in nodes:
            if len(dials) >= limit:
                break
            if node in connected or node in self._busy:
                continue
            ready = [address for address in self._addresses.get(node, ()) if self._may(address, now)]
            if ready:
                self._busy.add(node)
                dials.append(Dial(node, self._nearest_first(ready)))
        return dials

    def _nearest_first(self, addresses: Iterable[str]) -> tuple[str, ...]:
        own_addresses = tuple(self._own_addresses())
        # Stable: among equally near ones, the one that worked last stays in front.
        return tuple(sorted(addresses, key=lambda address: nearness(address, own_addresses)))
