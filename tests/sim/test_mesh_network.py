"""SimNetwork keeps the Transport contract under each fault that it can make. (Conformance proper: tests/mesh.)"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from meshinfer.base.errors import DeadlineExceeded, NoRoom, PeerLost, Refused
from meshinfer.base.ids import NodeId
from meshinfer.testing.network import SimNetwork, SimTransport
from meshinfer.transport.base import GossipReceived, PeerConnected, PeerDisconnected, Transport


@asynccontextmanager
async def running(network: SimNetwork, *names: str):
    async with trio.open_nursery() as nursery:
        transports = [network.add(name) for name in names]
        for transport in transports:
            await nursery.start(transport.run)
            transport.serve("echo/1", echo)
        yield transports
        nursery.cancel_scope.cancel()


async def echo(caller: NodeId, payload: bytes) -> bytes:
    return payload


async def join(one: SimTransport, other: SimTransport) -> None:
    await one.dial(other.addresses()[0], other.node_id, 1.0)


async def test_it_is_a_transport(autojump_clock) -> None:
    transport: Transport = SimNetwork().add("a")
    assert transport.peers() == frozenset()


async def test_calls_cross_and_errors_come_back_as_themselves(autojump_clock) -> None:
    async def full(caller: NodeId, payload: bytes) -> bytes:
        raise NoRoom("8 GiB", expected="9 GiB", do="wait")

    async with running(SimNetwork(), "a", "b") as (a, b):
        await join(a, b)
        b.serve("full/1", full)
        assert await a.call(b.node_id, "echo/1", b"x", 1.0) == b"x"
        assert await b.call(a.node_id, "echo/1", b"y", 1.0) == b"y"
        with pytest.raises(NoRoom) as caught:
            await a.call(b.node_id, "full/1", b"", 1.0)
        assert (caught.value.what, caught.value.expected, caught.value.do) == ("8 GiB", "9 GiB", "wait")
        with pytest.raises(Refused):
            await a.call(b.node_id, "nothing/1", b"", 1.0)
        with pytest.raises(PeerLost):
            await a.call(NodeId("c"), "echo/1", b"", 1.0)


async def test_a_stopped_node_stays_connected_and_silent_then_answers(autojump_clock) -> None:
    network = SimNetwork()
    async with running(network, "a", "b") as (a, b):
        await join(a, b)
        network.stop(b.node_id)
        with pytest.raises(DeadlineExceeded):
            await a.call(b.node_id, "echo/1", b"x", 1.0)
        assert a.peers() == {b.node_id}
        network.resume(b.node_id)
        assert await a.call(b.node_id, "echo/1", b"x", 1.0) == b"x"


async def test_a_killed_node_breaks_calls_and_may_come_back(autojump_clock) -> None:
    network = SimNetwork()

    async def live(transport: SimTransport, task_status) -> None:
        with transport.process:
            await transport.run(task_status=task_status)

    async def never(caller: NodeId, payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def kill_soon() -> None:
        await trio.sleep(1)
        network.kill(NodeId("b"))

    async with running(network, "a") as (a,), trio.open_nursery() as nursery:
        b = network.add("b")
        b.serve("never/1", never)
        await nursery.start(lambda task_status: live(b, task_status))
        await join(a, b)
        nursery.start_soon(kill_soon)
        with pytest.raises(PeerLost):
            await a.call(b.node_id, "never/1", b"", 10.0)
        assert [await a.events.receive(), await a.events.receive()] == [
            PeerConnected(b.node_id),
            PeerDisconnected(b.node_id),
        ]
        with pytest.raises(PeerLost):
            await a.dial(b.addresses()[0], None, 1.0)
        again = network.add("b", b.addresses())
        await nursery.start(lambda task_status: live(again, task_status))
        assert await a.dial(again.addresses()[0], b.node_id, 1.0) == b.node_id
        network.kill(NodeId("b"))


async def test_a_one_way_cut_lets_the_other_way_pass(autojump_clock) -> None:
    network = SimNetwork()
    async with running(network, "a", "b") as (a, b):
        await join(a, b)
        network.cut([a.node_id], [b.node_id], one_way=True)
        await b.publish(b"from b")
        await a.publish(b"from a")
        with pytest.raises(DeadlineExceeded):
            await b.call(a.node_id, "echo/1", b"", 1.0)
        assert await a.events.receive() == PeerConnected(b.node_id)
        assert await a.events.receive() == GossipReceived(b.node_id, b"from b")
        assert await b.events.receive() == PeerConnected(a.node_id)
        assert b.events.statistics().current_buffer_used == 0


async def test_gossip_reaches_those_behind_a_neighbour_once(autojump_clock) -> None:
    async with running(SimNetwork(), "a", "b", "c") as (a, b, c):
        await join(a, b)
        await join(b, c)
        await a.publish(b"news")
        assert await c.events.receive() == PeerConnected(b.node_id)
        assert await c.events.receive() == GossipReceived(a.node_id, b"news")
        assert c.statistics().gossip_received == 1


async def test_a_wrong_node_and_a_stranger_are_refused(autojump_clock) -> None:
    network = SimNetwork()
    async with running(network, "a", "b") as (a, b), trio.open_nursery() as nursery:
        stranger = network.add("s", mesh="another")
        await nursery.start(stranger.run)
        with pytest.raises(PeerLost, match="expected node c"):
            await a.dial(b.addresses()[0], NodeId("c"), 1.0)
        with pytest.raises(PeerLost, match="another mesh"):
            await stranger.dial(a.addresses()[0], None, 1.0)
        assert a.statistics().strangers_refused == 1
        assert not a.peers()
        nursery.cancel_scope.cancel()


async def test_only_the_author_can_sign_as_itself(autojump_clock) -> None:
    network = SimNetwork()
    a, b = network.add("a"), network.add("b")
    seal = a.sign(b"card")
    assert b.verify(a.node_id, b"card", seal)
    assert not b.verify(b.node_id, b"card", seal)
    assert not b.verify(a.node_id, b"other", seal)
    assert not b.verify(NodeId("\ud800"), b"", b"")
