"""Which holders, in which order, for the least J. Orders only; where to cut is in `rows` and, in the end, `partition`.

By moves, in meshes of any size: greedy pipelines from each head, then one move after the other: leave a
stage out, put another holder in its place or beside it, turn a part of the way round. A move is judged by
an estimate (layers go to the quickest holders that are there, as far as they have room), and the most
promising few by their true cost, cuts and all. Polynomial, and good to a few per mille.

Exactly, in small meshes, with the pipeline that the moves found as the one to beat: a *state* is (nodes
used, first holder, last holder) with its row of costs for each position reached. Of two ways to a state one
is dropped where the other is nowhere dearer: whatever completes one completes the other. This is Held and
Karp's growth (1962) with a row where they have a number: 2ⁿ·n² states instead of n! orders. A state that
cannot beat the best by a part in WORTH_IT is dropped too: what is left costs at least what the quickest holders
that are left would take for it. A full mesh of 12 has 119 million directed cycles; none is enumerated.

J has one maximum in it, the slowest prefill chunk, which counts for prompts of several chunks only. It is
handled from outside: a search runs under a *cap* on chunk times, which is lowered until that cannot pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import lt

from meshinfer.planning.holders import Holder
from meshinfer.planning.rows import NEVER, Row, alone, first_row, grow, joined, last_row

STARTS = 4
"""Greedy pipelines that are moved. Twice as many take twice the time."""
TRUE_COSTS = 6
"""Of the moves of each round: so many are priced truly, the most promising first."""
MOST_ROUNDS = 40
WORTH_IT = 500
"""The exact search looks for what is better by a part in so many; the goal is one in a hundred."""
REORDERED_STAGES = 24
"""Longer pipelines are not turned in parts: their pairs of places are too many."""


@dataclass(frozen=True, slots=True)
class Order:
    """Holders in pipeline order, by index."""

    holders: tuple[int, ...]
    cost: int
    """J with its best cuts, the bottleneck's share aside."""


class Orders:
    """One search over holders and the hops between them.

    Args:
        holders: whose members may overlap (groups); a pipeline uses each node once.
        hop: J of a hop from one holder to another, by index; NEVER if it must not be used.
        back: J of the tokens' way back from the last holder to the first.
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
        required: int = 0,
        least_stages: int = 1,
        one_of: frozenset[int] = frozenset(),
        to_beat: Callable[[], int] = lambda: NEVER,
        found: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        self._holders = holders
        self._hop = hop
        self._back = back
        self._required = required
        self._least_stages = least_stages
        self._one_of = one_of
        self._to_beat = to_beat
        self._tell = found
        self._last = len(holders[0].run) - 1 if holders else 0
        self._rooms = [max(end - start for start, end in enumerate(h.latest)) for h in holders]
        """The most blocks that each could hold anywhere."""
        self._rates = [h.run[-1] // self._last for h in holders]
        """J of an average block."""
        self._by_rate = sorted(range(len(holders)), key=lambda index: (self._rates[index], index))
        self._found: dict[int, Order] = {}
        """The best order of each set of nodes that was priced."""
        self._prices: dict[tuple[int, ...], int] = {}

    @property
    def found(self) -> list[Order]:
        """The best order of each set of nodes that was looked at, best first."""
        return sorted(self._found.values(), key=lambda order: (order.cost, order.holders))

    def price(self, order: tuple[int, ...]) -> int:
        """J of the best cuts of `order`, the bottleneck's share aside; NEVER if none fit."""
        if order not in self._prices:
            self._prices[order] = cost = self._cost(order)
            self._offer(order, cost)
        return self._prices[order]

    def _cost(self, order: tuple[int, ...]) -> int:
        holders = self._holders
        if len(order) == 1:
            return alone(holders[order[0]])
        hops = self._hops(order)
        if hops >= NEVER:
            return NEVER
        row = first_row(holders[order[0]])
        for index in order[1:-1]:
            row = grow(row, holders[index])
        return min(NEVER, joined(row, last_row(holders[order[-1]])) + hops)

    def _hops(self, order: tuple[int, ...]) -> int:
        """All of them, the way back among them; NEVER if one must not be used."""
        if len(order) == 1:
            return 0
        return min(NEVER, sum(map(self._hop, order[:-1], order[1:])) + self._back(order[-1], order[0]))

    def _offer(self, order: tuple[int, ...], cost: int) -> None:
        if cost < NEVER and self._is_candidate(order):
            members = sum(self._holders[index].members for index in order)
            rival = self._found.get(members)
            if rival is None or (cost, order) < (rival.cost, rival.holders):
                self._found[members] = Order(order, cost)

    def _is_candidate(self, order: Sequence[int]) -> bool:
        members = sum(self._holders[index].members for index in order)
        return (
            not self._required & ~members
            and len(order) >= self._least_stages
            and (not self._one_of or not self._one_of.isdisjoint(order))
        )

    # --- by moves -------------------------------------------------------------------------------

    def by_moves(self, starts: Sequence[tuple[int, ...]] = ()) -> None:
        """Look from each of `starts`, and from greedy pipelines."""
        for index in range(len(self._holders)):
            self.price((index,))
        greedy = [order for index in range(len(self._holders)) if (order := self._greedy(index))]
        greedy = sorted(dict.fromkeys(greedy), key=lambda order: (self._estimate(order), order))[: 2 * STARTS]
        greedy = sorted(greedy, key=lambda order: (self.price(order), order))[:STARTS]
        single = [each.holders for each in self.found if len(each.holders) == 1][:1]
        for start in dict.fromkeys((*starts, *greedy, *single)):
            self._improve(start)

    def _greedy(self, head: int) -> tuple[int, ...]:
        """From `head` on, always the holder that is cheapest for each block it takes; () if it never ends."""
        order, members = [head], self._holders[head].members
        reach = self._holders[head].latest[0]
        while reach < self._last or not self._is_candidate(order):
            # As a stage that is not the last it leaves the last block to others.
            reach = min(reach, self._last - 1)
            best: tuple[float, int] | None = None
            for index, holder in enumerate(self._holders):
                blocks = holder.latest[reach] - reach
                if blocks > 0 and not members & holder.members:
                    needed = bool(holder.members & self._required) or index in self._one_of
                    each = (self._hop(order[-1], index) + holder.once) / blocks + self._rates[index]
                    best = min(best or (each, index), (each / 1e6 if needed else each, index))
            if best is None:
                return ()
            order.append(best[1])
            members |= self._holders[best[1]].members
            reach = self._holders[best[1]].latest[reach]
        return tuple(order)

    def _estimate(self, order: tuple[int, ...]) -> int:
        """J if blocks were all alike and stages could hold any of them: the quickest holders get what they have room for."""
        left, total = self._last, self._hops(order)
        for index in sorted(order, key=self._rates.__getitem__):
            blocks = min(left, self._rooms[index])
            total += self._holders[index].once + blocks * self._rates[index]
            left -= blocks
        return total + self._holders[order[-1]].last_once if not left else NEVER

    def _improve(self, order: tuple[int, ...]) -> None:
        """Move `order` while that makes it cheaper."""
        cost = self.price(order)
        for _ in range(MOST_ROUNDS):
            promising = sorted((self._estimate(moved), moved) for moved in set(self._moves(order)))
            best = min(
                ((self.price(moved), moved) for estimate, moved in promising[:TRUE_COSTS] if estimate < NEVER),
                default=(NEVER, order),
            )
            if best[0] >= cost:
                return
            cost, order = best

    def _moves(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        stages = len(order)
        members = sum(self._holders[index].members for index in order)
        for place, index in enumerate(order):
            before, after = order[:place], order[place + 1 :]
            others = members & ~self._holders[index].members
            if stages > 1 and self._is_candidate((*before, *after)):
                yield (*before, *after)
            for other, holder in enumerate(self._holders):
                if other != index and not others & holder.members:
                    moved = (*before, other, *after)
                    if self._is_candidate(moved):
                        yield moved
                if not members & holder.members:
                    yield (*before, other, *order[place:])
        for other, holder in enumerate(self._holders):
            if not members & holder.members:
                yield (*order, other)
        if stages <= REORDERED_STAGES:
            for start in range(stages):
                for end in range(start + 2, stages + 1):
                    yield (*order[:start], *reversed(order[start:end]), *order[end:])
                    # The first of the part goes to its end, and the last of it to its beginning.
                    yield (*order[:start], *order[start + 1 : end], order[start], *order[end:])
                    yield (*order[:start], order[end - 1], *order[start : end - 1], *order[end:])

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
                        if closed < limit:
                            self._offer(longer, closed)
                            if self._tell is not None and self._is_candidate(longer):
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
        if self._tell is None:
            best = min(best, min((order.cost for order in self._found.values()), default=NEVER))
        return best - best // WORTH_IT

    def _least_rest(self, members: int, least_once: int, least_back: int) -> Row:
        """For each position, what the layers from there on cost at least, without `members`; NEVER if they do not fit."""
        free = [index for index in self._by_rate if not members & self._holders[index].members]
        # Groups overlap, so their rooms may count nodes twice: still no more than there is.
        blocks = [NEVER] * (self._last + 1)
        blocks[0] = 0
        filled = total = 0
        cheapest = [min(after - before for before, after in pairwise(self._holders[index].run)) for index in free]
        for rate, index in sorted(zip(cheapest, free, strict=True)):
            for _ in range(min(self._rooms[index], self._last - filled)):
                filled, total = filled + 1, total + rate
                blocks[filled] = total
        largest = list(accumulate(sorted((self._rooms[index] for index in free), reverse=True)))
        stages = 1
        row = [NEVER] * (self._last + 1)
        for count in range(1, self._last + 1):
            while stages <= len(largest) and largest[stages - 1] < count:
                stages += 1
            if stages > len(largest):
                break
            row[self._last - count] = min(NEVER, blocks[count] + stages * least_once + least_back)
        return row
