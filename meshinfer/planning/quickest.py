"""The cuts that take least time, for holders in a given order; and among equals those that leave most headroom.

The sum of stages and hops is a row programme (`rows`). The one maximum in J, the slowest chunk, is met by a
cap on it: under each cap the least sum is found, from loose caps to tight ones, in coarse steps and then in
fine ones about the best; while orders are searched, only near a guess (`cuts_near`). The sum rises as the cap falls, so it ends once the sum with the least bottleneck
that these holders could have is no better than the best J.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshinfer.planning.holders import Holder
from meshinfer.planning.memory import FULL
from meshinfer.planning.rows import NEVER, Row, alone, first_row, grow, joined, last_row

COARSE, FINE = 16, 100
"""Each cap is lower than the last bottleneck by a part in so many, or by one block if that is more."""
NEAR_STEPS = 3
"""Of a guess, down one block each, while J falls."""
FEW_BLOCKS = 32
"""Up to so many, a block is a large part of a stage and J has many valleys: every bottleneck that there is is tried."""
SHARE_STEPS = 64
"""Headroom is told apart in so many steps of the free memory."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where to cut, and what it costs."""

    cost: int
    """J."""
    positions: tuple[int, ...]
    """Indices into the boundaries, first and last included."""
    bottleneck: int
    """Slowest stage or transfer of a prefill chunk."""


def quickest_cuts(
    holders: Sequence[Holder], hops: int, slowest_transfer: int, further_chunks: int, rival: int = NEVER
) -> Cuts | None:
    """Of least J; None if none fit.

    Args:
        holders: in pipeline order.
        hops: J of all hops, the way back among them.
        slowest_transfer: of a chunk, over the links between them.
        further_chunks: how often the bottleneck counts.
        rival: what must be beaten: caps under which nothing can are not tried.
    """
    free = _under(None, holders, hops, slowest_transfer, further_chunks)
    if free is None or not further_chunks or free.bottleneck <= slowest_transfer:
        return free
    least = max(slowest_transfer, _least_bottleneck(holders))
    best = free
    least_sum = free.cost - further_chunks * free.bottleneck
    # With a bottleneck above this no sum is small enough.
    loose = min(free.bottleneck, (min(best.cost, rival) - least_sum) // further_chunks)
    few = len(holders[0].run) - 1 <= FEW_BLOCKS
    for part in (NEVER,) if few else (COARSE, FINE):
        found: Cuts | None = free
        cap = loose
        # The fine steps go from one coarse step above the best to one below it.
        tight = best.bottleneck - best.bottleneck // COARSE if part == FINE else least
        while cap >= tight:
            found = _under(cap, holders, hops, slowest_transfer, further_chunks)
            if found is None:
                break
            best = min(best, found, key=lambda cuts: (cuts.cost, cuts.positions))
            if found.cost - further_chunks * (found.bottleneck - least) >= best.cost:
                break
            cap = found.bottleneck - 1 - found.bottleneck // part
        loose = min(loose, best.bottleneck + best.bottleneck // COARSE, (best.cost - least_sum) // further_chunks)
    return best


def cuts_near(
    holders: Sequence[Holder], hops: int, slowest_transfer: int, further_chunks: int, level: float, enough: float = 0.0
) -> Cuts | None:
    """Those of the caps near a guess of the best bottleneck, `level`: what a search judges by. None if none fit.

    `enough`: J that hardly any cuts are below.
    """
    if not further_chunks:
        return _under(None, holders, hops, slowest_transfer, further_chunks)
    last = len(holders[0].run) - 1
    # Blocks cannot be divided: what is cut next to the guess takes half a block more somewhere.
    block = max(holder.chunk[-1] for holder in holders) // (2 * last)
    cap = max(slowest_transfer, int(level) + block)
    best = _under(cap, holders, hops, slowest_transfer, further_chunks)
    if best is None:
        best = _under(cap + cap // COARSE + block, holders, hops, slowest_transfer, further_chunks)
    if best is None:
        best = _under(None, holders, hops, slowest_transfer, further_chunks)
    for _ in range(NEAR_STEPS):
        if best is None or best.bottleneck <= slowest_transfer or best.cost <= enough:
            break
        lower = _under(best.bottleneck - 1, holders, hops, slowest_transfer, further_chunks)
        if lower is None or lower.cost >= best.cost:
            break
        best = lower
    return best


def _least_bottleneck(holders: Sequence[Holder]) -> int:
    """No cuts have less, even if blocks could be divided: all stages would take equally long."""
    wholes = [holder.chunk[-1] for holder in holders]
    return int(1 / sum(1 / max(1, whole) for whole in wholes))


def _under(
    cap: int | None, holders: Sequence[Holder], hops: int, slowest_transfer: int, further_chunks: int
) -> Cuts | None:
    """The least sum with no chunk above `cap`."""
    found = _least_sum(holders, NEVER if cap is None else cap)
    if found is None:
        return None
    total, positions = found
    bottleneck = max(slowest_transfer, _slowest_chunk(holders, positions))
    return Cuts(total + hops + further_chunks * bottleneck, positions, bottleneck)


def with_headroom(
    holders: Sequence[Holder], cuts: Cuts, share: Callable[[int, int, int], int], further_chunks: int
) -> Cuts:
    """Of all cuts as quick as `cuts`, those whose fullest node is least full.

    Args:
        holders: in pipeline order.
        cuts: the quickest.
        share: what a stage (its place in the order, start, end) takes of its node's free memory, in parts of FULL.
        further_chunks: as for `quickest_cuts`.
    """
    # Where the bottleneck counts, no chunk may take longer than with the quickest cuts.
    stages = [holder.capped(cuts.bottleneck) for holder in holders] if further_chunks else list(holders)
    base = _least_sum(stages)
    assert base is not None, "the quickest cuts are among them"
    positions = cuts.positions
    fullest = max(share(place, a, b) for place, (a, b) in enumerate(pairwise(positions)))
    low, high = 0, -(-fullest * SHARE_STEPS // FULL)
    while high - low > 1:
        middle = (low + high) // 2
        limit = middle * FULL // SHARE_STEPS
        found = _least_sum([_within(holder, place, share, limit) for place, holder in enumerate(stages)])
        if found is not None and found[0] == base[0]:
            positions, high = found[1], middle
        else:
            low = middle
    return replace(cuts, positions=positions)


def _slowest_chunk(holders: Sequence[Holder], positions: Sequence[int]) -> int:
    return max(
        holder.chunk_cost(start, end) for holder, start, end in zip(holders, positions[:-1], positions[1:], strict=True)
    )


def _least_sum(holders: Sequence[Holder], cap: int = NEVER) -> tuple[int, tuple[int, ...]] | None:
    """(least sum of the stages, its positions) with no chunk above `cap`; None if none fit."""
    last = len(holders[0].run) - 1
    if len(holders) == 1:
        cost = alone(holders[0], cap)
        return (cost, (0, last)) if cost < NEVER else None
    rows: list[Row] = [first_row(holders[0], cap)]
    for holder in holders[1:-1]:
        rows.append(grow(rows[-1], holder, cap))
    rest = last_row(holders[-1], cap)
    total = joined(rows[-1], rest)
    if total >= NEVER:
        return None
    # Of equal ones the later cut.
    position = max(at for at in range(last + 1) if rows[-1][at] + rest[at] == total)
    positions = [last, position]
    for stage in range(len(holders) - 2, 0, -1):
        holder, row = holders[stage], rows[stage - 1]
        wanted = rows[stage][position] - holder.once - holder.run[position]
        run, soonest = holder.run, holder.soonest
        # What the row was made of is allowed; so is each later start with the same sum, but for those too near.
        position = next(
            at for at in range(position - 1, -1, -1) if row[at] - run[at] == wanted and soonest[at] <= position
        )
        positions.append(position)
    return total, (*reversed([*positions, 0]),)


def _within(holder: Holder, place: int, share: Callable[[int, int, int], int], limit: int) -> Holder:
    """`holder`, but for stages that take more than `limit` of the free memory."""
    latest: list[int] = []
    end = 0
    for start, furthest_end in enumerate(holder.latest):
        end = max(end, start)
        while end < furthest_end and share(place, start, end + 1) <= limit:
            end += 1
        latest.append(min(end, furthest_end))
    return replace(holder, latest=tuple(latest))
