"""What a set of holders would take at best, if all blocks but the last were alike and stages could hold any of them.

The searches judge moves by this before they find cuts. Layers go to the quickest holders first, each as full as its
memory allows and as the *level* does: with prompts of several chunks no stage's chunk may take longer than that,
and J has the level in it, once for each further chunk. A lower level costs more of the slower holders' time;
J is convex in it, so the best is found by halving. Of the order only who is last matters here, since of the last
layer a chunk asks next to nothing; hops are added by who asks.

Floats of picoseconds: what is estimated is compared, never promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshinfer.planning.holders import Holder
from meshinfer.planning.rows import NEVER

HALVINGS = 7
"""Of the range of levels: the best is met to a hundredth of it. With five, pipelines of 32 nodes came out up to 3 % slower."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A set at its best level."""

    cost: float
    """J of its stages and their bottleneck; NEVER if they have no room."""
    level: float
    """Slowest chunk; 0 where that does not count."""


class Fill:
    """Estimates for sets of `holders`, by index, remembered.

    Args:
        holders: of one problem.
        further_chunks: how often the bottleneck counts.
    """

    def __init__(self, holders: Sequence[Holder], further_chunks: int) -> None:
        self._k = further_chunks
        self._last = last = len(holders[0].run) - 1 if holders else 0
        self.rooms = [max(end - start for start, end in enumerate(holder.latest)) for holder in holders]
        """The most blocks that each could hold anywhere."""
        usual = max(1, last - 1)
        self.rates = [holder.run[usual] // usual for holder in holders]
        """J of an average block, the last aside."""
        self.paces = [max(1, holder.chunk[usual] // usual) for holder in holders]
        """Its prefill chunk."""
        # What the last block takes beyond an average one: less than nothing.
        self._last_more = [
            holder.run[-1] - holder.run[-2] - rate for holder, rate in zip(holders, self.rates, strict=True)
        ]
        self._last_chunk_more = [
            holder.chunk[-1] - holder.chunk[-2] - pace for holder, pace in zip(holders, self.paces, strict=True)
        ]
        self.by_rate = sorted(range(len(holders)), key=lambda index: (self.rates[index], index))
        self._places = {index: place for place, index in enumerate(self.by_rate)}
        self._once = [holder.once for holder in holders]
        self._chunk_once = [holder.chunk_once for holder in holders]
        self._bounds: dict[tuple[int, int], float] = {}
        self._best: dict[tuple[int, int], Filled] = {}

    def bound(self, mask: int, order: Sequence[int]) -> float:
        """Less than `best` never is, and found sooner. `order` are the holders of the bit set `mask`."""
        key = mask, order[-1]
        if key not in self._bounds:
            cost, _, _ = self._at(self._sorted(order), order[-1], NEVER)
            self._bounds[key] = cost + self._k * self._least_level(order) if self._k else cost
        return self._bounds[key]

    def best(self, mask: int, order: Sequence[int]) -> Filled:
        """The estimate."""
        key = mask, order[-1]
        if key not in self._best:
            self._best[key] = self._find(order)
        return self._best[key]

    def at(self, order: Sequence[int], level: float) -> float:
        """J with that bottleneck, or the best below it."""
        cost, _, _ = self._at(self._sorted(order), order[-1], level)
        return cost + self._k * level

    def _sorted(self, order: Sequence[int]) -> list[int]:
        return sorted(order, key=self._places.__getitem__)

    def _least_level(self, order: Sequence[int]) -> float:
        """All stages take equally long, whatever room they have."""
        paces, once = self.paces, self._chunk_once
        weight = sum(1 / paces[index] for index in order)
        work = self._last + self._last_chunk_more[order[-1]] / paces[order[-1]]
        return (work + sum(once[index] / paces[index] for index in order)) / weight

    def _find(self, order: Sequence[int]) -> Filled:
        quickest_first = self._sorted(order)
        high_cost, _, high = self._at(quickest_first, order[-1], NEVER)
        if not self._k or high_cost >= NEVER:
            return Filled(high_cost, 0.0)
        low = self._least_level(order)
        best = Filled(high_cost + self._k * high, high)
        for _ in range(HALVINGS):
            level = (low + high) / 2
            cost, slope, _ = self._at(quickest_first, order[-1], level)
            if cost < NEVER and cost + self._k * level < best.cost:
                best = Filled(cost + self._k * level, level)
            if cost < NEVER and slope < self._k:
                high = level
            else:
                low = level
        return best

    def _at(self, quickest_first: Sequence[int], final: int, level: float) -> tuple[float, float, float]:
        """(J of the stages, what it falls by as the level rises, slowest chunk) at a level; NEVER if they do not fit."""
        rates, paces, rooms, once, chunk_once = self.rates, self.paces, self.rooms, self._once, self._chunk_once
        left, total, slowest = float(self._last), float(self._last_more[final]), 0.0
        # Sums over the holders that are full to the level: 1 / pace, and rate / pace.
        weight = weighted = marginal = 0.0
        for index in quickest_first:
            total += once[index]
            if left <= 0:
                continue
            blocks: float = rooms[index]
            begin = chunk_once[index] + (self._last_chunk_more[final] if index == final else 0)
            if level < NEVER:
                most = max(1.0, (level - begin) / paces[index])
                if most < blocks:
                    blocks = most
                    weight += 1 / paces[index]
                    weighted += rates[index] / paces[index]
            if blocks >= left:
                blocks, marginal = left, rates[index]
            left -= blocks
            total += blocks * rates[index]
            chunk = begin + blocks * paces[index]
            slowest = max(chunk, slowest)
        if left > 0:
            return float(NEVER), 0.0, slowest
        return total, marginal * weight - weighted, slowest
