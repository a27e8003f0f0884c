"""Costs of unfinished pipelines, as rows: the least J of layers `[0, p)` over its stages so far, for each position p.

One more stage turns a row into the next: `next[e] = min over s of row[s] + cost of a stage [s, e)`. A
stage's cost is a difference of sums, and what fits is a window of starts that slides as e grows, so the
minimum is a sliding one: O(positions) for each stage, not its square. A cap on the stages' prefill chunks only
makes the windows smaller.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import add

from meshinfer.planning.holders import Holder

NEVER = 1 << 120
"""More than any cost, and more than a few of them together."""

Row = list[int]


def first_row(holder: Holder, cap: int = NEVER) -> Row:
    """One stage, which starts at the first layer and is not the last; its prefill chunk takes no longer than `cap`."""
    last = len(holder.run) - 1
    once = holder.once + holder.first_once
    near, far = holder.soonest[0], min(holder.latest[0], last - 1)
    if cap < NEVER:
        far = min(far, bisect_right(holder.chunk, cap - holder.chunk_once - holder.first_chunk_once) - 1)
    row = [NEVER] * (last + 1)
    if far >= near:
        row[near : far + 1] = [cost + once for cost in holder.run[near : far + 1]]
    return row


def grow(row: Row, holder: Holder, cap: int = NEVER) -> Row:
    """One stage more, which is not the last."""
    last = len(holder.run) - 1
    run, chunk, latest, soonest = holder.run, holder.chunk, holder.latest, holder.soonest
    once, budget = holder.once, cap - holder.chunk_once
    following = [NEVER] * (last + 1)
    # The window's starts and their values, both ascending, from `head` on.
    starts: list[int] = []
    values: list[int] = []
    head = 0
    pushed, furthest = 0, last
    while pushed <= last and row[pushed] >= NEVER:
        pushed += 1
    while furthest > pushed and row[furthest] >= NEVER:
        furthest -= 1
    if pushed > furthest:
        return following
    for end in range(pushed + 1, min(last - 1, latest[furthest]) + 1):
        while pushed < end and soonest[pushed] <= end:
            if row[pushed] < NEVER:
                value = row[pushed] - run[pushed]
                while len(values) > head and values[-1] >= value:
                    values.pop()
                    starts.pop()
                values.append(value)
                starts.append(pushed)
            pushed += 1
        reached = chunk[end] - budget
        while head < len(starts) and (latest[starts[head]] < end or chunk[starts[head]] < reached):
            head += 1
        if head < len(starts):
            following[end] = values[head] + run[end] + once
        elif pushed > furthest:
            break  # Nothing is left that could reach further.
    return following


def last_row(holder: Holder, cap: int = NEVER) -> Row:
    """From each position on, one stage that is the last, but not the first."""
    last = len(holder.run) - 1
    run = holder.run
    once = holder.once + holder.last_once + run[last]
    row = [NEVER] * (last + 1)
    first = max(1, bisect_left(holder.latest, last))
    if cap < NEVER:
        first = max(first, bisect_left(holder.chunk, holder.chunk[last] + holder.chunk_once - cap))
    final = min(last, bisect_right(holder.soonest, last)) - 1
    if final >= first:
        row[first : final + 1] = [once - cost for cost in run[first : final + 1]]
    return row


def joined(row: Row, rest: Row) -> int:
    """The least cost of a pipeline whose first stages are `row` and whose last are `rest`, but for the hop between."""
    return min(map(add, row, rest))


def alone(holder: Holder, cap: int = NEVER) -> int:
    """The cost of one stage that holds everything; NEVER if it cannot."""
    last = len(holder.run) - 1
    fits = holder.allows(0, last) and holder.chunk_cost(0, last) <= cap
    return holder.cost(0, last) if fits else NEVER
