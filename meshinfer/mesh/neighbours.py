"""Whom a node wants to be connected to: everyone in a small mesh, a few in a large one. Pure.

Each connection is probed and carries gossip, so in a mesh of any size a node should have a bounded
number of them. Every pair of nodes has a weight, a hash of the two ids, and each node wants those
with whom it weighs least. Both ends compute the same weight without a word; a node that joins or
leaves changes only what it is itself a part of (rendezvous hashing, on pairs); and the graph of
everyone's few lightest pairs is a random one of minimum degree `NEIGHBOURS`, which hangs together
even with several nodes gone. A node has 8 that it wants and those that want it: 11 or 12 in all.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from meshinfer.base.ids import NodeId

FULL_MESH_NODES = 16
"""Up to here everyone is everyone's neighbour: every link is measured, and a planner knows all of them."""
NEIGHBOURS = 8
"""Wanted beyond that."""
MAX_WEIGHED = 4096
"""Pairs whose weight is remembered: twice as many as a view has nodes. Hashing 1,000 anew takes 2 ms, at each event."""
STRANGERS = 8
"""How many nodes that only a hint speaks of are tried at a time while neighbours are lacking …"""
STRANGERS_WHEN_CONTENT = 2
"""… and when none are: the other half of a mesh that was cut in two is a stranger, and must be found again."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whom to be connected to; the most wanted first."""

    neighbours: tuple[NodeId, ...]
    strangers: tuple[NodeId, ...]
    """Perhaps alive, perhaps not."""
    strangers_at_once: int


def rarity(nodes: int) -> float:
    """By how much rarer each node repeats itself among so many, so that hearing all costs what it does in a full mesh."""
    return max(1.0, nodes / FULL_MESH_NODES)


def wanted(
    own: NodeId, present: Collection[NodeId], heard_of: Collection[NodeId], failing: Collection[NodeId]
) -> Wanted:
    """Whom this node wants.

    Args:
        own: this node.
        present: everyone of whom this node holds a card.
        heard_of: nodes that discovery or the address book speak of, alive or not.
        failing: those of both that could not be reached lately; they do not take another's place.
    """
    others = sorted({*present} - {own}, key=lambda node: _weight(own, node))
    strangers = sorted({*heard_of} - {*present, own}, key=lambda node: (node in failing, _weight(own, node)))
    if len(others) < FULL_MESH_NODES:
        return Wanted(tuple(others), tuple(strangers), STRANGERS)
    reachable = [node for node in others if node not in failing]
    if len(reachable) < NEIGHBOURS:
        return Wanted(tuple(others), tuple(strangers), STRANGERS)
    farthest = others.index(reachable[NEIGHBOURS - 1])
    return Wanted(tuple(others[: farthest + 1]), tuple(strangers), STRANGERS_WHEN_CONTENT)


def most_wanted(
    own: NodeId, nodes: Collection[NodeId], limit: int, first: Collection[NodeId] = ()
) -> frozenset[NodeId]:
    """Those `limit` of `nodes` that are in `first`, or else with whom this node weighs least: all whom it wants and who
    want it are among them as long as `first` leaves room for two dozen.

    A node has more connections than anybody wants where it was there before the mesh was large, or many started at
    once; links to those can go untold, but a node to which nobody tells a link would be taken for gone.
    """
    return frozenset(sorted(nodes, key=lambda node: (node not in first, _weight(own, node)))[:limit])


@functools.lru_cache(maxsize=MAX_WEIGHED)
def _weight(one: NodeId, other: NodeId) -> bytes:
    first, second = sorted((one, other))
    return hashlib.blake2b(f"{first} {second}".encode(), digest_size=16).digest()
