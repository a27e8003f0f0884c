"""Which nodes, in which order: the fewest that hold the model, and among those the quickest way round.

A *way* is a pipeline that is still open: the nodes so far, the boundary they reach when each is
filled to the brim, and the link time so far. Ways grow by one node at a time; one whose new node
holds all that is left is closed, and with the hop back to its first node it is a candidate. Of two
open ways with the same nodes, the same first and the same last, one that reaches no further and
costs no less is dropped: whatever completes it completes the other. Up to `EXACT_NODES` nothing
else is dropped, so the answer is the optimum (a test holds it against all orders and cuts). The
growth is Held and Karp's (1962), over sets of nodes rather than orders, with memory as the second
criterion. A full mesh of 12 has 119 million directed cycles; none of them is enumerated.

Beyond that the ways of each length are cut to a beam: most of it by (fewest nodes that could still
finish, link time), the rest by what they reach, so that a tight mesh is not lost to short links.
Then the count of nodes may be above the optimum, and a mesh that fits only by a hair may be refused.
Cost: O(nodes² × beam) at worst.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

EXACT_NODES = 8
"""The exact search takes 50 ms on 8 nodes of which 7 are needed, and about 4 times more with each further one."""
BEAM = 32
"""Ways of each length that are grown. Four times as many take three times the time, and find up to 5 % less link
time where 21 of 32 nodes are needed (random round trips, the worst case), nothing at 3 and 11."""
BEAM_BY_REACH = 8
"""Of the beam: 8 keep the ways alive that reach furthest."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """A closed pipeline of nodes, by index, in order."""

    order: tuple[int, ...]
    cost: int
    """Price of its nodes and nanoseconds of its hops, the way back among them."""


@dataclass(frozen=True, slots=True)
class _Way:
    order: tuple[int, ...]
    members: int
    """Bit set of `order`."""
    reach: int
    cost: int


def cycles(
    reach: Sequence[Sequence[int]],
    hop: Callable[[int, int], int],
    price: Sequence[int],
) -> list[Cycle]:
    """The best order of each set of nodes that fits: fewest nodes first, then cost, then order.

    Stops one node above the fewest, so that a preview can say what one more would cost.

    Args:
        reach: per node and boundary index, the furthest index that a stage starting there can end at.
        hop: nanoseconds from one node to another.
        price: what taking a node costs by itself, in the same currency.
    """
    end = len(reach[0]) - 1 if reach else 0
    nodes = range(len(reach))
    beam = _Beam(reach) if len(reach) > EXACT_NODES else None
    hops: dict[int, list[int]] = {}

    def hops_from(source: int) -> list[int]:
        if source not in hops:
            hops[source] = [hop(source, target) if source != target else 0 for target in nodes]
        return hops[source]

    found: list[Cycle] = []
    ways = [_Way((), 0, 0, 0)]
    fewest = 0
    for size in range(1, len(reach) + 1):
        closed: dict[int, Cycle] = {}
        open_ways: dict[tuple[int, int, int], list[_Way]] = {}
        for way in ways:
            row = hops_from(way.order[-1]) if way.order else None
            for node in nodes:
                if way.members >> node & 1:
                    continue
                furthest = reach[node][way.reach]
                order = (*way.order, node)
                cost = way.cost + price[node] + (row[node] if row else 0)
                members = way.members | 1 << node
                if furthest == end:
                    cycle = Cycle(order, cost + (hop(node, order[0]) if way.order else 0))
                    rival = closed.get(members)
                    if rival is None or (cycle.cost, order) < (rival.cost, rival.order):
                        closed[members] = cycle
                    # As a stage that is not the last it leaves the last block to others.
                    furthest = end - 1
                if furthest > way.reach:
                    _keep(open_ways.setdefault((members, order[0], node), []), _Way(order, members, furthest, cost))
        found += sorted(closed.values(), key=lambda cycle: (cycle.cost, cycle.order))
        if found and (fewest := fewest or size) < size:
            break
        ways = [way for kept in open_ways.values() for way in kept]
        if beam:
            ways = beam.best(ways)
    return found


def _keep(kept: list[_Way], new: _Way) -> None:
    """Add `new` to ways of the same nodes and ends unless one of them is as good; drop those that it betters."""
    if any(way.reach >= new.reach and way.cost <= new.cost for way in kept):
        return
    kept[:] = [way for way in kept if way.reach > new.reach or way.cost < new.cost]
    kept.append(new)


class _Beam:
    """Chooses the ways worth growing in a mesh too large for all of them."""

    def __init__(self, reach: Sequence[Sequence[int]]) -> None:
        self._end = len(reach[0]) - 1
        self._blocks = [max(end - start for start, end in enumerate(ends)) for ends in reach]
        """The most blocks that each node could hold anywhere."""
        self._by_blocks = sorted(range(len(reach)), key=lambda node: (-self._blocks[node], node))
        self._fewest = bisect_left(list(accumulate(self._blocks[node] for node in self._by_blocks)), self._end) + 1
        """No fewer nodes than these hold everything."""

    def best(self, ways: list[_Way]) -> list[_Way]:
        if len(ways) <= BEAM:
            return ways
        # A way of n nodes leaves the largest others within the first n + fewest.
        largest = self._by_blocks[: len(ways[0].order) + self._fewest]
        missing: dict[int, list[int]] = {}
        for way in ways:
            if way.members not in missing:
                others = [self._blocks[node] for node in largest if not way.members >> node & 1]
                missing[way.members] = list(accumulate(others, initial=0))

        def promise(way: _Way) -> tuple[int, int, tuple[int, ...]]:
            """Fewest further nodes that could finish it, then cost, then order."""
            return bisect_left(missing[way.members], self._end - way.reach), way.cost, way.order

        chosen = sorted(ways, key=promise)[: BEAM - BEAM_BY_REACH]
        taken = {way.order for way in chosen}
        rest = (way for way in ways if way.order not in taken)
        return chosen + sorted(rest, key=lambda way: (-way.reach, way.cost, way.order))[:BEAM_BY_REACH]
