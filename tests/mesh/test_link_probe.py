"""Probes over real sockets: what they find, what they cost, and what strangers get from their port."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import socket
import ssl
import threading
from pathlib import Path

import psutil
import pytest
import trio
from conftest import Nodes, connect, until

from meshinfer.base.errors import MeshinferError, PeerLost, ProtocolError, Refused
from meshinfer.base.ids import NodeId
from meshinfer.base.units import MIB
from meshinfer.mesh.mesh import Mesh, MeshSettings
from meshinfer.mesh.own_card import OwnCard
from meshinfer.pipeline.channel import Channel
from meshinfer.testing.cards import node_card
from meshinfer.transport import probe_channel
from meshinfer.transport.arrivals import Arrival
from meshinfer.transport.certificates import client_context, make_certificate
from meshinfer.transport.probe_channel import BULK_BYTES, LATENCY_BYTES, MAX_BURST_BYTES, ProbeDoor
from meshinfer.transport.tls import WELCOME, Listener, SecureSocket, dial
from meshinfer.wire.frames import Frame, FrameKind, Tensor, TensorSpec
from meshinfer.wire.messages import ChannelOffer
from meshinfer.wire.runner_control import ExpectChannel

HOST = "127.0.0.1"
PEER = NodeId("peer")


async def test_a_probe_finds_what_there_is_and_counts_what_it_spends():
    one, other = ProbeDoor(HOST), ProbeDoor(HOST)
    with other.listening():
        small = await one.measure(PEER, other.offer(one.certificate_der, (HOST,), 0), 0)
        assert small.rtt_seconds > 0
        assert 0 < small.message_seconds <= small.rtt_seconds / 2
        assert small.out_bytes_per_second == small.in_bytes_per_second == 0
        assert small.spent_bytes <= LATENCY_BYTES
        large = await one.measure(PEER, other.offer(one.certificate_der, (HOST,), BULK_BYTES), BULK_BYTES)
        assert large.out_bytes_per_second > 0
        assert large.in_bytes_per_second > 0
        assert large.spent_bytes <= BULK_BYTES + LATENCY_BYTES
        await until(lambda: not other.is_serving)
    assert other.take_served_bytes() == small.spent_bytes + large.spent_bytes
    assert other.take_served_bytes() == 0


async def test_bursts_leave_no_memory_behind():
    one, other = ProbeDoor(HOST), ProbeDoor(HOST)
    with other.listening():
        await one.measure(PEER, other.offer(one.certificate_der, (HOST,), 0), 0)
        before = psutil.Process().memory_info().rss
        for _ in range(2):
            await one.measure(PEER, other.offer(one.certificate_der, (HOST,), BULK_BYTES), BULK_BYTES)
            await until(lambda: not other.is_serving)
    assert psutil.Process().memory_info().rss - before < MAX_BURST_BYTES // 2


async def test_bursts_end_where_the_allowance_does():
    one, other = ProbeDoor(HOST), ProbeDoor(HOST)
    with other.listening():
        found = await one.measure(PEER, other.offer(one.certificate_der, (HOST,), MIB), MIB)
        assert found.out_bytes_per_second > 0
        assert found.spent_bytes <= MIB + LATENCY_BYTES
        # A dialler that takes more than it was allowed is cut off.
        with pytest.raises(PeerLost):
            await one.measure(PEER, other.offer(one.certificate_der, (HOST,), MIB), BULK_BYTES)


async def test_an_offer_works_once_and_only_for_whom_it_was_made():
    one, other, thief = ProbeDoor(HOST), ProbeDoor(HOST), ProbeDoor(HOST)
    with other.listening():
        offer = other.offer(one.certificate_der, (HOST,), 0)
        with pytest.raises(MeshinferError):
            await thief.measure(PEER, offer, 0)
        await one.measure(PEER, offer, 0)
        with pytest.raises(MeshinferError):
            await one.measure(PEER, offer, 0)
        with pytest.raises(ProtocolError):
            other.offer(b"no certificate", (HOST,), 0)
    with pytest.raises(MeshinferError):
        await one.measure(PEER, offer, 0)


async def test_who_does_not_listen_offers_nothing():
    with pytest.raises(Refused):
        ProbeDoor(HOST).offer(make_certificate().der, (HOST,), 0)


async def test_strangers_and_garbage_on_the_port_harm_nobody():
    one, other = ProbeDoor(HOST), ProbeDoor(HOST)
    with other.listening():
        offer = other.offer(one.certificate_der, (HOST,), 0)

        def annoy() -> None:
            for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01\xff\xff"):
                with socket.create_connection((HOST, offer.port), 5) as stranger:
                    stranger.sendall(garbage)
            context = client_context(make_certificate(), offer.certificate_der)
            # Refused in the handshake or just after it: TLS 1.3 leaves open which.
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                plain = socket.create_connection((HOST, offer.port), 5)
                with context.wrap_socket(plain) as stranger:
                    stranger.sendall(b"\x20" + bytes(32))
                    assert stranger.recv(1) == b""

        await trio.to_thread.run_sync(annoy)
        assert (await one.measure(PEER, offer, 0)).rtt_seconds > 0


async def test_a_member_that_sends_garbage_ends_its_own_probe_only():
    one, other = ProbeDoor(HOST), ProbeDoor(HOST)
    with other.listening():

        def misbehave(garbage: bytes) -> None:
            offer = other.offer(one.certificate_der, (HOST,), 0)
            secure = probe_channel.dial(offer, one._certificate, 5.0)
            secure.send_all(garbage, 5.0)
            answer = bytearray(64)
            with contextlib.suppress(OSError):  # it may have ended while we wrote
                assert secure.recv_into(memoryview(answer), 10.0) == 0
            secure.close()

        for garbage in (os.urandom(64), b"MF" + bytes(22), b"MF\x01\x03" + bytes(20), b"MF\x01\x01" + b"\xff" * 20):
            await trio.to_thread.run_sync(misbehave, garbage)
        assert (await one.measure(PEER, other.offer(one.certificate_der, (HOST,), 0), 0)).rtt_seconds > 0
        await until(lambda: not other.is_serving)


async def test_a_peer_that_stalls_holds_up_neither_the_loop_nor_the_probe_for_ever(monkeypatch):
    monkeypatch.setattr(probe_channel, "PROBE_SECONDS", 1.0)
    stalled = threading.Event()
    monkeypatch.setattr(probe_channel, "_answer", lambda *_: stalled.wait(30))
    one, other = ProbeDoor(HOST), ProbeDoor(HOST)
    turns = 0
    with other.listening():
        offer = other.offer(one.certificate_der, (HOST,), 0)
        async with trio.open_nursery() as nursery:

            async def probe() -> None:
                with pytest.raises(PeerLost):
                    await one.measure(PEER, offer, 0)
                nursery.cancel_scope.cancel()

            nursery.start_soon(probe)
            while True:
                await trio.sleep(0.01)
                turns += 1
        stalled.set()
    assert turns > 3  # the loop went on while the probe waited


async def test_a_cancelled_probe_is_left_behind_at_once():
    one = ProbeDoor(HOST)
    with socket.create_server((HOST, 0)) as silent:
        other = ProbeDoor(HOST)
        with other.listening():
            offer = other.offer(one.certificate_der, (HOST,), 0)
        dead = type(offer)(offer.hosts, silent.getsockname()[1], offer.certificate_der, offer.token)
        with trio.move_on_after(0.05) as scope:
            await one.measure(PEER, dead, 0)
        assert scope.cancelled_caught


def test_the_routing_table_says_where_from():
    assert ProbeDoor(HOST).own_host_towards(HOST) == HOST
    assert ProbeDoor(HOST).own_host_towards("no address") == ""


# --- whole meshes on loopback --------------------------------------------------------------------------


async def test_two_agents_measure_their_link_both_ways(nodes: Nodes, tmp_path: Path):
    transports = [await nodes.start("one"), await nodes.start("other")]
    meshes: list[Mesh] = []
    async with trio.open_nursery() as nursery:
        for transport in transports:
            home = tmp_path / f"mesh-{transport.node_id}"
            card = node_card(transport.node_id, addresses=transport.addresses())
            settings = MeshSettings(home, "test", discovery=False)
            mesh = Mesh(transport, OwnCard(card, home), settings, random.Random(1), probes=ProbeDoor(HOST))
            meshes.append(mesh)
            await nursery.start(mesh.run)
        await connect(*transports)

        def measured() -> bool:
            ids = [transport.node_id for transport in transports]
            return all(
                (link := mesh.topology().link_between.get((ids[index], ids[1 - index]))) is not None
                and link.speed is not None
                and link.channel_rtt_seconds > 0
                and link.message_seconds > 0
                for mesh in meshes
                for index in (0, 1)
            )

        await until(measured)
        for index in (0, 1):
            assert meshes[index].best_host(transports[1 - index].node_id) == HOST
            shown = meshes[index].topology().to_json()["nodes"][transports[index].node_id]["links"]
            (link,) = shown.values()
            assert link["bandwidth_gbps"] > 0
            assert link["channel_rtt_us"] > 0
        nursery.cancel_scope.cancel()


# --- real frames ---------------------------------------------------------------------------------------


def test_a_runners_channel_times_the_large_frames_that_it_waited_for():
    admitted: queue.Queue[SecureSocket] = queue.Queue()
    arrivals: queue.Queue[Arrival] = queue.Queue()
    frames: queue.Queue[Frame] = queue.Queue()
    ours, theirs = make_certificate(), make_certificate()

    def admit(_expected: ExpectChannel, secure: SecureSocket) -> None:
        secure.send_all(WELCOME)
        admitted.put(secure)

    listener = Listener(HOST, theirs, admit)
    listener.expect(ExpectChannel("activations", 0, ours.der, bytes(32), 30.0))
    sender = Channel(
        "activations", 1, "", dial(ChannelOffer((HOST,), listener.port, theirs.der, bytes(32)), ours, 5.0), dialled=True
    )
    receiver = Channel("activations", 0, "", admitted.get(timeout=20), dialled=False)
    receiver.start(8 * MIB, frames.put, lambda _reason: None, arrivals.put)
    sender.start(0, lambda _frame: None, lambda _reason: None)

    def send(byte_count: int) -> None:
        data = memoryview(bytes(byte_count))
        sender.send(Frame(FrameKind.STEP, 0, 0, b"", (Tensor(TensorSpec("int32", (byte_count // 4,)), data),)))
        assert frames.get(timeout=20).tensors[0].data.nbytes == byte_count

    send(4096)
    assert arrivals.empty()  # too small to say anything
    while arrivals.empty():  # the reader waits before each frame, but may be late for one on a busy machine
        send(MIB)
    arrival = arrivals.get()
    assert arrival.total_bytes > MIB
    assert 0 < arrival.half_bytes <= arrival.total_bytes / 2
    sender.end("done")
    receiver.end("done")
    listener.close()
