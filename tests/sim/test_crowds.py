"""More answers than places: who waits, who goes first, and who is sent away."""

from __future__ import annotations

import pytest
import trio
from whole_agents import cluster_of_small_model, place, simulate

from meshinfer.base.errors import QueueFull
from meshinfer.base.ids import SessionId
from meshinfer.planning.workload import Workload
from meshinfer.serving.sessions import NO_ROOM_SECONDS
from meshinfer.testing.cluster import Cluster
from meshinfer.testing.engine import Step
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.testing.fake_channel import FakeChannel
from meshinfer.wire.records import OpenSession, Sampling


def test_answers_that_have_begun_wait_for_a_full_queue_however_long_and_a_new_one_is_told_at_once() -> None:
    """Sixteen run at once; their node is lost, and what is placed instead has one place and a queue of four."""

    async def scenario(cluster: Cluster) -> None:
        first, _, origin = cluster.nodes
        await place(cluster, origin, first, Workload(256, 16))
        cluster.fabric.max_waiting, cluster.fabric.max_returning = 1, 4
        one_place, killed_at, ended_at = Workload(256, 1), 0.0, 0.0

        async def ask(number: int) -> None:
            nonlocal killed_at, ended_at

            def on_token(index: int) -> None:
                nonlocal killed_at
                if (number, index) == (0, 20):
                    killed_at = trio.current_time()
                    cluster.kill(first)

            request = cluster.request((number,), tokens=150, seed=number, workload=one_place, deadline_seconds=300)
            assert await cluster.ask(origin, request, on_token) == exact_answer((number,), number, 150)
            ended_at = trio.current_time()

        async with trio.open_nursery() as clients:
            for number in range(16):
                clients.start_soon(ask, number)
            await cluster.until(lambda: killed_at > 0)
            await cluster.until(
                lambda: any(
                    i.state == "ready" and first.node_id not in i.placement.node_ids for i in origin.instances()
                )
            )
            await trio.sleep(1.0)  # all of them have asked again
            with pytest.raises(QueueFull, match=r"1 sessions run and \d wait"):
                await cluster.ask(origin, cluster.request((99,), tokens=5, workload=one_place))
        assert ended_at > killed_at + 2 * NO_ROOM_SECONDS, "they waited longer than for a mesh without room"

    simulate(cluster_of_small_model(), scenario, 3)


def test_what_has_begun_goes_before_what_was_open_before_and_that_before_what_is_new() -> None:
    """They come the other way round, while another has the only place."""

    async def scenario(cluster: Cluster) -> None:
        node, origin = cluster.nodes
        await place(cluster, origin, node, Workload(256, 1))
        (instance,), (head,) = origin.instances(), cluster.fabric.runners
        computed: list[SessionId] = []

        def witness(step: Step) -> None:
            if step.session_id not in computed:
                computed.append(step.session_id)

        cluster.fabric.witness = witness
        channel = FakeChannel(head, origin.node_id)
        comes = {"first": (0, False), "new": (0, False), "open before": (0, True), "begun": (1, True)}
        for name, (emitted, resumed) in comes.items():
            record = OpenSession(
                session_id=SessionId(name),
                instance_id=instance.instance_id,
                epoch=instance.epoch,
                token_ids=(1, 2),
                emitted=emitted,
                max_new_tokens=20,
                stop_token_ids=(),
                sampling=Sampling(seed=7),
                resumed=resumed,
            )
            await channel.send(record)
        await cluster.until(lambda: len(computed) == len(comes))
        assert computed == ["first", "begun", "open before", "new"]

    simulate(cluster_of_small_model(), scenario, 2)
