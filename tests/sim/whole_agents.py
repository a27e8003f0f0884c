"""Whole agents on virtual time: the stage on which the tests of serving play."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from meshinfer.testing.chaos_room import NODE_BYTES, SPEED
from meshinfer.testing.cluster import Cluster
from meshinfer.testing.engine import FakeSpeed


def simulate(cluster: Cluster, scenario: Callable[[Cluster], Awaitable[None]], count: int) -> None:
    """Play `scenario` with `count` agents that see each other; no handler may fail in it."""

    async def main() -> None:
        async with _playing(cluster, count):
            await scenario(cluster)

    trio.run(main, clock=MockClock(autojump_threshold=0))


@asynccontextmanager
async def three_of(count: int, speed: FakeSpeed = SPEED) -> AsyncGenerator[Cluster]:
    """For tests with an `autojump_clock`: `count` agents, of which it takes three to hold the model."""
    cluster = Cluster(random.Random(1), memory_bytes=NODE_BYTES, speed=speed)
    async with _playing(cluster, count):
        yield cluster


@asynccontextmanager
async def _playing(cluster: Cluster, count: int) -> AsyncGenerator[None]:
    async with cluster.running(count):
        yield
    assert cluster.network.failures == []
