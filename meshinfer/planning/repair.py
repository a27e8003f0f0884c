"""The next epoch of an instance that lost seats: keep what is warm, fill the holes.

Where no seat is lost (a step was late, a channel broke, and everyone lives), the next epoch is the same placement:
nothing is loaded at all. A seat that is to blame after all fails by itself, and is the hole of the epoch after.

A warm seat's layers are in memory already, so a placement that leaves all of them where they are
answers again as soon as the holes are loaded; any other moves more bytes than were lost. Each hole
is filled by the node with which the tokens' way round is shortest, those that hold the model's
files first. Pure; every candidate goes through the planner's own check of memory and cut points.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import islice, product

from meshinfer.base.ids import NodeId
from meshinfer.planning.hops import cycle_hops
from meshinfer.planning.memory import PREFILL_CHUNK_TOKENS
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Plan
from meshinfer.planning.planner import validate_placement
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement

MAX_TRIED = 256
"""Combinations of nodes for the holes that are looked at: all for one hole among 256 nodes, or two among 16. Each costs
some 0.1 ms; more holes than that are better planned anew."""


def repairs(
    old: Placement,
    lost: Collection[int],
    topology: Topology,
    card: ModelCard,
    *,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> tuple[Plan, ...]:
    """Placements like `old` with the `lost` seats (indices) on other live nodes, best first.

    `topology` counts the memory of the warm seats as free, since the next epoch takes it over.
    Empty if nothing is warm, no live node can fill a hole, or nothing is lost but two nodes that have a channel do not
    see each other. The last stage and the head have one, too: over it each token comes back.
    """
    holes = sorted(lost)
    if len(holes) == len(old.seats):
        return ()
    channels = cycle_hops([seat.node_id for seat in old.seats])
    if not holes and not all(_see_each_other(topology, channel) for channel in channels):
        return ()
    warm = {seat.node_id for index, seat in enumerate(old.seats) if index not in lost}
    # A node that has a seat already goes last: a second runner costs its overhead twice.
    order = sorted(topology.by_id, key=lambda node: (node in warm, not _holds(topology, node, card), node))
    found: list[tuple[tuple[bool, int, float, tuple[NodeId, ...]], Plan]] = []
    for nodes in islice(product(order, repeat=len(holes)), MAX_TRIED):
        seats = list(old.seats)
        for index, node in zip(holes, nodes, strict=True):
            seats[index] = replace(seats[index], node_id=node)
        verdict = validate_placement(
            replace(old, seats=tuple(seats)), topology, card, may_fetch=True, prefill_chunk_tokens=prefill_chunk_tokens
        )
        if isinstance(verdict, Plan):
            fetches = sum(not _holds(topology, node, card) for node in nodes)
            doubled = not warm.isdisjoint(nodes) or len(set(nodes)) < len(nodes)
            found.append(((doubled, fetches, verdict.predicted_hop_seconds, nodes), verdict))
    found.sort(key=lambda scored: scored[0])
    return tuple(plan for _, plan in found)


def _see_each_other(topology: Topology, pair: tuple[NodeId, NodeId]) -> bool:
    return pair in topology.link_between and pair[::-1] in topology.link_between


def _holds(topology: Topology, node: NodeId, card: ModelCard) -> bool:
    return any((model.model_id, model.digest) == (card.model_id, card.digest) for model in topology.by_id[node].models)
