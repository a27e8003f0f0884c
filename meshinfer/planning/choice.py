"""Which placements are worth proposing: the quickest of one kind (pipelines, groups, both), best first.

    pools of nodes ─► orders, under a cap on chunk time (`orders`) ─► cuts of each order (`quickest`) ─► ranking
                           ▲                                             │
                           └──────────── a lower cap while it can pay ───┘

Up to POOL nodes are searched together. In a larger mesh each node is looked at as a head with the nodes it
has measured links to: the most promising heads' neighbourhoods are the pools, and every node that could hold
it all alone is priced too. So the cost of a plan hardly grows with the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshinfer.planning.holders import Holder
from meshinfer.planning.orders import Orders
from meshinfer.planning.problem import Problem
from meshinfer.planning.quickest import Cuts, quickest_cuts
from meshinfer.planning.rows import NEVER, alone

EXACT_NODES = 8
"""The exact search takes some tens of milliseconds up to here, and about four times more with each further node."""
EXACT_CHUNKED_WORK = 240
"""Nodes × blocks, where prompts have several chunks: the exact search is run for a dozen caps then, half a second."""
EXACT_GROUP_NODES = 5
"""With groups there are six times more holders than nodes."""
POOL = 40
POOLS = 3
"""Neighbourhoods that are searched in a larger mesh; a second or third finds what the estimate of the first missed."""
CAPS = (1.02, 0.8, 0.65)
"""Of the best bottleneck so far: caps on chunk times that are tried next, until none of them helps."""
MOST_SEARCHES = 12
"""A bound, not a goal: 1 for prompts of one chunk, 4 to 7 for others."""
EXACT_CAP_FACTOR = 0.9
"""The exact search takes all caps in turn, each lower by so much, as long as one of them may pay."""
POLISHING_ROUNDS, POLISHING_NODES = 8, 6
"""Of the best order where the bottleneck counts: the searches under caps do not see that a node more lowers it."""
CUT_ORDERS, CUT_ORDERS_CAPPED = 12, 4
"""Orders of a search whose cuts are found, without and with a cap; a preview shows no more."""


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
        exact = len(pool) <= EXACT_NODES
        if problem.terms.further_chunks:
            exact = exact and len(pool) * len(problem.bounds) <= EXACT_CHUNKED_WORK
        found: dict[int, Choice] = {}
        _search(problem, holders, found, is_exact=exact)
        for members, choice in found.items():
            rival = best.get(members)
            if rival is None or choice.key < rival.key:
                best[members] = choice
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
        exact = len(problem.nodes) <= EXACT_GROUP_NODES
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
    # Looked up often: the same few thousand pairs under every cap.
    hop, transfer, back = (_table(holders, each) for each in (problem.hop, problem.transfer, problem.back))
    cut: set[tuple[int, ...]] = set()

    def is_candidate(order: tuple[int, ...]) -> bool:
        members = sum(holders[index].members for index in order)
        return not problem.required & ~members and (not groups or min(order) < groups)

    def keep(order: tuple[int, ...]) -> None:
        if order in cut or not is_candidate(order):
            return
        cut.add(order)
        pairs = list(pairwise(order))
        way = sum(hop(*pair) for pair in pairs) + (back(order[-1], order[0]) if pairs else 0)
        slowest = max((transfer(*pair) for pair in pairs), default=0) if k else 0
        stages = [holders[index] for index in order]
        cuts = quickest_cuts(stages, way, slowest, k, rival=least())
        if cuts is not None:
            choice = Choice(tuple(stages), cuts)
            rival = best.get(choice.members)
            if rival is None or choice.key < rival.key:
                best[choice.members] = choice

    def search(
        cap: int | None, starts: Sequence[tuple[int, ...]], to_beat: Callable[[], int] | None = None
    ) -> list[tuple[int, ...]]:
        """Orders under a cap on chunk times: by moves, or exactly those below `to_beat`."""
        orders = Orders(
            holders if cap is None else [holder.capped(cap) for holder in holders],
            hop if cap is None else lambda a, b: hop(a, b) if transfer(a, b) <= cap else NEVER,
            back,
            required=problem.required,
            least_stages=least_stages,
            one_of=frozenset(range(groups)),
            to_beat=to_beat or (lambda: NEVER),
            found=keep if to_beat else None,
        )
        if to_beat is not None:
            orders.exactly()
            return []
        orders.by_moves(starts)
        found = [order.holders for order in orders.found[: CUT_ORDERS if cap is None else CUT_ORDERS_CAPPED]]
        for order in found:
            keep(order)
        return found[:2]

    def least() -> int:
        return min((choice.cuts.cost for choice in best.values()), default=NEVER)

    index_of = {holder: index for index, holder in enumerate(holders)}

    def polish() -> None:
        """Moves of the best order by its true J: to leave a stage out, to put another beside it."""
        by_rate = sorted(range(len(holders)), key=lambda index: (holders[index].run[-1], index))
        for _ in range(POLISHING_ROUNDS):
            before, choice = least(), min(best.values(), key=lambda each: each.key)
            order = tuple(index_of[stage] for stage in choice.stages)
            for place in range(len(order)):
                if len(order) > max(1, least_stages):
                    keep((*order[:place], *order[place + 1 :]))
            others = [index for index in by_rate if not holders[index].members & choice.members]
            for index in others[:POLISHING_NODES]:
                ways = [(*order[:place], index, *order[place:]) for place in range(len(order) + 1)]
                keep(min(ways, key=lambda way: (sum(map(hop, way[:-1], way[1:])) + back(way[-1], way[0]), way)))
            if least() >= before:
                return

    starts = search(None, ())
    # What this build cannot run is not worth as many searches.
    caps = CAPS[:1] if groups else CAPS
    searches, factors = 1, list(caps)
    while k and best and factors and searches < MOST_SEARCHES:
        before, bottleneck = least(), min(best.values(), key=lambda choice: choice.key).cuts.bottleneck
        starts = search(int(bottleneck * factors.pop(0)), starts) or starts
        searches += 1
        if least() < before - before // 1000:
            factors = list(caps)
    if k and best:
        polish()
    if not is_exact:
        return
    if not k:
        search(None, (), least)
        return
    cap = max(holder.chunk_cost(0, len(holder.run) - 1) for holder in holders)
    smallest = min(holder.chunk_once for holder in holders) + 1
    while cap > smallest:
        # What has its bottleneck below the next cap is found there; all else pays for a larger one.
        following = int(cap * EXACT_CAP_FACTOR)
        if least() > k * following:
            search(cap, (), lambda following=following: least() - k * following)
        cap = following


def _table(holders: Sequence[Holder], price: Callable[[Holder, Holder], int]) -> Callable[[int, int], int]:
    """`price` of two holders, by index; NEVER where they share a node."""
    known: dict[tuple[int, int], int] = {}

    def look(one: int, other: int) -> int:
        key = one, other
        if key not in known:
            shared = holders[one].members & holders[other].members
            known[key] = NEVER if shared else price(holders[one], holders[other])
        return known[key]

    return look


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
