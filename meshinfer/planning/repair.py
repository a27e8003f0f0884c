"""The next epoch of an instance that lost seats: keep what is warm, fill the holes.

Where no seat is lost (a step was late, a channel broke, and everyone lives), the next epoch is the same placement:
nothing is loaded at all. A seat that is to blame after all fails by itself, and is the hole of the epoch after. Unless
two that have a channel do not see each other any more, though all others see both, or one of them dials the other's
runners in vain: then one of the two has to go, and rather the one of which more such pairs are known.

A warm seat's layers are in memory already, so a placement that leaves all of them where they are
answers again as soon as the holes are loaded; any other moves more bytes than were lost. Each hole
is filled by a node that holds the model's files, if there is one: by the one that had the seat, if it lives (a runner
crashed: the files are in its page cache, and a spare process waits there), else by the one with which the tokens' way
round is shortest. Pure; every candidate goes through the planner's own check of memory and cut points.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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

MAX_TORN = 64
"""Ways to choose one of each two that are apart: all for six such pairs."""
Hop = tuple[NodeId, NodeId]
"""In the direction in which a channel is dialled and tokens travel."""


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
    Empty if nothing is warm, or no live node can fill a hole.
    """
    broken = broken_channels(old, topology)
    found: list[tuple[tuple[int, int, bool, int, int, float, tuple[NodeId, ...]], Plan]] = []
    for holes in _holes(old, lost, broken):
        warm = {seat.node_id for index, seat in enumerate(old.seats) if index not in holes}
        # A node that has a seat already goes last: a second runner costs its overhead twice.
        order = sorted(topology.by_id, key=lambda node: (node in warm, not _holds(topology, node, card), node))
        before = [old.seats[index].node_id for index in holes]
        goes = {*before}
        left_alone = sum(goes.isdisjoint(hop) for hop in topology.blocked)
        orders = [sorted(order, key=lambda node, had=had: node != had) for had in before]
        for nodes in islice(product(*orders), MAX_TRIED):
            seats = list(old.seats)
            for index, node in zip(holes, nodes, strict=True):
                seats[index] = replace(seats[index], node_id=node)
            placement = replace(old, seats=tuple(seats))
            if crosses(placement, broken):
                continue
            verdict = validate_placement(
                placement, topology, card, may_fetch=True, prefill_chunk_tokens=prefill_chunk_tokens
            )
            if isinstance(verdict, Plan):
                fetches = sum(not _holds(topology, node, card) for node in nodes)
                moved = [node for node, had in zip(nodes, before, strict=True) if node != had]
                used = [seat.node_id for seat in seats]
                doubled = any(used.count(node) > 1 for node in moved)
                rank = (len(holes), left_alone, doubled, fetches, len(moved), verdict.predicted_hop_seconds, nodes)
                found.append((rank, verdict))
    found.sort(key=lambda scored: scored[0])
    return tuple(plan for _, plan in found)


def broken_channels(old: Placement, topology: Topology) -> frozenset[Hop]:
    """Hops of `old` between living nodes that do not see each other (any more), both ways, or whose runners are dialled in
    vain, that way.
    """
    hops = cycle_hops([seat.node_id for seat in old.seats])
    torn = {hop for hop in hops if topology.by_id.keys() >= {*hop} and not _see_each_other(topology, hop)}
    return frozenset({*torn, *((target, source) for source, target in torn), *topology.blocked.intersection(hops)})


def crosses(placement: Placement, broken: Collection[Hop]) -> bool:
    """Whether one of its channels is one of `broken`. The last stage and the head have one, too: over it each token comes
    back.
    """
    return any(hop in broken for hop in cycle_hops([seat.node_id for seat in placement.seats]))


def _holes(old: Placement, lost: Collection[int], broken: Collection[Hop]) -> Iterator[tuple[int, ...]]:
    """Sets of seats to fill: those that are lost, and of each two with a broken channel the one or the other."""
    count = len(old.seats)
    torn = [
        (index, (index + 1) % count)
        for index in range(count)
        if (old.seats[index].node_id, old.seats[(index + 1) % count].node_id) in broken
    ]
    apart = [pair for pair in torn if not {*pair} & {*lost}]
    choices = {tuple(sorted({*lost, *chosen})) for chosen in islice(product(*apart), MAX_TORN)}
    return (holes for holes in sorted(choices) if len(holes) < count)


def _see_each_other(topology: Topology, hop: Hop) -> bool:
    return hop in topology.link_between and hop[::-1] in topology.link_between


def _holds(topology: Topology, node: NodeId, card: ModelCard) -> bool:
    return any((model.model_id, model.digest) == (card.model_id, card.digest) for model in topology.by_id[node].models)
