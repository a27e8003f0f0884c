"""Which placements are worth proposing: the quickest of one kind (pipelines, groups, both), best first.

    pools of nodes ─► orders by moves (`orders`) ─► small mesh: what the moves missed ─► ranking
                           └─ cuts of each order (`quickest`) ─┘

Up to POOL nodes are searched together. In a larger mesh each node is looked at as a head with the nodes it
has measured links to: the most promising heads' neighbourhoods are the pools, and every node that could hold
it all alone is priced too. So the cost of a plan hardly grows with the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshinfer.planning.holders import Holder
from meshinfer.planning.orders import STARTS, Orders
from meshinfer.planning.problem import Problem
from meshinfer.planning.quickest import Cuts, quickest_cuts
from meshinfer.planning.rows import NEVER, alone

EXACT_NODES = 7
"""The exact search takes up to a tenth of a second here, with 80 layers, and some three times more with each further node."""
EXACT_CHUNKED_WORK = 240
"""Holders × blocks, where prompts have several chunks: the exact search is run for a dozen caps then, half a second."""
EVERY_ORDER_HOLDERS = 6
"""Beyond that work: every order is looked at, if there are no more holders than these."""
EXACT_GROUP_NODES = 5
"""With groups there are six times more holders than nodes."""
POOL = 40
POOLS = 3
"""Neighbourhoods that are searched in a larger mesh; a second or third finds what the estimate of the first missed."""
EXACT_CAP_FACTOR = 0.9
"""The exact search takes all caps in turn, each lower by so much, as long as one of them may pay."""
CUT_ORDERS = 12
"""Orders whose cuts are kept; a preview shows no more."""
FINELY_CUT = 2
"""Of these, where the bottleneck counts: the search cuts near a guess of it, and these get the best there is."""


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
    # Looked up often: the same few thousand pairs in every search.
    hop, transfer, back = (_table(holders, each) for each in (problem.hop, problem.transfer, problem.back))

    def offer(order: tuple[int, ...], cuts: Cuts) -> None:
        choice = Choice(tuple(holders[index] for index in order), cuts)
        rival = best.get(choice.members)
        if rival is None or choice.key < rival.key:
            best[choice.members] = choice

    def cut(order: tuple[int, ...]) -> None:
        """Offer `order` with the best cuts there are."""
        pairs = list(pairwise(order))
        way = sum(hop(*pair) for pair in pairs) + (back(order[-1], order[0]) if pairs else 0)
        slowest = max((transfer(*pair) for pair in pairs), default=0) if k else 0
        cuts = quickest_cuts([holders[index] for index in order], way, slowest, k, rival=least() + 1)
        if cuts is not None:
            offer(order, cuts)

    def least() -> int:
        return min((choice.cuts.cost for choice in best.values()), default=NEVER)

    required, one_of = problem.required, frozenset(range(groups))
    # Where the bottleneck counts, pipelines are longer and rounds dearer, and more rounds lead to the same end. What
    # this build cannot run is not worth as many either.
    starts = STARTS // 2 if k or groups else STARTS
    orders = Orders(
        holders,
        hop,
        back,
        starts=starts,
        transfer=transfer,
        further_chunks=k,
        required=required,
        least_stages=least_stages,
        one_of=one_of,
        to_beat=least,
    )
    orders.by_moves()
    for place, order in enumerate(orders.found[:CUT_ORDERS]):
        offer(order.holders, order.cuts)
        if k and place < FINELY_CUT:
            cut(order.holders)
    if not is_exact:
        return
    if k and len(holders) * len(problem.bounds) > EXACT_CHUNKED_WORK:
        if len(holders) <= EVERY_ORDER_HOLDERS:
            for order in orders.all_worth_it():
                cut(order)
        return

    def exactly(cap: int | None, to_beat: Callable[[], int]) -> None:
        Orders(
            holders if cap is None else [holder.capped(cap) for holder in holders],
            hop if cap is None else lambda a, b: hop(a, b) if transfer(a, b) <= cap else NEVER,
            back,
            required=required,
            least_stages=least_stages,
            one_of=one_of,
            to_beat=to_beat,
            found=cut,
        ).exactly()

    if not k:
        exactly(None, least)
        return
    cap = max(holder.chunk_cost(0, len(holder.run) - 1) for holder in holders)
    smallest = min(holder.chunk_once for holder in holders) + 1
    while cap > smallest:
        # What has its bottleneck below the next cap is found there; all else pays for a larger one.
        following = int(cap * EXACT_CAP_FACTOR)
        if least() > k * following:
            exactly(cap, lambda following=following: least() - k * following)
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
