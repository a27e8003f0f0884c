"""Clocks of its own for each simulated node: a wall clock and a monotonic clock that are wrong by as much as one likes.

    with separate_clocks():
        trio.run(main, clock=later_clock())

    with NodeClocks(monotonic_ahead_seconds=3600.0).worn():
        nursery.start_soon(node.run)

Whoever wears a node's clocks (its tasks, and all that they start) reads them wherever the product does: at
`trio.current_time()`, `time.time()` and `time.time_ns()`. A deadline that it names is one of its own clock,
too, and is met when that clock shows it; so whoever compares its own time with another's is late by an hour, or
early. What is no node (wires, runners, clients) goes by `shared_time()`.

Both clocks only ever differ from the shared one by a constant (the wall clock's may step), and `later_clock()`
starts where such constants cost no rounding. So a run of a correct product is the same to the last bit,
whatever they are: `tests/sim/test_clocks.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from unittest import mock

import trio
import trio.testing

START_SECONDS = 49_152.0
"""Halfway between two powers of two: with up to four hours on either side the last binary digit of a time is worth the
same, so adding an offset to it, or taking one away, is exact."""
EPOCH_SECONDS = 1_700_000_000.0
"""What right wall clocks show at virtual time 0."""

_shared_time = trio.current_time


@dataclass(eq=False)
class NodeClocks:
    """Of one node: how far they are ahead of everybody's."""

    monotonic_ahead_seconds: float = 0.0
    """From its start on: such a clock cannot be set."""
    wall_ahead_seconds: float = 0.0
    """May be changed at any time, which is a step of that clock."""

    @contextmanager
    def worn(self) -> Generator[None]:
        """Inside, the present task reads these clocks, as do those that it starts."""
        token = _worn.set(self)
        try:
            yield
        finally:
            _worn.reset(token)


_NOBODYS = NodeClocks()
_worn: ContextVar[NodeClocks] = ContextVar("node_clocks", default=_NOBODYS)


def shared_time() -> float:
    """Virtual time, whoever asks."""
    return _shared_time()


async def sleep_until_shared(deadline: float) -> None:
    """Until `shared_time()` is `deadline`, whoever asks."""
    await trio.sleep_until(deadline + trio.current_time() - shared_time())


def later_clock() -> trio.testing.MockClock:
    """It jumps, and starts at START_SECONDS."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    clock.jump(START_SECONDS)
    return clock


@contextmanager
def separate_clocks() -> Generator[None]:
    """Inside, nodes read the clocks that they wear; without it they all read the same."""
    scope, wall = trio.CancelScope, time.time

    def own_time() -> float:
        return _shared_time() + _worn.get().monotonic_ahead_seconds

    # All that names an absolute deadline ends here: move_on_at, fail_at, sleep_until. Relative ones trio reckons itself.
    def own_scope(*, deadline: float = math.inf, relative_deadline: float = math.inf, shield: bool = False) -> object:
        shared = deadline - _worn.get().monotonic_ahead_seconds
        return scope(deadline=shared, relative_deadline=relative_deadline, shield=shield)

    def own_wall() -> float:
        clocks = _worn.get()
        return wall() if clocks is _NOBODYS else EPOCH_SECONDS + _shared_time() + clocks.wall_ahead_seconds

    def own_wall_ns() -> int:
        return int(own_wall() * 1e9)

    with (
        mock.patch.multiple(trio, current_time=own_time, CancelScope=own_scope),
        mock.patch.multiple(time, time=own_wall, time_ns=own_wall_ns),
    ):
        yield
