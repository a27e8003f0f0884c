"""One process is one seat after another of its instance, however close together they are decided.

Whole agents, exact engine, virtual time. A rebinding is sent to the process; what is decided meanwhile finds it all the same.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
import trio
import trio.testing
from whole_agents import three_of

from meshinfer.base.ids import NodeId
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.runners import Runner
from meshinfer.serving.spares import Spares
from meshinfer.serving.view import AHEAD, Instance
from meshinfer.testing.cluster import Cluster, SimNode
from meshinfer.testing.engine import FakeRunner
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import Lease, SeatRef
from meshinfer.wire.runner_control import AgentMessage

Clock = trio.testing.MockClock
INDEX = 1
"""Of the seat that is looked at."""


@dataclass(eq=False)
class Slow:
    """One node's only runner, which reads nothing until it may."""

    cluster: Cluster
    node: SimNode
    runner: FakeRunner
    instance: Instance
    may_read: trio.Event = field(default_factory=trio.Event)

    async def lease(self, epoch: int) -> None:
        instance = self.instance
        ask = Lease(instance.instance_id, epoch, instance.placement, INDEX, 1, epoch)
        assert (await self.node.serving.seats.lease(ask, self.node.node_id)).granted

    async def commit(self, epoch: int) -> None:
        await self.node.serving.seats.commit(self.ref(epoch))

    def ref(self, epoch: int) -> SeatRef:
        return SeatRef(self.instance.instance_id, epoch, self.instance.placement.placement_id)

    def seat(self, epoch: int) -> SeatKey:
        return SeatKey(self.instance.instance_id, epoch, INDEX)


@asynccontextmanager
async def slow(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Slow]:
    async with three_of(4) as cluster:
        await cluster.ask(cluster.nodes[3], cluster.request((1,), 3))
        (instance,) = cluster.nodes[0].instances()
        node = cluster.node_of(instance.placement.seats[INDEX].node_id)
        assert node is not None
        (runner,) = cluster.fabric.runners_of(node.node_id)
        case = Slow(cluster, node, runner, instance)
        send, lock = runner.send, trio.Lock()

        async def send_later(message: AgentMessage) -> None:
            async with lock:
                await case.may_read.wait()
                await send(message)

        monkeypatch.setattr(runner, "send", send_later)
        with node.clocks.worn():
            yield case


async def test_the_epoch_after_the_next_goes_on_with_the_layers_while_the_next_is_still_told(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow(monkeypatch) as case:
        async with trio.open_nursery() as nursery:
            for epoch in (2, 3):
                await case.lease(epoch)
                nursery.start_soon(case.commit, epoch)
                await trio.testing.wait_all_tasks_blocked()
            assert case.node.serving.seats.runners.pids() == {case.seat(3): case.runner.pid}
            case.may_read.set()
        assert case.node.serving.seats.runners.pids() == {case.seat(3): case.runner.pid}
        await case.cluster.until(lambda: case.runner.seat is not None and case.runner.seat.epoch == 3)


async def test_what_is_freed_while_its_process_is_told_of_it_leaves_no_process(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slow(monkeypatch) as case:
        async with trio.open_nursery() as nursery:
            await case.lease(2)
            nursery.start_soon(case.commit, 2)
            await trio.testing.wait_all_tasks_blocked()
            assert (await case.node.serving.seats.release(case.ref(2))).freed_bytes > 0
            assert not case.runner.is_alive, "its memory is free once that is said"
            case.may_read.set()
        await case.cluster.until(lambda: not case.node.serving.seats.runners.pids())
        assert case.cluster.fabric.runners_of(case.node.node_id) == []


@pytest.mark.parametrize("slow", ["start", "stop"])
async def test_what_is_loaded_ahead_again_is_not_ended_by_what_is_left_of_the_time_before(
    slow: str, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are seats of epoch 0: their names are the same, and the first one's process takes its time to come, or to go."""
    take, stop = Spares.take, FakeRunner.stop

    async def take_slowly(self: Spares) -> Runner:
        with trio.CancelScope(shield=slow == "start"):  # a process is started in a thread, which nobody can cancel
            await trio.sleep(1.0 if slow == "start" else 0.0)
            return await take(self)

    async def stop_slowly(self: FakeRunner, *, at_once: bool = False) -> None:
        if slow == "stop" and not self.dead:
            await trio.sleep(1.0)
        await stop(self, at_once=at_once)

    monkeypatch.setattr(Spares, "take", take_slowly)
    monkeypatch.setattr(FakeRunner, "stop", stop_slowly)
    async with three_of(6) as cluster:
        origin = cluster.nodes[0]
        await cluster.ask(origin, cluster.request((1,), 3))
        (instance,) = origin.instances()
        taker, another, _ = [node for node in cluster.nodes if node.node_id not in instance.placement.node_ids]
        seats = taker.serving.seats
        placement = with_seats(instance.placement, {INDEX: taker.node_id})
        other = with_seats(instance.placement, {INDEX: taker.node_id, INDEX + 1: another.node_id})

        async def ahead(placement: Placement) -> SeatRef:
            ask = Lease(instance.instance_id, AHEAD, placement, INDEX, 1, 2)
            assert (await seats.lease(ask, origin.node_id)).granted
            ref = SeatRef(instance.instance_id, AHEAD, placement.placement_id)
            await seats.commit(ref)
            return ref

        with taker.clocks.worn():
            async with trio.open_nursery() as releasing:
                ref = await ahead(placement)
                if slow == "stop":
                    await cluster.until(lambda: len(seats.runners.pids()) == 1)
                releasing.start_soon(seats.release, ref)
                await trio.testing.wait_all_tasks_blocked()
                await ahead(other)
        await cluster.until(lambda: [seat.state for seat in taker.serving.ports.own_card().seats] == ["linking"])
        await trio.sleep(3.0)
        assert [seat.state for seat in taker.serving.ports.own_card().seats] == ["linking"]
        assert [runner.pid for runner in cluster.fabric.runners_of(taker.node_id)] == list(
            seats.runners.pids().values()
        )


def with_seats(placement: Placement, nodes: dict[int, NodeId]) -> Placement:
    seats = [replace(seat, node_id=nodes.get(index, seat.node_id)) for index, seat in enumerate(placement.seats)]
    return replace(placement, seats=tuple(seats))
