"""An origin that vanishes without a word holds no place for long, and loses nothing if it comes back."""

from __future__ import annotations

import pytest
import trio
from whole_agents import three_of

from meshinfer.planning.workload import Workload
from meshinfer.testing.chaos import FREED_SECONDS
from meshinfer.testing.cluster import Cluster, SimNode
from meshinfer.testing.engine import FakeRunner
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.wire.runner_control import AgentMessage, OriginGone

WORKLOAD = Workload(context_tokens=4096, concurrency=4)
PROMPT, SEED, TOKENS = (1, 2, 3), 5, 1000
"""Some thirty seconds of an answer."""
SLEEP_SECONDS = 10.0
"""Its session is freed after eight. Longer, and the simulated origin, whose own timers go on, gives its answer up."""


FOUND_OUT_SECONDS = 5.0
"""A frozen runner is ended after two to three."""


async def an_origin_without_a_seat(cluster: Cluster) -> SimNode:
    await cluster.ask(cluster.nodes[0], cluster.request((1, 2), 1, workload=WORKLOAD))
    (instance,) = cluster.nodes[0].instances()
    return next(node for node in cluster.nodes if node.node_id not in instance.placement.node_ids)


def sessions(cluster: Cluster) -> int:
    return sum(len(runner.sessions) for runner in cluster.fabric.runners)


async def test_stages_compute_no_longer_for_an_origin_whose_cable_is_pulled(autojump_clock) -> None:
    async with three_of(5) as cluster, trio.open_nursery() as nursery:
        origin = await an_origin_without_a_seat(cluster)
        began = trio.Event()

        async def ask() -> None:
            request = cluster.request(PROMPT, TOKENS, SEED, workload=WORKLOAD)
            await cluster.ask(origin, request, lambda index: began.set() if index == 20 else None)

        nursery.start_soon(ask)
        await began.wait()
        assert sessions(cluster) == 1
        cluster.network.cut([origin.node_id], [node.node_id for node in cluster.nodes if node is not origin])
        await trio.sleep(FREED_SECONDS)
        assert sessions(cluster) == 0
        nursery.cancel_scope.cancel()


async def test_an_answer_goes_on_when_its_origin_wakes_after_its_session_was_freed(autojump_clock) -> None:
    async with three_of(5) as cluster, trio.open_nursery() as nursery:
        origin = await an_origin_without_a_seat(cluster)
        freed: list[int] = []

        async def sleep() -> None:
            cluster.stop(origin)
            await trio.sleep(SLEEP_SECONDS)
            freed.append(sessions(cluster))
            cluster.resume(origin)

        request = cluster.request(PROMPT, TOKENS, SEED, workload=WORKLOAD, deadline_seconds=120.0)
        answer = await cluster.ask(origin, request, lambda index: nursery.start_soon(sleep) if index == 20 else None)
        assert answer == exact_answer(PROMPT, SEED, TOKENS)
        assert freed == [0]


async def test_a_runner_that_freezes_before_it_can_be_told_is_found_out(
    autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three_of(5) as cluster, trio.open_nursery() as nursery:
        origin = await an_origin_without_a_seat(cluster)
        began, freezes = trio.Event(), trio.Event()
        frozen: list[FakeRunner] = []

        def will_freeze(runner: FakeRunner) -> None:
            real = runner.send

            async def send(message: AgentMessage) -> None:
                if isinstance(message, OriginGone):
                    frozen.append(runner)
                    runner.hang(frozen=True)
                    freezes.set()
                    await trio.sleep_forever()  # its socket is full
                await real(message)

            monkeypatch.setattr(runner, "send", send)

        async def ask() -> None:
            request = cluster.request(PROMPT, TOKENS, SEED, workload=WORKLOAD)
            await cluster.ask(origin, request, lambda index: began.set() if index == 20 else None)

        for runner in cluster.fabric.runners:
            will_freeze(runner)
        nursery.start_soon(ask)
        await began.wait()
        cluster.network.cut([origin.node_id], [node.node_id for node in cluster.nodes if node is not origin])
        await freezes.wait()
        await trio.sleep(FOUND_OUT_SECONDS)
        assert [runner for runner in frozen if runner.is_alive] == []
        nursery.cancel_scope.cancel()
