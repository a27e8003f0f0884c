"""This node's collection of announcements: what everyone last said of itself. Pure.

*Merging.* Announcements of one node are ordered by (incarnation, version), and the later replaces the
earlier; should a node sign two different ones under one number, the greater bytes win everywhere.
So merging is commutative, associative and idempotent, and views that have heard the same agree,
whatever was lost, repeated or reordered on the way.

*Soft state.* An announcement lives for a while after it was received, on the receiver's own clock. One
that has expired leaves its number behind, so that a neighbour who still holds it cannot bring
it back to life; only a newer one can. Nobody's wall clock is compared with anybody's.

*Comparing.* Two large views that agree need not list themselves to each other to find that out. Nodes fall into
`SLICES` by a hash of their id, and two nodes compare a digest of each slice's numbers; only what is in slices that
differ is listed.

*One writer.* Nothing heard changes our own announcement. A higher number of ours than we remember
(a home directory restored from a backup) is reported, so that the driver outbids it.

*Who is alive.* `live` walks the links: from this node to the neighbours that its own membership
vouches for, and on from each living node to those that it says it reaches. A node that dies is
dropped by each of its neighbours on their own evidence, and once the last has said so it is gone
from everyone's view: failures travel as links, of which each still has exactly one writer.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from meshinfer.base.ids import NodeId
from meshinfer.mesh.announcement import Heard
from meshinfer.mesh.neighbours import rarity
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology

MergeResult = Literal["new", "changed", "refreshed", "stale", "outbid", "full"]
"""new, changed: a reader of topologies cares. refreshed: a sign of life, the same in substance. stale: nothing
taken. outbid: it is of this node itself, and above our own number. full: no room for another node."""

SLICES = 64
"""Of a view: 16 nodes each in a mesh of a thousand. Twice as many double what is sent to find that nothing differs (0.5
KiB) and halve what is listed for one that does (1 KiB)."""
SLICE_DIGEST_BYTES = 8

Order = tuple[int, int]
"""(incarnation, version)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of others' words is kept, and for how long."""

    lifetime_seconds: float = 15.0
    """Of an announcement since it was received: seven periods, three and more of them in a quiet mesh (`pace`), in a large
    one, too, where they are longer (`neighbours.rarity`). Raising it keeps nodes that only rumour knows."""
    doubt_seconds: float = 7.0
    """Links to a node that our own membership holds dead count only in announcements received this long after the
    verdict, so that what still names the node then knows better. Nearly everyone notices a death within 3 s, but a
    neighbour that doubts itself or to which the node was slow within 6.5 (`membership.Timing`), and 0.5 are for gossip.
    Less makes the dead flicker; more only delays one whom we alone do not reach and who has refuted nothing."""
    max_nodes: int = 2048
    max_bytes: int = 32 * 1024**2
    """2048 cards of 16 KiB."""
    expired_seconds: float = 600.0
    """How long the number of an expired announcement is remembered: longer than any view can still hold it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    heard: Heard
    received: float


@dataclass(frozen=True, slots=True)
class ViewStatistics:
    nodes: int
    size_bytes: int
    expired: int


class View:
    """All announcements held, one a node, this node's own among them. `now` is seconds on a monotonic clock."""

    def __init__(self, own: Heard, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._own = own
        self._entries: dict[NodeId, _Entry] = {}
        """All and only others' announcements that are not past their lifetime (as of the last `expire`)."""
        self._expired: dict[NodeId, tuple[Order, float]] = {}
        """Of nodes without an entry: the last number, and when it expired."""
        self._bytes = 0

    # --- writing --------------------------------------------------------------------------------

    def set_own(self, own: Heard) -> None:
        """This node's newest announcement; only its own gossip calls this."""
        self._own = own

    def merge(self, heard: Heard, now: float) -> MergeResult:
        """Take in what was heard and checked."""
        author = heard.author
        if author == self._own.author:
            return "outbid" if heard.card.order > self._own.card.order else "stale"
        old = self._entries.get(author)
        if old is not None and _rank(heard) <= _rank(old.heard):
            return "stale"
        if author in self._expired and heard.card.order <= self._expired[author][0]:
            return "stale"
        if not self._make_room(heard, old, now):
            return "full"
        self._expired.pop(author, None)
        self._entries[author] = _Entry(heard, now)
        self._bytes += heard.size_bytes - (old.heard.size_bytes if old else 0)
        if old is None:
            return "new"
        return "refreshed" if heard.says_the_same_as(old.heard) else "changed"

    def expire(self, now: float) -> tuple[NodeId, ...]:
        """Drop what is past its lifetime; returns whose."""
        gone = tuple(node for node, entry in self._entries.items() if self._is_past(entry, now))
        for node in gone:
            self._drop(node, now)
        for node, (_, since) in list(self._expired.items()):
            if now - since >= self._bounds.expired_seconds:
                del self._expired[node]
        return gone

    # --- reading --------------------------------------------------------------------------------

    @property
    def own(self) -> Heard:
        return self._own

    def get(self, node: NodeId) -> Heard | None:
        """What `node` said last; None if nothing is held."""
        if node == self._own.author:
            return self._own
        entry = self._entries.get(node)
        return entry.heard if entry else None

    def name(self, node: NodeId) -> str:
        """As its card says; empty if none is held."""
        heard = self.get(node)
        return heard.card.name if heard else ""

    def called(self, node: NodeId) -> str:
        """As people know it: by its name, if its card was heard; else by the end of its id, which differs."""
        return self.name(node) or f"node …{node[-8:]}"

    @property
    def count(self) -> int:
        """How many are held, with this node."""
        return len(self._entries) + 1

    def nodes(self) -> frozenset[NodeId]:
        """Everyone held, alive or not, and this node."""
        return frozenset(self._entries) | {self._own.author}

    def age_seconds(self, node: NodeId, now: float) -> float:
        """Since `node`'s announcement was received; infinite if none is held."""
        entry = self._entries.get(node)
        return now - entry.received if entry else float("inf")

    def known(self, slices: Collection[int] = ()) -> tuple[tuple[NodeId, int, int], ...]:
        """Every number held or remembered, at most `max_nodes`: what a peer need not send again.

        `slices`: of nodes in these only; empty: of all.
        """
        orders = {node: entry.heard.card.order for node, entry in self._entries.items()}
        orders[self._own.author] = self._own.card.order
        for node, (order, _) in self._expired.items():
            if len(orders) >= self._bounds.max_nodes:
                break
            orders[node] = order
        listed = ((node, *order) for node, order in sorted(orders.items()) if not slices or slice_of(node) in slices)
        return tuple(listed)[: self._bounds.max_nodes]

    def digests(self) -> tuple[bytes, ...]:
        """Of each slice's numbers: equal where two views know the same."""
        hashes = [hashlib.blake2b(digest_size=SLICE_DIGEST_BYTES) for _ in range(SLICES)]
        for node, incarnation, version in self.known():
            hashes[slice_of(node)].update(f"{node} {incarnation} {version} ".encode())
        return tuple(each.digest() for each in hashes)

    def newer_than(self, known: Iterable[tuple[NodeId, int, int]], slices: Collection[int] = ()) -> list[Heard]:
        """What a peer that has `known` lacks (of nodes in `slices`, if any are named); our own first, then by id."""
        theirs = {node: (incarnation, version) for node, incarnation, version in known}
        held = [self._own, *(self._entries[node].heard for node in sorted(self._entries))]
        return [
            heard
            for heard in held
            if heard.card.order > theirs.get(heard.author, (-1, -1))
            and (not slices or slice_of(heard.author) in slices)
        ]

    def live(self, neighbours: Collection[NodeId], doubted: Mapping[NodeId, float], now: float) -> frozenset[NodeId]:
        """Everyone alive who has a card here, and this node.

        Args:
            neighbours: those that our own membership vouches for.
            doubted: those that it holds dead, and since when.
            now: what is past its lifetime by then does not count.
        """
        own = self._own.author
        living: set[NodeId] = {own}
        waiting = list(neighbours)
        while waiting:
            node = waiting.pop()
            entry = self._entries.get(node)
            if node in living or entry is None or self._is_past(entry, now) or entry.heard.card.leaving:
                continue
            living.add(node)
            for link in entry.heard.links:
                if link.target in living:
                    continue
                verdict = doubted.get(link.target)
                if verdict is None or entry.received >= verdict + self._bounds.doubt_seconds:
                    waiting.append(link.target)
        return frozenset(living)

    def topology(self, live: Collection[NodeId], own_card: NodeCard) -> Topology:
        """The living nodes' cards, and the links among them.

        `own_card` is this node's as it is now, which may be a moment ahead of what it announced. Links are
        those announced, also its own, so that nodes that have heard the same have the same topology.
        """
        held = [heard for node in live if (heard := self.get(node)) is not None]
        cards = (own_card if heard.author == own_card.node_id else heard.card for heard in held)
        return Topology.of(cards, (link for heard in held for link in heard.links))

    def statistics(self) -> ViewStatistics:
        return ViewStatistics(len(self._entries) + 1, self._bytes + self._own.size_bytes, len(self._expired))

    # --- inside ---------------------------------------------------------------------------------

    def _is_past(self, entry: _Entry, now: float) -> bool:
        return now - entry.received >= self._bounds.lifetime_seconds * rarity(self.count)

    def _drop(self, node: NodeId, now: float) -> None:
        entry = self._entries.pop(node)
        self._bytes -= entry.heard.size_bytes
        self._expired[node] = (entry.heard.card.order, now)
        if len(self._expired) > self._bounds.max_nodes:
            del self._expired[next(iter(self._expired))]  # the one expired longest: dicts keep their order

    def _make_room(self, heard: Heard, old: _Entry | None, now: float) -> bool:
        """Whether `heard` fits, if need be after dropping what has expired. The living are never pushed out."""
        if self._fits(heard, old):
            return True
        self.expire(now)
        return self._fits(heard, self._entries.get(heard.author))

    def _fits(self, heard: Heard, old: _Entry | None) -> bool:
        nodes = len(self._entries) + 1 + (old is None)
        size = self._bytes + heard.size_bytes - (old.heard.size_bytes if old else 0)
        return nodes <= self._bounds.max_nodes and size <= self._bounds.max_bytes


@functools.lru_cache(maxsize=8192)
def slice_of(node: NodeId) -> int:
    return hashlib.blake2b(node.encode(), digest_size=1).digest()[0] % SLICES


def _rank(heard: Heard) -> tuple[Order, bytes]:
    return (heard.card.order, heard.signed.payload)
