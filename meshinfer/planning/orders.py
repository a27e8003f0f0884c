"""Which holders, in which order, for the least J. Orders only; where to cut is in `rows` and, in the end, `partition`.

By moves, in meshes of any size: greedy pipelines from each head, then one move after the other: leave a
stage out, put another holder in its place or beside it, turn a part of the way round. A move is judged by
an estimate (`fill`: layers go to the quickest holders that are there), and the most promising few by their true
cost, cuts and all. Estimates are made in the order of a bound that is cheaper still, until no bound is below
what was found. Polynomial, and good to a few per mille.

All of them, in the smallest meshes where the bottleneck counts: 1,957 orders of six nodes have their bounds found in
some milliseconds, and few are below the best that the moves found.

Exactly, in small meshes, with the pipeline that the moves found as the one to beat: a *state* is (nodes
used, first holder, last holder) with its row of costs for each position reached. Of two ways to a state one
is dropped where the other is nowhere dearer: whatever completes one completes the other. This is Held and
Karp's growth (1962) with a row where they have a number: 2ⁿ·n² states instead of n! orders. A state that
cannot beat the best by a part in WORTH_IT is dropped too: what is left costs at least what the quickest holders
that are left would take for it. A full mesh of 12 has 119 million directed cycles; none is enumerated.

J has one maximum in it, the slowest prefill chunk, which counts for prompts of several chunks only. The moves have
it in their estimates. The exact search is run under a *cap* on chunk times from outside, which is lowered
until that cannot pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations
from operator import lt

from meshinfer.planning.fill import Fill
from meshinfer.planning.holders import Holder
from meshinfer.planning.quickest import Cuts, cuts_near
from meshinfer.planning.rows import NEVER, Row, first_row, grow, joined, last_row

STARTS = 4
"""Greedy pipelines that are moved. Twice as many take twice the time."""
GREEDY_LEVELS = (2, 4, 8)
"""Where the bottleneck counts: greedy pipelines stop at chunks as slow as so many of the quickest would have."""
LEVEL_HEADS = 8
"""The quickest, from which these start."""
LEAST_PRICES, MOST_PRICES, PRICED_BLOCKS = 3, 20, 40_000
"""Of the moves of each round so many are priced truly, the most promising first: as many as have so many blocks times
stages together, which is what a price costs, and the fewer the more holders make the other work."""
ENOUGH = 1.003
"""Cuts so near to the estimate, which divides blocks where it likes, are not improved while orders are compared."""
MOST_ROUNDS = 40
WORTH_IT = 500
"""The exact search looks for what is better by a part in so many; the goal is one in a hundred."""
REORDERED_STAGES = 24
"""Longer pipelines are not turned in parts: their pairs of places are too many."""


@dataclass(frozen=True, slots=True)
class Order:
    """Holders in pipeline order, by index."""

    holders: tuple[int, ...]
    cuts: Cuts

    @property
    def cost(self) -> int:
        """J with these cuts."""
        return self.cuts.cost


class Orders:
    """One search over holders and the hops between them.

    Args:
        holders: whose members may overlap (groups); a pipeline uses each node once.
        hop: J of a hop from one holder to another, by index; NEVER if it must not be used.
        back: J of the tokens' way back from the last holder to the first.
        starts: greedy pipelines that are moved.
        transfer: how long a prefill chunk keeps a link busy, where the bottleneck counts.
        further_chunks: how often the bottleneck counts; 0 for the exact search, which is under a cap.
        required: nodes (bit set) that every pipeline must have.
        least_stages: with fewer it is no candidate.
        one_of: of these holders every candidate has at least one; empty: no such wish.
        to_beat: for the exact search: what is dearer than this is left out. It may fall while the search runs.
        found: for the exact search: told of each order that is cheaper, at once.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        hop: Callable[[int, int], int],
        back: Callable[[int, int], int],
        *,
        starts: int = STARTS,
        transfer: Callable[[int, int], int] = lambda _one, _other: 0,
        further_chunks: int = 0,
        required: int = 0,
        least_stages: int = 1,
        one_of: frozenset[int] = frozenset(),
        to_beat: Callable[[], int] = lambda: NEVER,
        found: Callable[[tuple[int, ...]], None] = lambda _order: None,
    ) -> None:
        self._holders = holders
        self._hop = hop
        self._back = back
        self._starts = starts
        self._transfer = transfer
        self._k = further_chunks
        self._required = required
        self._least_stages = least_stages
        self._one_of = one_of
        self._to_beat = to_beat
        self._tell = found
        self._last = len(holders[0].run) - 1 if holders else 0
        self._fill = Fill(holders, further_chunks)
        self._is_free = not required and not one_of and least_stages == 1
        """Any order is a candidate."""
        self._found: dict[int, Order] = {}
        """The best order of each set of nodes that was priced."""
        self._prices: dict[tuple[int, ...], Cuts | None] = {}

    @property
    def found(self) -> list[Order]:
        """The best order of each set of nodes that was looked at, best first."""
        return sorted(self._found.values(), key=lambda order: (order.cost, order.holders))

    def price(self, order: tuple[int, ...]) -> int:
        """J of the best cuts of `order`; NEVER if none fit."""
        if order not in self._prices:
            self._prices[order] = cuts = self._cuts(order)
            if cuts is not None:
                self._offer(order, cuts)
        cuts = self._prices[order]
        return cuts.cost if cuts is not None else NEVER

    def _cuts(self, order: tuple[int, ...]) -> Cuts | None:
        hops = self._hops(order)
        if hops >= NEVER:
            return None
        stages = [self._holders[index] for index in order]
        level = self._fill.best(_mask(order), order).level if self._k else 0.0
        enough = self._estimate(order) * ENOUGH if self._k else 0.0
        return cuts_near(stages, hops, self._slowest(order), self._k, level, enough)

    def _hops(self, order: tuple[int, ...]) -> int:
        """All of them, the way back among them; NEVER if one must not be used."""
        if len(order) == 1:
            return 0
        return min(NEVER, sum(map(self._hop, order[:-1], order[1:])) + self._back(order[-1], order[0]))

    def _slowest(self, order: tuple[int, ...]) -> int:
        """Transfer of a prefill chunk, where that counts."""
        return max(map(self._transfer, order[:-1], order[1:])) if self._k and len(order) > 1 else 0

    def _offer(self, order: tuple[int, ...], cuts: Cuts) -> None:
        if self._is_candidate(order):
            members = sum(self._holders[index].members for index in order)
            rival = self._found.get(members)
            if rival is None or (cuts.cost, order) < (rival.cost, rival.holders):
                self._found[members] = Order(order, cuts)

    def _is_candidate(self, order: Sequence[int]) -> bool:
        if self._is_free:
            return True
        members = sum(self._holders[index].members for index in order)
        return (
            not self._required & ~members
            and len(order) >= self._least_stages
            and (not self._one_of or not self._one_of.isdisjoint(order))
        )

    # --- by moves -------------------------------------------------------------------------------

    def by_moves(self) -> None:
        """Look from greedy pipelines on."""
        for index in range(len(self._holders)):
            self.price((index,))
        count = self._starts
        greedy = [order for index in range(len(self._holders)) if (order := self._greedy(index, NEVER))]
        for level in self._levels():
            greedy += [order for index in self._fill.by_rate[:LEVEL_HEADS] if (order := self._greedy(index, level))]
        greedy = sorted(dict.fromkeys(greedy), key=lambda order: (self._estimate(order), order))[: 2 * count]
        greedy = sorted(greedy, key=lambda order: (self.price(order), order))[:count]
        found = self.found
        single = [each.holders for each in found if len(each.holders) == 1][:1]
        if self._k and found and len(found[0].holders) > 1:
            # Where the bottleneck counts it is a long way from one stage to many, and greedy pipelines are there already.
            single = []
        for start in dict.fromkeys((*greedy, *single)):
            self._improve(start)

    def _levels(self) -> list[float]:
        """Chunk times to which greedy pipelines fill their stages."""
        paces = sorted(self._fill.paces) if self._k else []
        return [self._last / sum(1 / each for each in paces[:count]) for count in GREEDY_LEVELS if paces]

    def _greedy(self, head: int, level: float) -> tuple[int, ...]:
        """From `head` on, always the holder that is cheapest for each block it takes; () if it never ends."""
        fill, last = self._fill, self._last
        rates, paces = fill.rates, fill.paces
        order, members, used = [head], self._holders[head].members, 1 << head
        most = [last if level >= NEVER else max(1, int(level / pace)) for pace in paces]
        reach = min(self._holders[head].latest[0], most[head])
        while reach < last or not self._is_candidate(order):
            # As a stage that is not the last it leaves the last block to others.
            reach = min(reach, last - 1)
            best: tuple[float, int] | None = None
            for index, holder in enumerate(self._holders):
                blocks = min(holder.latest[reach] - reach, most[index])
                if blocks > 0 and not used >> index & 1 and not members & holder.members:
                    each = (self._hop(order[-1], index) + holder.once) / blocks + rates[index]
                    if not self._is_free and (holder.members & self._required or index in self._one_of):
                        each /= 1e6
                    if best is None or (each, index) < best:
                        best = each, index
            if best is None:
                return ()
            order.append(best[1])
            members |= self._holders[best[1]].members
            used |= 1 << best[1]
            reach = max(reach + 1, min(self._holders[best[1]].latest[reach], reach + most[best[1]]))
        return tuple(order)

    def _estimate(self, order: tuple[int, ...]) -> float:
        """J if blocks were all alike and stages could hold any of them."""
        filled = self._fill.best(_mask(order), order)
        cost, slowest = filled.cost, self._slowest(order)
        if slowest > filled.level and cost < NEVER:
            cost = self._fill.at(order, slowest)
        return min(float(NEVER), cost + self._hops(order) + self._holders[order[-1]].last_once)

    def _bound(self, order: tuple[int, ...]) -> float:
        """Less than the estimate never is."""
        bound = self._fill.bound(_mask(order), order)
        return min(float(NEVER), bound + self._hops(order) + self._holders[order[-1]].last_once)

    def _improve(self, order: tuple[int, ...]) -> None:
        """Move `order` while that makes it cheaper."""
        cost = self.price(order)
        for _ in range(MOST_ROUNDS):
            best = min(((self.price(moved), moved) for moved in self._promising(order, cost)), default=(NEVER, order))
            if best[0] >= cost:
                return
            cost, order = best

    def _promising(self, order: tuple[int, ...], cost: int) -> list[tuple[int, ...]]:
        """The moves with the least estimates, of those that may be below `cost`."""
        count = max(LEAST_PRICES, min(MOST_PRICES, PRICED_BLOCKS // (len(order) * self._last * len(self._holders))))
        best: list[tuple[float, tuple[int, ...]]] = []
        bounds = sorted(
            (bound, moved) for moved in set(self._moves(order)) if (bound := self._bound(moved)) < min(cost, NEVER)
        )
        for bound, moved in bounds:
            if len(best) == count and bound > best[-1][0]:
                break
            estimate = self._estimate(moved)
            if estimate < NEVER:
                best = sorted([*best, (estimate, moved)])[:count]
        return [moved for _, moved in best]

    def _moves(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        stages = len(order)
        members = sum(self._holders[index].members for index in order)
        if stages > 1:
            for place in range(stages):
                shorter = (*order[:place], *order[place + 1 :])
                if self._is_candidate(shorter):
                    yield shorter
        for other, holder in enumerate(self._holders):
            if not members & holder.members:
                yield self._beside(order, other)
            for place, index in enumerate(order):
                # A group may take the place of its own members only.
                if other != index and not (members & ~self._holders[index].members) & holder.members:
                    moved = (*order[:place], other, *order[place + 1 :])
                    if self._is_candidate(moved):
                        yield moved
        if stages <= REORDERED_STAGES:
            for start in range(stages):
                for end in range(start + 2, stages + 1):
                    yield (*order[:start], *reversed(order[start:end]), *order[end:])
                    # The first of the part goes to its end, and the last of it to its beginning.
                    yield (*order[:start], *order[start + 1 : end], order[start], *order[end:])
                    yield (*order[:start], order[end - 1], *order[start : end - 1], *order[end:])

    def _beside(self, order: tuple[int, ...], other: int) -> tuple[int, ...]:
        """`order` with `other` in it where that is the shortest way."""
        hop, back, last = self._hop, self._back, len(order)
        into = [hop(index, other) for index in order]
        out_of = [hop(other, index) for index in order]
        first, final = order[0], order[-1]
        turn = back(final, first) if last > 1 else 0
        ways = [(out_of[0] + back(final, other) - turn, 0), (into[-1] + back(other, first) - turn, last)]
        ways += [
            (into[place - 1] + out_of[place] - hop(order[place - 1], order[place]), place) for place in range(1, last)
        ]
        _, place = min(ways)
        return (*order[:place], other, *order[place:])

    # --- all of them ----------------------------------------------------------------------------

    def all_worth_it(self) -> Iterator[tuple[int, ...]]:
        """Every order whose estimate says that it may beat the best by a part in WORTH_IT, the most promising first.

        For a handful of holders. Where blocks are alike the bound is one, and nothing is missed.
        """
        everyone = range(len(self._holders))
        orders = (order for size in range(1, len(everyone) + 1) for order in permutations(everyone, size))
        bounds = sorted((self._bound(order), order) for order in orders if self._is_candidate(order))
        for bound, order in bounds:
            if bound >= self._limit():
                return
            if self._estimate(order) < self._limit():
                yield order

    # --- exactly --------------------------------------------------------------------------------

    def exactly(self) -> None:
        """Find what the moves missed by more than a part in WORTH_IT. For small meshes: it may take 2ⁿ·n² rows."""
        holders, everyone = self._holders, range(len(self._holders))
        least_hop = min((self._hop(a, b) for a in everyone for b in everyone if a != b), default=0)
        least_back = min((self._back(a, b) for a in everyone for b in everyone if a != b), default=0)
        least_once = min(holder.once for holder in holders) + least_hop
        ends = [last_row(holder) for holder in holders]
        rests: dict[int, Row] = {}
        level: dict[tuple[int, int, int], list[tuple[Row, tuple[int, ...]]]] = {}
        for index, holder in enumerate(holders):
            level[holder.members, index, index] = [(first_row(holder), (index,))]
        while level:
            following: dict[tuple[int, int, int], list[tuple[Row, tuple[int, ...]]]] = {}
            floors: dict[tuple[int, int, int], Row] = {}
            for (members, first, last), ways in level.items():
                if members not in rests:
                    rests[members] = self._least_rest(members, least_once, least_back)
                rest = rests[members]
                for row, order in ways:
                    limit = self._limit()
                    open_row = [cost if cost + least < limit else NEVER for cost, least in zip(row, rest, strict=True)]
                    if min(open_row) >= NEVER:
                        continue
                    for index in everyone:
                        holder = holders[index]
                        if members & holder.members or (hop := self._hop(last, index)) >= NEVER:
                            continue
                        longer = (*order, index)
                        hop_row = [cost + hop if cost < NEVER else NEVER for cost in open_row]
                        closed = joined(hop_row, ends[index]) + self._back(index, first)
                        if closed < limit and self._is_candidate(longer):
                            self._tell(longer)
                        grown = grow(hop_row, holder)
                        key = (members | holder.members, first, index)
                        floor = floors.get(key)
                        if floor is None:
                            floors[key], following[key] = grown, [(grown, longer)]
                        elif any(map(lt, grown, floor)):
                            floors[key] = list(map(min, grown, floor))
                            following[key].append((grown, longer))
            level = following

    def _limit(self) -> int:
        """What must be beaten."""
        best = self._to_beat()
        return best - best // WORTH_IT

    def _least_rest(self, members: int, least_once: int, least_back: int) -> Row:
        """For each position, what the layers from there on cost at least, without `members`; NEVER if they do not fit."""
        free = [index for index in self._fill.by_rate if not members & self._holders[index].members]
        # Groups overlap, so their rooms may count nodes twice: still no more than there is.
        blocks = [NEVER] * (self._last + 1)
        blocks[0] = 0
        filled = total = 0
        # The last block may be cheaper than all others, and there is one of it.
        ends = [self._holders[index].run[-1] - self._holders[index].run[-2] for index in free]
        cheapest = [
            min((b - a for a, b in pairwise(self._holders[index].run[:-1])), default=end)
            for index, end in zip(free, ends, strict=True)
        ]
        saved = max((usual - end for usual, end in zip(cheapest, ends, strict=True)), default=0)
        least_back -= max(0, saved)
        for rate, index in sorted(zip(cheapest, free, strict=True)):
            for _ in range(min(self._fill.rooms[index], self._last - filled)):
                filled, total = filled + 1, total + rate
                blocks[filled] = total
        largest = list(accumulate(sorted((self._fill.rooms[index] for index in free), reverse=True)))
        stages = 1
        row = [NEVER] * (self._last + 1)
        for count in range(1, self._last + 1):
            while stages <= len(largest) and largest[stages - 1] < count:
                stages += 1
            if stages > len(largest):
                break
            row[self._last - count] = min(NEVER, blocks[count] + stages * least_once + least_back)
        return row


def _mask(order: Sequence[int]) -> int:
    mask = 0
    for index in order:
        mask |= 1 << index
    return mask
