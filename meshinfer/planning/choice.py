"""Which placements are worth proposing: the quickest of one kind (pipelines, groups, both), best first.

    pools of nodes ─► orders, under a cap on chunk time (`orders`) ─► cuts of each order (`quickest`) ─► ranking
                           ▲                                             │
                           └──────────── a lower cap while it can pay ───┘

Up to POOL nodes are searched together. In a larger mesh each node is looked at as a head with the nodes it
has measured links to: the most promising heads' neighbourhoods are the pools, and every node that could hold
it all alone is priced too. So the cost of a plan hardly grows with the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshinfer.planning.holders import Holder
from meshinfer.planning.orders import Orders
from meshinfer.planning.problem import Problem
from meshinfer.planning.quickest import Cuts, quickest_cuts
from meshinfer.planning.rows import NEVER, alone

EXACT_NODES = 8
"""The exact search takes some tens of milliseconds up to here, and about four times more with each further node."""
EXACT_HOLDERS = 48
"""With groups there are more holders than nodes: so many are searched exactly."""
POOL = 40
POOLS = 3
"""Neighbourhoods that are searched in a larger mesh; a second or third finds what the estimate of the first missed."""
CAP_FACTOR = 0.8
"""Each cap on chunk times is lower by so much. The cuts of each order are refined in much smaller steps afterwards."""
EXACT_CAP_FACTOR = 0.95
"""In the exact search: what lies between two caps is missed by a twentieth of the bottleneck's share at most, and by
far less where the same order is found under both."""
MOST_CAPS = 48
"""A bound, not a goal: a search ends when no lower cap can pay, after 1 to 20."""
CUT_ORDERS = 12
"""Orders of each search whose cuts are found; a preview shows no more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Stages in pipeline order, with their best cuts."""

    stages: tuple[Holder, ...]
    cuts: Cuts

    @property
    def members(self) -> int:
        return sum(stage.members for stage in self.stages)

    @property
    def key(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Cost first, then the nodes, so that the order is total."""
        return self.cuts.cost, tuple(stage.nodes for stage in self.stages)


def quickest(problem: Problem) -> list[Choice]:
    """Pipelines, best first, the best of each set of nodes."""
    best: dict[int, Choice] = {}
    for pool in pools(problem):
        holders = [problem.holder(index) for index in pool]
        _search(problem, holders, best, is_exact=len(pool) <= EXACT_NODES)
    return sorted(best.values(), key=lambda choice: choice.key)


def quickest_with_groups(
    problem: Problem, groups: Sequence[Holder], singles: Sequence[Holder], least_stages: int
) -> list[Choice]:
    """The same of pipelines in which at least one stage is one of `groups`."""
    best: dict[int, Choice] = {}
    if least_stages == 1:
        for group in groups:
            cuts = quickest_cuts([group], 0, 0, problem.terms.further_chunks)
            if cuts is not None and not problem.required & ~group.members:
                best[group.members] = Choice((group,), cuts)
    else:
        holders = [*groups, *singles]
        exact = len(holders) <= EXACT_HOLDERS
        _search(problem, holders, best, is_exact=exact, least_stages=least_stages, groups=len(groups))
    return sorted(best.values(), key=lambda choice: choice.key)


def _search(
    problem: Problem,
    holders: Sequence[Holder],
    best: dict[int, Choice],
    *,
    is_exact: bool,
    least_stages: int = 1,
    groups: int = 0,
) -> None:
    """Add to `best` what is found among `holders`, of which the first `groups` are groups, one of them needed."""
    if not holders:
        return
    k = problem.terms.further_chunks
    hops: dict[tuple[int, int], int] = {}
    transfers: dict[tuple[int, int], int] = {}
    backs: dict[tuple[int, int], int] = {}

    def hop(before: int, after: int) -> int:
        key = before, after
        if key not in hops:
            if holders[before].members & holders[after].members:
                hops[key] = NEVER
            else:
                hops[key] = problem.hop(holders[before], holders[after])
        return hops[key]

    def transfer(before: int, after: int) -> int:
        key = before, after
        if key not in transfers:
            transfers[key] = problem.transfer(holders[before], holders[after])
        return transfers[key]

    def back(last: int, first: int) -> int:
        key = last, first
        if key not in backs:
            if holders[last].members & holders[first].members:
                backs[key] = NEVER
            else:
                backs[key] = problem.back(holders[last], holders[first])
        return backs[key]

    def keep(order: tuple[int, ...]) -> None:
        pairs = list(pairwise(order))
        way = sum(hop(*pair) for pair in pairs) + (back(order[-1], order[0]) if pairs else 0)
        slowest = max((transfer(*pair) for pair in pairs), default=0) if k else 0
        stages = [holders[index] for index in order]
        cuts = quickest_cuts(stages, way, slowest, k)
        if cuts is not None:
            choice = Choice(tuple(stages), cuts)
            rival = best.get(choice.members)
            if rival is None or choice.key < rival.key:
                best[choice.members] = choice

    cap: int | None = None
    starts: list[tuple[int, ...]] = []
    factor = EXACT_CAP_FACTOR if is_exact else CAP_FACTOR
    for _ in range(MOST_CAPS):
        limit = NEVER if cap is None else cap
        to_beat = min((choice.cuts.cost for choice in best.values()), default=NEVER)
        if cap is not None:
            # What has its bottleneck below the next cap is found there; all else pays for a larger one.
            to_beat -= k * int(cap * factor)
        search = Orders(
            holders if cap is None else [holder.capped(limit) for holder in holders],
            hop if cap is None else lambda a, b, limit=limit: hop(a, b) if transfer(a, b) <= limit else NEVER,
            back,
            required=problem.required,
            least_stages=least_stages,
            one_of=frozenset(range(groups)),
            to_beat=to_beat,
        )
        search.by_moves(starts)
        if is_exact:
            search.exactly()
        found = search.found[:CUT_ORDERS]
        for order in found:
            keep(order.holders)
        if not k or not found or found[0].cost >= min(choice.cuts.cost for choice in best.values()):
            return
        # What follows takes at least this long without its bottleneck, which must be smaller to pay.
        top = found[0].holders
        slowest = max((transfer(*pair) for pair in pairwise(top)), default=0)
        cuts = quickest_cuts([holders[index] for index in top], 0, slowest, 0)
        bottleneck = cuts.bottleneck if cuts else limit
        cap = int(min(limit, bottleneck) * factor)
        starts = [order.holders for order in found[:2]]


# --- large meshes -------------------------------------------------------------------------------


def pools(problem: Problem) -> list[list[int]]:
    """Nodes to search together, by index, ascending: all of them, or the most promising neighbourhoods."""
    count = len(problem.nodes)
    if count <= POOL:
        return [list(range(count))]
    last = len(problem.bounds) - 1
    holders = [problem.holder(index) for index in range(count)]
    blocks = [max(end - start for start, end in enumerate(holder.latest)) for holder in holders]
    rates = [holder.run[-1] // last for holder in holders]
    index_of = {node.node_id: index for index, node in enumerate(problem.nodes)}
    per_message = problem.terms.steps * 10**12
    near: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    for link in problem.topology.links:
        source, target = index_of.get(link.source), index_of.get(link.target)
        if source is not None and target is not None and blocks[target]:
            # What a block there costs, its share of the stage and of the way included.
            once = holders[target].once + per_message * link.rtt_seconds / 2
            near[source].append((rates[target] + once / blocks[target], target))
    size = max(POOL, 2 * _fewest(blocks, last))
    ranked: list[tuple[float, int]] = []
    for index in range(count):
        near[index].sort()
        left, total = last - blocks[index], float(min(blocks[index], last) * rates[index] + holders[index].once)
        for each, other in near[index]:
            if left <= 0:
                break
            total += min(left, blocks[other]) * each
            left -= blocks[other]
        if left <= 0:
            ranked.append((total, index))
    ranked.sort()
    required = [index for index in range(count) if problem.required >> index & 1]
    singles = sorted((cost, index) for index in range(count) if (cost := alone(holders[index])) < NEVER)
    found: list[list[int]] = []
    covered: set[int] = set()
    for _, head in ranked:
        if head in covered:
            continue
        pool = list(dict.fromkeys((*required, head, *(other for _, other in near[head][: size - 1]))))
        covered.update(pool)
        found.append(sorted({*pool, *(index for _, index in singles[:2])}))
        if len(found) == POOLS:
            break
    if not found:
        # No neighbourhood has room: the largest nodes of all, whose links are estimates or assumptions.
        largest = sorted(range(count), key=lambda index: (-blocks[index], rates[index], index))
        found.append(sorted({*required, *largest[:size]}))
    return found


def _fewest(blocks: Sequence[int], needed: int) -> int:
    """Nodes that are needed at least."""
    total = 0
    for count, each in enumerate(sorted(blocks, reverse=True), start=1):
        total += each
        if total >= needed:
            return count
    return len(blocks)
