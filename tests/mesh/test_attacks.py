"""What strangers and bad members may try, and that the node they try it on still serves.

The victim runs in this process, beside a friend who is a member like any other: if an attack ends
the victim, it ends the test. Each attack is one of those that were measured against py-libp2p 0.8.1
without our protection, where four of them, marked so, ended the node by a single message.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
import trio
from conftest import OTHER_KEY, PATIENCE_SECONDS, Nodes, connect, until
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import PUBSUB_SIGNING_PREFIX
from libp2p.utils.varint import encode_uvarint, encode_varint_prefixed

from meshinfer.base.errors import PeerLost
from meshinfer.transport.addresses import parse_address
from meshinfer.transport.base import MAX_GOSSIP_BYTES, GossipReceived
from meshinfer.transport.calls import ANSWER, encode_frame, encode_request
from meshinfer.transport.libp2p import Libp2pTransport
from meshinfer.transport.libp2p.connections import PENDING_PER_HOST, STRANGER_BYTES, CountedTcp
from meshinfer.transport.libp2p.hardening import STREAMS_PER_PEER
from meshinfer.transport.libp2p.identity import peer_id_of

GOSSIP, CALLS, PING = "/meshsub/1.1.0", "/meshinfer/calls/1", "/ipfs/ping/1.0.0"


@dataclass
class Scene:
    nodes: Nodes
    victim: Libp2pTransport
    friend: Libp2pTransport
    attacker: Libp2pTransport
    """A member of the mesh, connected to the victim, whose insides the test uses to misbehave."""
    opened: list[CountedTcp] = field(default_factory=list)

    async def tcp(self) -> CountedTcp:
        self.opened.append(CountedTcp(await trio.open_tcp_stream(*parse_address(self.victim.addresses()[0]))))
        return self.opened[-1]

    async def stream(self, protocol: str | None):
        """A raw stream from the attacker to the victim, past negotiation if a protocol is given."""
        if self.victim.node_id not in self.attacker.peers():
            await connect(self.attacker, self.victim)
        link = self.attacker._connections.of(peer_id_of(self.victim.node_id))[-1]
        stream = await link.swarm_conn.new_stream()
        if protocol is not None:
            negotiate = self.attacker._host.multiselect_client
            await negotiate.select_one_of([TProtocol(protocol)], MultiselectCommunicator(stream), 5)
        return stream

    async def still_serves(self) -> None:
        """The friend is answered, gossip flows, and a member who comes anew is let in."""
        with trio.fail_after(PATIENCE_SECONDS):
            assert await self.friend.call(self.victim.node_id, "echo", b"well?", PATIENCE_SECONDS) == b"well?"
            newcomer = await self.nodes.start("newcomer")
            await connect(newcomer, self.victim)
            assert await newcomer.call(self.victim.node_id, "echo", b"and me?", PATIENCE_SECONDS) == b"and me?"
            heard = self.victim.statistics().gossip_received
            while self.victim.statistics().gossip_received == heard:
                await self.friend.publish(b"gossip")
                await trio.sleep(0.1)
            await self.nodes.stop(newcomer)


@pytest.fixture
async def scene(nodes: Nodes) -> AsyncIterator[Scene]:
    victim, friend, attacker = [await nodes.start(name) for name in ("victim", "friend", "attacker")]
    await connect(friend, victim)
    await connect(attacker, victim)
    scene = Scene(nodes, victim, friend, attacker)
    yield scene
    for tcp in scene.opened:
        await tcp.abort()


async def all_at_once(count: int, attack: Callable[[int], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(attack, number)


# --- by strangers -------------------------------------------------------------------------------


async def test_garbage_on_many_connections(scene: Scene):
    rng = random.Random(160)

    async def send_garbage(_number: int) -> None:
        tcp = await scene.tcp()
        with suppress(Exception):  # the victim may hang up at any moment
            await tcp.write(rng.randbytes(rng.randrange(1, 3000)))
            await tcp.read(1000)
            await tcp.stream.send_eof()
        await tcp.abort()

    for _ in range(10):
        await all_at_once(16, send_garbage)
    await until(lambda: scene.victim.statistics().strangers_refused == 160)
    await scene.still_serves()


async def test_slow_strangers_do_not_lock_members_out(scene: Scene):
    """More than may be on their way at once; the oldest make room, and a member needs 10 ms."""
    async with trio.open_nursery() as nursery:

        async def drip(_number: int) -> None:
            tcp = await scene.tcp()
            with suppress(Exception):  # so it does to the oldest
                for byte in b"\x13/multistream/1.0.0\n\x07/noise\n":
                    await tcp.write(bytes([byte]))
                    await trio.sleep(0.5)
            await trio.sleep_forever()

        for number in range(2 * PENDING_PER_HOST):
            nursery.start_soon(drip, number)
        await until(lambda: scene.victim.statistics().strangers_refused >= PENDING_PER_HOST)
        assert len(scene.victim._connections._pending) <= PENDING_PER_HOST
        await scene.still_serves()
        nursery.cancel_scope.cancel()


async def test_a_stranger_cannot_send_without_end(scene: Scene):
    tcp = await scene.tcp()
    refused = scene.victim.statistics().strangers_refused
    await tcp.write(b"\x13/multistream/1.0.0\n")
    with trio.fail_after(PATIENCE_SECONDS), suppress(ConnectionClosedError):
        while True:  # a protocol that does not exist, again and again
            await tcp.write(b"\x04/no\n" * (STRANGER_BYTES // 5))
    await until(lambda: scene.victim.statistics().strangers_refused == refused + 1)
    await tcp.abort()
    await scene.still_serves()


@pytest.mark.parametrize("claimed", [2**31, 2**62], ids=["2 GiB", "4 EiB"])
async def test_a_claimed_length_allocates_nothing(scene: Scene, claimed):
    tcp = await scene.tcp()
    await tcp.write(b"\x13/multistream/1.0.0\n" + encode_uvarint(claimed) + b"x")
    await tcp.stream.send_eof()
    await until(lambda: scene.victim.statistics().strangers_refused == 1)
    await tcp.abort()
    await scene.still_serves()


async def test_noise_and_then_garbage(scene: Scene):
    """Anyone can make an identity and finish Noise; the proof is where it ends."""
    stranger = scene.nodes.make("stranger", OTHER_KEY)
    for sent in (b"", b"x", bytes(45), b"mesh\x01" + bytes(40 + 32), bytes(60_000)):
        tcp = await scene.tcp()
        refused = scene.victim.statistics().strangers_refused
        secure = await stranger._swarm.upgrader.security_multistream.secure_outbound(
            RawConnection(tcp, True), peer_id_of(scene.victim.node_id)
        )
        try:
            if sent:
                await secure.write(sent)
            await tcp.stream.send_eof()
        except trio.BrokenResourceError:
            pass
        await until(lambda refused=refused: scene.victim.statistics().strangers_refused == refused + 1)
        await tcp.abort()
    assert scene.victim.peers() == {scene.friend.node_id, scene.attacker.node_id}
    await scene.still_serves()


async def test_a_man_in_the_middle_gets_nowhere(scene: Scene):
    """Mallory ends Noise with both under an id of its own, and copies what each says to the other."""
    mallory = scene.nodes.make("mallory", OTHER_KEY)
    noise = mallory._swarm.upgrader.security_multistream
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]

    async def copy(source, target) -> None:
        with suppress(Exception):  # until either hangs up
            while True:
                await target.write(await source.read())

    async def relay() -> None:
        dialled_by_friend = CountedTcp(await listener.accept())
        to_victim = await scene.tcp()
        left = await noise.secure_inbound(RawConnection(dialled_by_friend, False))
        right = await noise.secure_outbound(RawConnection(to_victim, True), peer_id_of(scene.victim.node_id))
        async with trio.open_nursery() as both:
            both.start_soon(copy, left, right)
            await copy(right, left)
            await dialled_by_friend.abort()
            await to_victim.abort()

    refused = scene.victim.statistics().strangers_refused
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay)
        with pytest.raises(PeerLost):
            await scene.friend.dial(f"127.0.0.1:{port}", None, PATIENCE_SECONDS)
        await until(lambda: scene.victim.statistics().strangers_refused == refused + 1)
        nursery.cancel_scope.cancel()
    await listener.aclose()
    assert mallory.node_id not in scene.victim.peers() | scene.friend.peers()
    await scene.still_serves()


# --- by members: gossip -------------------------------------------------------------------------


def signed(keys, topic: str, *, data: bytes = b"data", seqno: int = 1, **changes) -> rpc_pb2.Message:
    author = ID.from_pubkey(keys.public_key)
    message = rpc_pb2.Message(data=data, topicIDs=[topic], from_id=author.to_bytes(), seqno=seqno.to_bytes(8, "big"))
    message.signature = keys.private_key.sign(PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString())
    message.key = keys.public_key.serialize()
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def rpc(**fields) -> bytes:
    return encode_varint_prefixed(rpc_pb2.RPC(**fields).SerializeToString())


def control(**fields) -> bytes:
    return rpc(control=rpc_pb2.ControlMessage(**fields))


KEYS = create_new_key_pair()
GOSSIP_ATTACKS: dict[str, Callable[[str], bytes]] = {
    "not protobuf (ended the node)": lambda _topic: encode_varint_prefixed(b"\xff" * 50),
    "key that cannot be parsed (ended the node)": lambda topic: rpc(
        publish=[signed(KEYS, topic, key=b"\xff\xff garbage", from_id=b"\x12\x20" + bytes(32))]
    ),
    "odd author (ended the node)": lambda topic: rpc(publish=[signed(KEYS, topic, from_id=b"\x00\x24\xff\xff")]),
    "no author": lambda topic: rpc(publish=[signed(KEYS, topic, from_id=b"")]),
    "bad signature": lambda topic: rpc(publish=[signed(KEYS, topic, signature=bytes(64))]),
    "no signature": lambda topic: rpc(publish=[signed(KEYS, topic, signature=b"")]),
    "changed data": lambda topic: rpc(publish=[signed(KEYS, topic, data=b"a", seqno=7), signed(KEYS, topic)][:1]),
    "another topic": lambda _topic: rpc(publish=[signed(KEYS, "elsewhere")]),
    "no topic": lambda topic: rpc(publish=[rpc_pb2.Message(data=b"x", from_id=b"x", seqno=b"x")]),
    "too large": lambda topic: rpc(publish=[signed(KEYS, topic, data=bytes(MAX_GOSSIP_BYTES + 1))]),
    "endless varint": lambda _topic: b"\xff" * 20,
    "claims 2 GiB": lambda _topic: encode_uvarint(2**31) + b"x",
    "half a message": lambda _topic: encode_uvarint(1000) + b"half",
    "bad peer record": lambda _topic: rpc(senderRecord=b"\xff" * 100),
    "IHAVE of rubbish": lambda topic: control(
        ihave=[rpc_pb2.ControlIHave(topicID=topic, messageIDs=[b"x", b"(b'',b'')", b"\xff" * 9])]
    ),
    "IWANT of rubbish": lambda _topic: control(
        iwant=[rpc_pb2.ControlIWant(messageIDs=[b"x" * 1000, b"(", b"__import__", b"\xff"])]
    ),
    "GRAFT of rubbish": lambda _topic: control(graft=[rpc_pb2.ControlGraft(topicID="x" * 5000)]),
    "PRUNE with peers": lambda topic: control(
        prune=[rpc_pb2.ControlPrune(topicID=topic, backoff=2**40, peers=[rpc_pb2.PeerInfo(peerID=b"\xff")])]
    ),
    "thousands of topics": lambda _topic: rpc(
        subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=f"t{number}") for number in range(3000)]
    ),
}


@pytest.mark.parametrize("attack", GOSSIP_ATTACKS.values(), ids=GOSSIP_ATTACKS.keys())
async def test_gossip(scene: Scene, attack):
    stream = await scene.stream(GOSSIP)
    await stream.write(attack(scene.victim._topic))
    await scene.stream(GOSSIP)  # the victim has read the first when it has answered on the same connection
    await scene.still_serves()
    assert len(scene.victim._pubsub.peer_topics) <= 1


async def test_nobody_is_believed_to_speak_for_another(scene: Scene):
    forged = signed(KEYS, scene.victim._topic, data=b"forged")
    forged.from_id = peer_id_of(scene.friend.node_id).to_bytes()
    stream = await scene.stream(GOSSIP)
    await stream.write(rpc(publish=[forged]))
    await scene.still_serves()
    while True:
        try:
            event = scene.victim.events.receive_nowait()
        except trio.WouldBlock:
            break
        assert not isinstance(event, GossipReceived) or event.payload != b"forged"


# --- by members: streams and calls --------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x13/multistream/1.0.0\n\x05\xff\xfe\xfd\xfc\n",
        b"\x13/multistream/1.0.0\n" + encode_uvarint(2**31),
        b"\x00",
        b"\xff" * 50,
        b"\x13/multistream/9.9.9\n",
    ],
    ids=["name not UTF-8 (ended the node)", "claims 2 GiB", "nothing", "endless varint", "other version"],
)
async def test_negotiation(scene: Scene, sent):
    stream = await scene.stream(None)
    await stream.write(sent)
    await scene.still_serves()
    await stream.reset()


async def test_unknown_protocols(scene: Scene):
    for number in range(50):
        with pytest.raises(Exception, match="protocol"):
            await scene.stream(f"/unknown/{number}")
    await scene.still_serves()


async def test_streams_that_open_and_reset(scene: Scene):
    for protocol in (None, GOSSIP, CALLS, PING):
        for _ in range(20):
            stream = await scene.stream(protocol)
            await stream.reset()
    await scene.still_serves()


async def test_more_streams_than_one_may_have(scene: Scene):
    """They are reset; what the attacker has on the victim is bounded."""
    refused = 0
    for _ in range(2 * STREAMS_PER_PEER):
        refused += 1
        with suppress(StreamError, MultiselectClientError):
            await scene.stream(CALLS)
            refused -= 1
    assert refused >= STREAMS_PER_PEER
    await scene.still_serves()


@pytest.mark.parametrize("sent", [b"half", bytes(32) * 100], ids=["half a ping", "many pings"])
async def test_pings(scene: Scene, sent):
    stream = await scene.stream(PING)
    await stream.write(sent)
    await stream.reset()
    await scene.still_serves()


@pytest.mark.parametrize(
    "sent",
    [
        random.Random(1).randbytes(5000),
        struct.pack(">IBI", 2**32 - 1, 1, 1),
        encode_frame(ANSWER, 1, b"unasked"),
        encode_request(1, "no such method", b""),
        encode_request(1, "echo", b"")[:-1],
        b"".join(encode_request(number, "echo", bytes(1000)) for number in range(500)),
    ],
    ids=["random", "claims 4 GiB", "an answer", "unknown method", "cut short", "500 at once"],
)
async def test_calls(scene: Scene, sent):
    stream = await scene.stream(CALLS)
    with suppress(StreamError):  # the victim may have reset it
        await stream.write(sent)
        await stream.close()
    await scene.still_serves()


async def test_calls_whose_answers_are_never_read(scene: Scene):
    stream = await scene.stream(CALLS)
    with trio.move_on_after(2), suppress(StreamError):
        for number in range(200):
            await stream.write(encode_request(number, "echo", bytes(200_000)))
    await scene.still_serves()


# --- by members: below the streams --------------------------------------------------------------


def yamux_frame(version: int, kind: int, flags: int, stream: int, length: int) -> bytes:
    return struct.pack(">BBHII", version, kind, flags, stream, length)


YAMUX_ATTACKS = {
    "bad version": yamux_frame(9, 0, 0, 1, 0),
    "bad type": yamux_frame(0, 77, 0, 1, 0),
    "unknown stream": yamux_frame(0, 0, 0, 4711, 5) + b"hello",
    "claims 2 GiB": yamux_frame(0, 0, 1, 1, 2**31) + b"x",
    "wrong parity": yamux_frame(0, 1, 1, 2, 0),
    "over the window": yamux_frame(0, 0, 1, 1, 300_000) + bytes(300_000),
    "1500 openings": b"".join(yamux_frame(0, 1, 1, 2 * number + 1, 0) for number in range(1500)),
    "go away": yamux_frame(0, 3, 0, 0, 0),
    "random": random.Random(2).randbytes(4000),
}


@pytest.mark.parametrize("sent", YAMUX_ATTACKS.values(), ids=YAMUX_ATTACKS.keys())
async def test_yamux(scene: Scene, sent):
    """From a member whose muxer speaks nonsense."""
    tcp = await scene.tcp()
    upgrader = scene.nodes.make("nonsense")._swarm.upgrader
    secure = await upgrader.upgrade_security(RawConnection(tcp, True), True, peer_id_of(scene.victim.node_id))
    communicator = MultiselectCommunicator(secure)
    await scene.attacker._host.multiselect_client.select_one_of([TProtocol("/yamux/1.0.0")], communicator, 5)
    with suppress(Exception):  # the victim may hang up while we speak
        await secure.write(sent)
    await scene.still_serves()
    await tcp.abort()
    await scene.still_serves()


async def test_noise_garbage_on_an_open_connection(scene: Scene):
    link = scene.attacker._connections.of(peer_id_of(scene.victim.node_id))[-1]
    await link.tcp.write(struct.pack(">H", 100) + bytes(100))
    await scene.still_serves()
    await until(lambda: scene.attacker.node_id not in scene.victim.peers())


async def test_who_hangs_up_as_soon_as_it_has_answered_is_nobody(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset may come in before the dialler has looked at its new connection: that ended the whole agent once."""
    connect = trio.open_tcp_stream

    async def connect_and_look_late(host: str, port: int) -> trio.SocketStream:
        stream = await connect(host, port)
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        return stream

    async def hang_up(stream: trio.SocketStream) -> None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, hang_up, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        monkeypatch.setattr(trio, "open_tcp_stream", connect_and_look_late)
        with pytest.raises(PeerLost, match="nobody answers"):
            await scene.friend.dial(f"127.0.0.1:{port}", None, PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
