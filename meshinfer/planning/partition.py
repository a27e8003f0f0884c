"""Where to cut: given the nodes in pipeline order, which layers each of them holds.

A cut is legal only at the model's own cut points; between two of them layers stand together. All
positions here are indices into `boundaries`: 0 is before the first layer, the last is after the
last one, so `[i, j)` is a run of blocks.

`furthest` is greedy and decides whether an order of nodes fits at all: the need of a seat rises
with its end and falls with its start, so filling every node to the brim never costs the next one
anything. `balanced_cuts` chooses the fairest of all cuts that fit (for the objective `fit`): least worst
share of free memory first, and among those the least sum of squared shares. Both passes are one dynamic
programme over (stage, position), in integers. `quickest.quickest_cuts` chooses those that take least time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from meshinfer.planning.memory import FULL, Room
from meshinfer.planning.model_card import ModelCard

_NEVER = 1 << 200


def boundaries(card: ModelCard) -> tuple[int, ...]:
    """Layers at which a seat may start or end, first and last included, ascending."""
    inner = {point for point in card.cut_points if 0 < point < card.layer_count}
    return (0, *sorted(inner), card.layer_count)


def furthest(room: Room, bounds: Sequence[int]) -> tuple[int, ...]:
    """For each boundary index, the greatest one that a seat starting there can end at; itself if none. Ascending."""
    needs, last = room.needs, len(bounds) - 1
    sums = [needs.layers[bound] for bound in bounds]
    budget = room.free_bytes - room.overhead_bytes - needs.everywhere_bytes
    ends: list[int] = []
    for start, before in enumerate(sums):
        left = budget + before - (needs.first_bytes if start == 0 else 0)
        whole = sums[last] + needs.last_bytes - (needs.shared_bytes if start == 0 else 0)
        # A later start never ends earlier, and the last block costs the head more.
        ends.append(last if whole <= left else max(start, bisect_right(sums, left, start, last) - 1))
    return tuple(ends)


def balanced_cuts(rooms: Sequence[Room], bounds: Sequence[int], must_fit: bool = True) -> tuple[int, ...] | None:
    """Boundary indices `0 = c₀ < c₁ < … < cₙ` that give every room at least one block; None if none fit.

    Without `must_fit`, the fairest overfull cut: what a refusal shows.
    """
    worst = _best(rooms, bounds, FULL if must_fit else _NEVER - 1, max)
    if worst is None:
        return None
    best = _best(rooms, bounds, worst[0], lambda total, share: total + share * share)
    assert best is not None, "the cut that has the least worst share is among those with at most that share"
    return best[1]


def _best(
    rooms: Sequence[Room], bounds: Sequence[int], limit: int, join: Callable[[int, int], int]
) -> tuple[int, tuple[int, ...]] | None:
    """(least joined share, its cuts) with no share above `limit`. Equal ones: the later cut, so the order is total."""
    last = len(bounds) - 1
    row = [0] + [_NEVER] * last
    came_from: list[list[int]] = []
    for stage, room in enumerate(rooms):
        after = len(rooms) - 1 - stage
        starts = [start for start in range(last) if row[start] < _NEVER]
        if not starts:
            return None
        following, back = [_NEVER] * (last + 1), [0] * (last + 1)
        for end in range(starts[0] + 1, last - after + 1) if after else (last,):
            latest = min(end - 1, starts[-1])
            if room.share(bounds[latest], bounds[end]) > limit and latest == starts[-1]:
                break  # Nor does any later end fit.
            for start in range(latest, starts[0] - 1, -1):
                share = room.share(bounds[start], bounds[end])
                # Shares only rise from here on, as the start moves back.
                if share > limit or join(0, share) >= following[end]:
                    break
                total = join(row[start], share)
                if total < following[end]:
                    following[end], back[end] = total, start
        row = following
        came_from.append(back)
    if row[last] >= _NEVER:
        return None
    cuts = [last]
    for back in reversed(came_from):
        cuts.append(back[cuts[-1]])
    return row[last], tuple(reversed(cuts))
