"""Tensor groups worth looking at: which nodes could hold a stage together, as its ranks.

Every rank waits for the others twice in each layer, so a group pays only on quick links: with equal ranks it
is slower than one of them alone unless the one-way latency is below T / (4 L p) (`cost.all_reduces_seconds`).
In a small mesh every set of nodes of a legal degree is a group; in a larger one each node with those to
which it has the quickest links, if the group computes a layer faster than the slowest of its nodes.
"""

from __future__ import annotations

from itertools import combinations

from meshinfer.planning.holders import Holder
from meshinfer.planning.problem import Problem

EVERY_GROUP_NODES = 6
MOST_GROUPS = 16
"""In a larger mesh."""
MOST_NODES = 24
"""Of a larger mesh: those that compute fastest are looked at."""


def groups(problem: Problem) -> list[Holder]:
    """Candidates, in a fixed order."""
    count = len(problem.nodes)
    degrees = [degree for degree in problem.card.tensor_degrees if degree <= count]
    if count <= EVERY_GROUP_NODES:
        sets = [members for degree in degrees for members in combinations(range(count), degree)]
        return [problem.group(members) for members in sets]
    last = len(problem.bounds) - 1
    quick = sorted(range(count), key=lambda index: (problem.holder(index).run[last], index))[:MOST_NODES]
    found: dict[tuple[int, ...], Holder] = {}
    for seed in quick:
        near = sorted(
            (other for other in quick if other != seed), key=lambda other: (_way(problem, seed, other), other)
        )
        for degree in degrees:
            members = tuple(sorted((seed, *near[: degree - 1])))
            if len(members) == degree and members not in found:
                found[members] = problem.group(members)
    useful = [
        holder
        for holder in found.values()
        if holder.run[last] < max(problem.holder(index).run[last] for index in holder.nodes)
    ]
    # The quickest pair of all is shown even if it does not pay, with its numbers.
    chosen = useful or sorted(found.values(), key=lambda holder: (holder.run[last], holder.nodes))[:1]
    return sorted(chosen, key=lambda holder: (holder.run[last], holder.nodes))[:MOST_GROUPS]


def _way(problem: Problem, one: int, other: int) -> float:
    there, back = problem.link(one, other).speed, problem.link(other, one).speed
    return there.latency_seconds + there.message_seconds + back.latency_seconds + back.message_seconds
