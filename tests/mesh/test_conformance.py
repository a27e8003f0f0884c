"""What `transport.base` promises, asked of both who promise it: real libp2p on loopback, and the simulated network."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from conftest import KEY, OTHER_KEY, PATIENCE_SECONDS, Nodes, connect, echo, next_event, until

from meshinfer.base.errors import (
    BadInput,
    DeadlineExceeded,
    MeshinferError,
    NoRoom,
    PeerLost,
    ProtocolError,
    Refused,
)
from meshinfer.base.ids import NodeId
from meshinfer.testing.network import SimNetwork
from meshinfer.transport.base import (
    MAX_CALL_BYTES,
    MAX_GOSSIP_BYTES,
    GossipReceived,
    PeerConnected,
    PeerDisconnected,
    Transport,
)


class RealNetwork:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def start(self, name: str, *, other_mesh: bool = False) -> Transport:
        return await self._nodes.start(name, OTHER_KEY if other_mesh else KEY)

    async def stop(self, transport: Transport) -> None:
        await self._nodes.stop(transport)


class SimulatedNetwork:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._network = SimNetwork()

    async def start(self, name: str, *, other_mesh: bool = False) -> Transport:
        transport = self._network.add(name, mesh="other" if other_mesh else "mesh")
        transport.serve("echo", echo)
        await self._nodes.nursery.start(self._nodes._run, transport)
        return transport

    async def stop(self, transport: Transport) -> None:
        await self._nodes.stop(transport)


@pytest.fixture(params=[RealNetwork, SimulatedNetwork], ids=["libp2p", "simulated"])
async def network(request: pytest.FixtureRequest, nodes: Nodes) -> RealNetwork | SimulatedNetwork:
    return request.param(nodes)


@pytest.fixture
async def pair(network) -> tuple[Transport, Transport]:
    one, other = await network.start("one"), await network.start("other")
    await connect(one, other)
    return one, other


async def gossip_from(author: Transport, reader: Transport, payload: bytes) -> GossipReceived:
    """Publishes until it arrives: gossip is best effort, and the overlay needs a moment to form."""
    found: list[GossipReceived] = []

    async def read() -> None:
        while True:
            event = await next_event(reader, GossipReceived)
            if event.payload == payload:
                found.append(event)
                nursery.cancel_scope.cancel()

    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            while True:
                await author.publish(payload)
                await trio.sleep(0.2)
    return found[0]


# --- connections --------------------------------------------------------------------------------


async def test_a_dial_connects_both_sides(network):
    one, other = await network.start("one"), await network.start("other")
    assert one.peers() == frozenset()
    assert await one.dial(other.addresses()[0], None, PATIENCE_SECONDS) == other.node_id
    assert await next_event(one, PeerConnected) == PeerConnected(other.node_id)
    assert await next_event(other, PeerConnected) == PeerConnected(one.node_id)
    assert one.peers() == {other.node_id}
    assert other.peers() == {one.node_id}
    assert one.peer_host(other.node_id)
    assert other.peer_host(one.node_id)
    assert one.peer_host(NodeId("nobody")) is None
    assert one.statistics().peers == 1


async def test_dialling_again_changes_nothing(pair):
    one, other = pair
    for dialler, acceptor in ((one, other), (other, one), (one, other)):
        for expected in (acceptor.node_id, None):
            assert await dialler.dial(acceptor.addresses()[0], expected, PATIENCE_SECONDS) == acceptor.node_id
    assert await one.call(other.node_id, "echo", b"still", PATIENCE_SECONDS) == b"still"
    assert one.events.receive_nowait() == PeerConnected(other.node_id)
    with pytest.raises(trio.WouldBlock):
        one.events.receive_nowait()


async def test_two_that_dial_each_other_at_once_are_connected_once(network):
    one, other = await network.start("one"), await network.start("other")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.dial, other.addresses()[0], other.node_id, PATIENCE_SECONDS)
        nursery.start_soon(other.dial, one.addresses()[0], one.node_id, PATIENCE_SECONDS)
    assert await one.call(other.node_id, "echo", b"a", PATIENCE_SECONDS) == b"a"
    assert await other.call(one.node_id, "echo", b"b", PATIENCE_SECONDS) == b"b"
    for transport, peer in ((one, other), (other, one)):
        assert transport.events.receive_nowait() == PeerConnected(peer.node_id)
        with pytest.raises(trio.WouldBlock):
            transport.events.receive_nowait()


async def test_another_node_than_expected_is_an_error(network):
    one, other, third = [await network.start(name) for name in ("one", "other", "third")]
    with pytest.raises(PeerLost):
        await one.dial(other.addresses()[0], third.node_id, PATIENCE_SECONDS)
    assert one.peers() == frozenset()


async def test_a_node_of_another_mesh_is_refused(network):
    member, stranger = await network.start("member"), await network.start("stranger", other_mesh=True)
    with pytest.raises(PeerLost, match="another mesh"):
        await stranger.dial(member.addresses()[0], None, PATIENCE_SECONDS)
    await until(lambda: member.statistics().strangers_refused == 1)
    assert member.peers() == stranger.peers() == frozenset()
    with pytest.raises(trio.WouldBlock):
        member.events.receive_nowait()


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:http"])
async def test_what_is_no_address_is_bad_input(network, text):
    one = await network.start("one")
    with pytest.raises(BadInput):
        await one.dial(text, None, PATIENCE_SECONDS)


async def test_nobody_there_and_oneself_are_errors(network):
    one, gone = await network.start("one"), await network.start("gone")
    (address, *_) = gone.addresses()
    await network.stop(gone)
    with pytest.raises(PeerLost):
        await one.dial(address, None, PATIENCE_SECONDS)
    with pytest.raises(PeerLost, match="this node itself"):
        await one.dial(one.addresses()[0], None, PATIENCE_SECONDS)


async def test_a_peer_that_ends_is_disconnected_and_its_calls_are_lost(network):
    one, other = await network.start("one"), await network.start("other")
    asked = trio.Event()

    async def never(_peer: NodeId, _payload: bytes) -> bytes:
        asked.set()
        await trio.sleep_forever()
        raise AssertionError

    other.serve("never", never)
    await connect(one, other)
    failures: list[MeshinferError] = []

    async def call() -> None:
        try:
            await one.call(other.node_id, "never", b"", math.inf)
        except PeerLost as error:
            failures.append(error)

    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await asked.wait()
            await network.stop(other)
    assert len(failures) == 1
    assert await next_event(one, PeerDisconnected) == PeerDisconnected(other.node_id)
    assert one.peers() == frozenset()
    with pytest.raises(PeerLost):
        await one.call(other.node_id, "echo", b"", PATIENCE_SECONDS)


async def test_a_node_that_comes_back_is_the_same_node(network):
    one, other = await network.start("one"), await network.start("other")
    await connect(one, other)
    await network.stop(other)
    assert await next_event(one, PeerDisconnected) == PeerDisconnected(other.node_id)
    again = await network.start("other")
    assert again.node_id == other.node_id
    await connect(again, one)
    assert await one.call(again.node_id, "echo", b"back", PATIENCE_SECONDS) == b"back"
    assert (await gossip_from(again, one, b"also back")).author == other.node_id


# --- calls --------------------------------------------------------------------------------------


async def test_calls_go_both_ways(pair):
    one, other = pair
    callers: list[NodeId] = []

    async def who(peer: NodeId, _payload: bytes) -> bytes:
        callers.append(peer)
        return b""

    other.serve("who", who)
    assert await one.call(other.node_id, "echo", b"there", PATIENCE_SECONDS) == b"there"
    assert await other.call(one.node_id, "echo", b"", PATIENCE_SECONDS) == b""
    assert await one.call(other.node_id, "who", b"", PATIENCE_SECONDS) == b""
    assert callers == [one.node_id]
    assert (one.statistics().calls_sent, other.statistics().calls_served) == (2, 2)


async def test_the_largest_call_passes_and_a_larger_one_does_not(pair):
    one, other = pair
    largest = bytes(MAX_CALL_BYTES)
    assert await one.call(other.node_id, "echo", largest, PATIENCE_SECONDS) == largest
    with pytest.raises(BadInput):
        await one.call(other.node_id, "echo", largest + b"x", PATIENCE_SECONDS)

    async def too_much(_peer: NodeId, _payload: bytes) -> bytes:
        return largest + b"x"

    other.serve("too much", too_much)
    with pytest.raises(ProtocolError):
        await one.call(other.node_id, "too much", b"", PATIENCE_SECONDS)
    assert await one.call(other.node_id, "echo", b"fine", PATIENCE_SECONDS) == b"fine"


async def test_a_handlers_error_arrives_as_itself(pair):
    one, other = pair

    async def full(_peer: NodeId, _payload: bytes) -> bytes:
        raise NoRoom("3 GiB are missing", expected="8 GiB", do="stop a model")

    other.serve("full", full)
    with pytest.raises(NoRoom) as caught:
        await one.call(other.node_id, "full", b"", PATIENCE_SECONDS)
    assert (caught.value.what, caught.value.expected, caught.value.do) == ("3 GiB are missing", "8 GiB", "stop a model")
    assert one.statistics().calls_failed == 1


async def test_a_bug_in_a_handler_fails_its_call_alone(pair):
    one, other = pair

    async def bug(_peer: NodeId, _payload: bytes) -> bytes:
        raise KeyError("a secret that must stay there")

    other.serve("bug", bug)
    with pytest.raises(MeshinferError) as caught:
        await one.call(other.node_id, "bug", b"", PATIENCE_SECONDS)
    assert caught.value.code == "internal"
    assert "secret" not in str(caught.value)
    assert await one.call(other.node_id, "echo", b"fine", PATIENCE_SECONDS) == b"fine"


async def test_an_unknown_method_is_refused(pair):
    one, other = pair
    with pytest.raises(Refused):
        await one.call(other.node_id, "telepathy", b"", PATIENCE_SECONDS)


async def test_a_call_to_who_is_not_connected_is_lost(network):
    one, other = await network.start("one"), await network.start("other")
    for peer in (other.node_id, one.node_id, NodeId("nobody")):
        with pytest.raises(PeerLost):
            await one.call(peer, "echo", b"", PATIENCE_SECONDS)


async def test_a_call_ends_by_its_deadline_and_harms_no_other(pair):
    one, other = pair
    release = trio.Event()

    async def slow(_peer: NodeId, _payload: bytes) -> bytes:
        await release.wait()
        return b"too late"

    other.serve("slow", slow)
    with pytest.raises(DeadlineExceeded):
        await one.call(other.node_id, "slow", b"", 0.05)
    release.set()
    for number in range(20):
        assert await one.call(other.node_id, "echo", b"%d" % number, PATIENCE_SECONDS) == b"%d" % number
    assert one.peers() == {other.node_id}


@pytest.mark.parametrize("size", [10, MAX_CALL_BYTES], ids=["small", "large"])
async def test_cancelled_calls_leave_the_connection_working(pair, size):
    one, other = pair
    payload = bytes(size)
    assert await one.call(other.node_id, "echo", payload, PATIENCE_SECONDS) == payload
    for checkpoints in range(20):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.call, other.node_id, "echo", payload, PATIENCE_SECONDS)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
    assert await one.call(other.node_id, "echo", payload, PATIENCE_SECONDS) == payload
    assert one.events.receive_nowait() == PeerConnected(other.node_id)
    with pytest.raises(trio.WouldBlock):
        one.events.receive_nowait()


async def test_many_calls_at_once_are_all_answered(pair):
    one, other = pair
    answers: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        answers[number] = await one.call(other.node_id, "echo", b"%d" % number, PATIENCE_SECONDS)

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(ask, number)
    assert answers == {number: b"%d" % number for number in range(200)}


async def test_a_handler_may_call_back(pair):
    one, other = pair

    async def relay(peer: NodeId, payload: bytes) -> bytes:
        return await other.call(peer, "echo", payload + b" and back", PATIENCE_SECONDS)

    other.serve("relay", relay)
    assert await one.call(other.node_id, "relay", b"there", PATIENCE_SECONDS) == b"there and back"


# --- gossip -------------------------------------------------------------------------------------


async def test_gossip_reaches_a_peer_with_its_author(pair):
    one, other = pair
    assert await gossip_from(one, other, b"news") == GossipReceived(one.node_id, b"news")
    assert one.statistics().gossip_sent >= 1
    assert other.statistics().gossip_received >= 1


async def test_gossip_crosses_who_stands_between(network):
    left, middle, right = [await network.start(name) for name in ("left", "middle", "right")]
    await connect(left, middle)
    await connect(right, middle)
    assert left.peers() == {middle.node_id}
    assert await gossip_from(left, right, b"over") == GossipReceived(left.node_id, b"over")


async def test_nobody_hears_its_own_gossip(pair):
    one, other = pair
    await gossip_from(one, other, b"mine")
    await gossip_from(other, one, b"yours")
    while True:
        try:
            event = one.events.receive_nowait()
        except trio.WouldBlock:
            break
        assert not isinstance(event, GossipReceived) or event.author != one.node_id


async def test_the_largest_gossip_passes_and_a_larger_one_does_not(pair):
    one, other = pair
    largest = bytes(MAX_GOSSIP_BYTES)
    assert (await gossip_from(one, other, largest)).payload == largest
    with pytest.raises(BadInput):
        await one.publish(largest + b"x")


async def test_gossip_that_nobody_reads_is_dropped_and_connections_are_still_told(network):
    author, reader = await network.start("author"), await network.start("reader")
    await connect(author, reader)
    await gossip_from(author, reader, b"it flows")
    while reader.statistics().gossip_dropped == 0:
        for _ in range(20):
            await author.publish(b"flood")
        await author.call(reader.node_id, "echo", b"", PATIENCE_SECONDS)
    late = await network.start("late")
    await connect(late, reader)
    while await next_event(reader, PeerConnected) != PeerConnected(late.node_id):
        pass


# --- the rest -----------------------------------------------------------------------------------


async def test_signatures_prove_their_author(pair):
    one, other = pair
    signature = one.sign(b"I said so")
    assert other.verify(one.node_id, b"I said so", signature)
    assert one.verify(one.node_id, b"I said so", signature)
    assert not other.verify(other.node_id, b"I said so", signature)
    assert not other.verify(one.node_id, b"I said no", signature)
    for author in ("", "garbage", "12D3KooW", "\x00", "Qm" * 30, "ünï", "1" * 10000):
        for garbage in (b"", b"\x00" * 64, signature):
            assert not one.verify(NodeId(author), b"I said so", garbage)
    for garbage in (b"", b"\x00" * 64, signature[:-1], signature + b"x"):
        assert not one.verify(one.node_id, b"I said so", garbage)


async def test_a_node_that_ended_leaves_nothing_running(network):
    one, other = await network.start("one"), await network.start("other")
    await connect(one, other)
    await network.stop(one)
    await network.stop(other)
    assert one.peers() == other.peers() == frozenset()
    assert one.statistics().peers == 0


def test_both_kinds_have_the_whole_interface(tmp_path: Path):
    """For the type checker: each is a `Transport`."""
    make: list[Callable[[], Transport]] = [lambda: SimNetwork().add("one")]
    assert all(isinstance(made().node_id, str) for made in make)
