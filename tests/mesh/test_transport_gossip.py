"""Gossip over the real transport: it goes on after breaks, keeps little, and goes through some neighbours, not all."""

from __future__ import annotations

import pytest
import trio
from conftest import PATIENCE_SECONDS, Nodes, connect, next_event, until
from libp2p.abc import IHost
from libp2p.host.exceptions import StreamFailure
from libp2p.peer.id import ID
from libp2p.pubsub import pubsub as pubsub_module
from libp2p.pubsub.pb.rpc_pb2 import RPC, Message

from meshinfer.transport.base import GossipReceived
from meshinfer.transport.libp2p import Libp2pTransport, hardening
from meshinfer.transport.libp2p.gossip import HEARTBEAT_SECONDS
from meshinfer.transport.libp2p.identity import peer_id_of


async def test_gossip_goes_on_both_ways_after_a_stream_of_its_own_broke(nodes: Nodes):
    """The library opens another and forgets that the peer had subscribed."""
    one, other = await nodes.start("one"), await nodes.start("other")
    await connect(one, other)
    for author, reader in ((one, other), (other, one)) * 2:
        await until(lambda author=author, reader=reader: peer_id_of(reader.node_id) in author._pubsub.peers)
        await author._pubsub.peers[peer_id_of(reader.node_id)].reset()
        before = reader.statistics().gossip_received
        with trio.fail_after(PATIENCE_SECONDS):
            while reader.statistics().gossip_received < before + 3:
                await author.publish(b"still here")
                await trio.sleep(0.05)


async def test_gossip_goes_both_ways_though_the_connection_that_it_began_on_broke_beside_another(nodes: Nodes):
    """The library takes any connection to a peer for its stream, and gives up for good if that one ends just then."""
    one, other = await nodes.start("one"), await nodes.start("other")
    opens, broken = one._host.new_stream, [StreamFailure("its connection ended")]

    async def open_on_one_that_breaks(peer_id, protocols):
        if broken:
            raise broken.pop()
        return await opens(peer_id, protocols)

    one._host.new_stream = open_on_one_that_breaks
    await connect(one, other)
    for author, reader in ((one, other), (other, one)):
        with trio.fail_after(PATIENCE_SECONDS):
            while not reader.statistics().gossip_received:
                await author.publish(b"still here")
                await trio.sleep(0.05)
    assert not broken


async def test_what_gossip_keeps_of_old_messages_is_bounded(nodes: Nodes):
    """The library keeps a thousand whole ones: an idle agent would grow for half an hour."""
    author, reader = await nodes.start("author"), await nodes.start("reader")
    await connect(author, reader)
    most = hardening.REMEMBERED_MESSAGES
    with trio.fail_after(PATIENCE_SECONDS):
        while reader.statistics().gossip_received < 2 * most:
            await author.publish(b"another")
            await trio.lowlevel.checkpoint()
    assert [len(node._router.equivocation_detection) for node in (author, reader)] == [most, most]


async def test_a_message_that_came_already_starts_nothing(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    """In a full mesh each comes from every neighbour; and no list of addresses is signed and checked for each copy."""
    lists: list[bool] = []
    """Whether each message that was read came with one."""
    consume = pubsub_module.maybe_consume_signed_record

    def noted(msg: RPC, host: IHost, peer_id: ID) -> bool:
        lists.extend(msg.HasField("senderRecord") for _ in msg.publish)
        return consume(msg, host, peer_id)

    monkeypatch.setattr(pubsub_module, "maybe_consume_signed_record", noted)
    author, reader = await nodes.start("author"), await nodes.start("reader")
    pushed: list[Message] = []
    push = reader._pubsub.push_msg

    async def push_noted(forwarder: ID, msg: Message) -> None:
        pushed.append(msg)
        await push(forwarder, msg)

    reader._pubsub.push_msg = push_noted
    await connect(author, reader)
    with trio.fail_after(PATIENCE_SECONDS):
        while not pushed:
            await author.publish(b"first")
            await trio.sleep(0.05)
    stream = author._pubsub.peers[peer_id_of(reader.node_id)]
    await until(lambda: reader.statistics().gossip_received == len(pushed))
    before = len(pushed)
    for _ in range(3):
        await author._pubsub.write_msg(stream, RPC(publish=[pushed[0]]))
    await author.publish(b"new")
    await until(lambda: any(message.data == b"new" for message in pushed))
    assert [message.data for message in pushed[before:] if message.data != b"first"] == [b"new"]
    assert pushed[0] not in pushed[before:]
    assert lists
    assert not any(lists)


async def test_gossip_is_heard_after_a_quick_restart(nodes: Nodes):
    """The library counts from the second of its start; who restarts soon would pass for a repetition."""
    reader = await nodes.start("reader")
    for life in range(3):
        author = await nodes.start("author")
        await connect(author, reader)
        heard: set[bytes] = set()
        with trio.fail_after(PATIENCE_SECONDS):
            while not heard:
                for number in range(20):
                    await author.publish(b"life %d, %d" % (life, number))
                event = await next_event(reader, GossipReceived)
                heard |= {event.payload} if event.payload.startswith(b"life %d" % life) else set()
        await nodes.stop(author)
        await until(lambda: not reader.peers())


# --- the overlay --------------------------------------------------------------------------------


async def take_in(transport: Libp2pTransport) -> None:
    async for _ in transport.events:
        pass


@pytest.mark.parametrize("count", [3, 8])
async def test_everyone_has_two_to_four_neighbours_and_keeps_them(nodes: Nodes, count: int):
    transports: list[Libp2pTransport] = []
    for number in range(count):
        one = await nodes.start(f"node{number}")
        nodes.nursery.start_soon(take_in, one)
        for other in transports:
            await connect(one, other)
        transports.append(one)

    def overlay() -> dict[ID, set[ID]]:
        return {peer_id_of(each.node_id): set(each._router.mesh[each._topic]) for each in transports}

    with trio.fail_after(2 * PATIENCE_SECONDS):
        settled: dict[ID, set[ID]] = {}
        while overlay() != settled or not all(2 <= len(neighbours) <= 4 for neighbours in settled.values()):
            settled = overlay()
            await trio.sleep(4 * HEARTBEAT_SECONDS)
    first, *_ = settled
    reached, edge = {first}, {first}
    while edge := set().union(*(settled[node] for node in edge)) - reached:
        reached |= edge
    assert reached == settled.keys(), "what one says comes to all"
