"""Whole agents on virtual time: the stage on which the tests of serving play."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from trio.testing import MockClock

from meshinfer.testing.cluster import Cluster


def simulate(cluster: Cluster, scenario: Callable[[Cluster], Awaitable[None]], count: int) -> None:
    """Play `scenario` with `count` agents that see each other; no handler may fail in it."""

    async def main() -> None:
        async with cluster.running(count):
            await scenario(cluster)
        assert cluster.network.failures == []

    trio.run(main, clock=MockClock(autojump_threshold=0))
