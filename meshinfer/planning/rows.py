"""Costs of unfinished pipelines, as rows: the least J of layers `[0, p)` over its stages so far, for each position p.

One more stage turns a row into the next: `next[e] = min over s of row[s] + cost of a stage [s, e)`. A
stage's cost is a difference of sums, and what fits is a window of starts that slides as e grows, so the
minimum is a sliding one: O(positions) for each stage, not its square.
"""

from __future__ import annotations

from operator import add

from meshinfer.planning.holders import Holder

NEVER = 1 << 120
"""More than any cost, and more than a few of them together."""

Row = list[int]


def first_row(holder: Holder) -> Row:
    """One stage, which starts at the first layer and is not the last."""
    last = len(holder.run) - 1
    once = holder.once + holder.first_once
    near, far = holder.soonest[0], min(holder.latest[0], last - 1)
    row = [NEVER] * (last + 1)
    row[near : far + 1] = [cost + once for cost in holder.run[near : far + 1]]
    return row


def grow(row: Row, holder: Holder) -> Row:
    """One stage more, which is not the last."""
    last = len(holder.run) - 1
    run, earliest, latest = holder.run, holder.earliest_start, holder.latest_start
    once = holder.once
    following = [NEVER] * (last + 1)
    # The window's starts and their values, both ascending, from `head` on.
    starts: list[int] = []
    values: list[int] = []
    head = 0
    reached = [start for start, cost in enumerate(row) if cost < NEVER]
    if not reached:
        return following
    pushed = reached[0]
    for end in range(pushed + 1, min(last - 1, holder.latest[reached[-1]]) + 1):
        while pushed <= latest[end]:
            if row[pushed] < NEVER:
                value = row[pushed] - run[pushed]
                while len(values) > head and values[-1] >= value:
                    values.pop()
                    starts.pop()
                values.append(value)
                starts.append(pushed)
            pushed += 1
        first = earliest[end]
        while head < len(starts) and starts[head] < first:
            head += 1
        if head < len(starts):
            following[end] = values[head] + run[end] + once
    return following


def last_row(holder: Holder) -> Row:
    """From each position on, one stage that is the last, but not the first."""
    last = len(holder.run) - 1
    run = holder.run
    once = holder.once + holder.last_once + run[last]
    row = [NEVER] * (last + 1)
    for start in range(max(1, holder.earliest_start[last]), holder.latest_start[last] + 1):
        row[start] = once - run[start]
    return row


def joined(row: Row, rest: Row) -> int:
    """The least cost of a pipeline whose first stages are `row` and whose last are `rest`, but for the hop between."""
    return min(map(add, row, rest))


def alone(holder: Holder) -> int:
    """The cost of one stage that holds everything; NEVER if it cannot."""
    last = len(holder.run) - 1
    return holder.cost(0, last) if holder.allows(0, last) else NEVER
