"""Whole agents on virtual time: the stage on which the tests of serving play."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from meshinfer.base.ids import InstanceId
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing.cards import model_card
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED
from meshinfer.testing.cluster import Cluster, SimNode
from meshinfer.testing.engine import FakeSpeed
from meshinfer.wire.messages import Place

SMALL_MODEL = model_card(layer_bytes=(8 * MIB,) * 4)
"""One node holds it."""


def cluster_of_small_model() -> Cluster:
    return Cluster(random.Random(1), memory_bytes=48 * MIB, model=SMALL_MODEL, speed=SPEED)


async def place(cluster: Cluster, through: SimNode, on: SimNode, workload: Workload) -> InstanceId:
    """One more instance of SMALL_MODEL, which `through` sees ready."""
    ask = Place(SMALL_MODEL.model_id, workload, Constraints(nodes=(on.node_id,)))
    instance_id = (await through.serving.placer.place(ask)).instance_id

    def is_ready() -> bool:
        return (instance_id, "ready") in [(each.instance_id, each.state) for each in through.instances()]

    await cluster.until(is_ready)
    return instance_id


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
