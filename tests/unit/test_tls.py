"""Channels open for whoever was announced, once, and for nobody else."""

from __future__ import annotations

import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from meshinfer.base.errors import PeerLost, ProtocolError, Refused
from meshinfer.base.ids import InstanceId, SessionId
from meshinfer.transport.certificates import (
    Certificate,
    check_certificate,
    client_context,
    make_certificate,
    server_context,
)
from meshinfer.transport.dialling import ANSWER_SECONDS, Unanswered
from meshinfer.transport.origin import PIECE_BYTES, STALL_SECONDS, OriginChannel, open_origin_channel
from meshinfer.transport.tls import ASK_AFTER_SECONDS, MAX_HANDSHAKES, WELCOME, Listener, SecureSocket, dial
from meshinfer.wire.frames import Frame, FrameKind, encode_frame
from meshinfer.wire.messages import ChannelOffer
from meshinfer.wire.records import ORIGIN_RECORDS, RUNNER_RECORDS, OpenSession, Sampling, Token
from meshinfer.wire.runner_control import ExpectChannel

PATIENCE = 20.0
IN_VAIN = 0.5
"""For what will not be: a dialler tries again until its time is up."""


class Host:
    """A listener on loopback whose admitted channels can be waited for."""

    def __init__(self) -> None:
        self.certificate = make_certificate()
        self.admitted: queue.Queue[tuple[ExpectChannel, SecureSocket]] = queue.Queue()
        self.opened: list[SecureSocket] = []
        self.listener = Listener("127.0.0.1", self.certificate, self._admit)

    def _admit(self, channel: ExpectChannel, secure: SecureSocket) -> None:
        self.opened.append(secure)
        secure.send_all(WELCOME)
        self.admitted.put((channel, secure))

    def expect(self, dialler: Certificate, token: bytes = b"t" * 32, lapses: float = 60.0) -> ChannelOffer:
        self.listener.expect(ExpectChannel("origin", -1, dialler.der, token, lapses))
        return ChannelOffer(("127.0.0.1",), self.listener.port, self.certificate.der, token)

    def still_admits(self) -> bool:
        me = make_certificate()
        self.dial(self.expect(me, os.urandom(32)), me)
        while self.next_admitted()[0].certificate_der != me.der:
            pass
        return True

    def next_admitted(self) -> tuple[ExpectChannel, SecureSocket]:
        return self.admitted.get(timeout=PATIENCE)

    def dial(self, offer: ChannelOffer, own: Certificate) -> SecureSocket:
        self.opened.append(dial(offer, own, PATIENCE))
        return self.opened[-1]


@pytest.fixture
def host():
    host = Host()
    yield host
    host.listener.close()
    for secure in host.opened:
        secure.close()


def test_both_directions_carry_bytes_at_once(host: Host):
    me = make_certificate()
    mine = host.dial(host.expect(me), me)
    _, theirs = host.next_admitted()
    there, back = os.urandom(5 << 20), os.urandom(3 << 20)
    received: dict[str, bytes] = {}

    def read(name: str, channel: SecureSocket, size: int) -> None:
        data, filled = bytearray(size), 0
        while filled < size:
            filled += channel.recv_into(memoryview(data)[filled:], PATIENCE)
        received[name] = bytes(data)

    threads = [
        threading.Thread(target=mine.send_all, args=(there,)),
        threading.Thread(target=theirs.send_all, args=(back,)),
        threading.Thread(target=read, args=("there", theirs, len(there))),
        threading.Thread(target=read, args=("back", mine, len(back))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert received == {"there": there, "back": back}


def test_shutting_down_wakes_a_reader(host: Host):
    me = make_certificate()
    mine = host.dial(host.expect(me), me)
    threading.Thread(target=mine.shut_down).start()
    assert mine.recv_into(memoryview(bytearray(1)), PATIENCE) == 0


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="macOS names it otherwise")
def test_a_silent_connection_is_asked_for_within_seconds_at_both_ends(host: Host, monkeypatch: pytest.MonkeyPatch):
    made: list[socket.socket] = []
    real = ssl.SSLContext.wrap_socket

    def wrap(context: ssl.SSLContext, sock: socket.socket, **given: Any) -> ssl.SSLSocket:
        made.append(tls := real(context, sock, **given))
        return tls

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", wrap)
    me = make_certificate()
    host.dial(host.expect(me), me)
    host.next_admitted()

    async def be_origin() -> None:
        channel = await open_origin_channel(host.expect(me, os.urandom(32)), me, timeout_seconds=PATIENCE)
        made.append(channel._stream.transport_stream.socket)  # type: ignore[arg-type]
        host.next_admitted()
        assert len(made) == 4
        for sock in made:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == ASK_AFTER_SECONDS
        await channel.aclose()

    trio.run(be_origin)


def silent() -> socket.socket:
    """As behind a firewall, or a proxy: the connection is made, and nothing comes back."""
    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))
    deaf.listen(8)
    return deaf


def open_as_runner(offer: ChannelOffer, own: Certificate) -> None:
    dial(offer, own, PATIENCE)


def open_as_origin(offer: ChannelOffer, own: Certificate) -> None:
    async def be_origin() -> None:
        await open_origin_channel(offer, own, timeout_seconds=PATIENCE)

    trio.run(be_origin)


@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2"), ("127.0.0.1", "127.0.0.1")])
@pytest.mark.parametrize("open_channel", [open_as_runner, open_as_origin])
def test_who_hears_nothing_at_all_says_so_long_before_its_time_is_up(
    host: Host, open_channel: Callable[[ChannelOffer, Certificate], None], hosts: tuple[str, ...]
):
    me = make_certificate()
    with silent() as deaf:
        offer = replace(host.expect(me), port=deaf.getsockname()[1])
        begun = time.monotonic()
        # At a second address somebody refuses, which is no answer of whom it was to reach; or it is as silent.
        with pytest.raises(Unanswered):
            open_channel(replace(offer, hosts=hosts), me)
        assert time.monotonic() - begun < PATIENCE / 2
        with pytest.raises(Unanswered):
            dial(replace(offer, loads=True), me, IN_VAIN)


async def test_an_origin_whose_time_is_up_at_the_second_address_says_so_of_the_first(host: Host):
    me = make_certificate()
    with silent() as deaf:
        offer = replace(host.expect(me), port=deaf.getsockname()[1], hosts=("127.0.0.1",) * 3)
        with pytest.raises(Unanswered):
            await open_origin_channel(offer, me, timeout_seconds=ANSWER_SECONDS + 0.5)


def test_a_refusal_is_an_answer_and_so_is_a_closed_door(host: Host):
    me = make_certificate()
    with silent() as deaf:
        port = deaf.getsockname()[1]
    with pytest.raises(PeerLost) as nobody:
        dial(replace(host.expect(me), port=port), me, IN_VAIN)
    assert not isinstance(nobody.value, Unanswered)


def test_a_token_works_once(host: Host):
    me = make_certificate()
    offer = host.expect(me)
    host.dial(offer, me)
    host.expect(make_certificate(), b"another token that is awaited")
    with pytest.raises((PeerLost, Refused)):
        dial(offer, me, IN_VAIN)
    assert host.still_admits()


def test_a_lapsed_token_opens_nothing(host: Host):
    me = make_certificate()
    offer = host.expect(me, lapses=0.0)
    with pytest.raises((PeerLost, Refused)):
        dial(offer, me, IN_VAIN)
    assert host.listener.statistics().expected == 0


def test_the_right_token_with_another_certificate_opens_nothing(host: Host):
    offer = host.expect(make_certificate())
    with pytest.raises((PeerLost, Refused)):
        dial(offer, make_certificate(), IN_VAIN)
    assert host.listener.statistics().admitted == 0
    assert host.still_admits()


def test_a_token_of_somebody_else_who_is_expected_opens_nothing(host: Host):
    me, other = make_certificate(), make_certificate()
    host.expect(me, b"my own token, thirty-two bytes..")
    theirs = host.expect(other, b"another's token, thirty-two byte")
    with pytest.raises(Refused):
        dial(theirs, me, IN_VAIN)
    host.dial(theirs, other)


def test_an_impostor_at_the_address_is_not_spoken_to(host: Host):
    me, impostor = make_certificate(), make_certificate()
    real = host.expect(me)
    server = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def pose() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            try:
                with server_context(impostor, [me.der]).wrap_socket(connection, server_side=True) as tls:
                    heard.append(tls.recv(100))
            except OSError:
                heard.append(b"")

    thread = threading.Thread(target=pose)
    thread.start()
    with pytest.raises(PeerLost, match="CERTIFICATE_VERIFY_FAILED"):
        dial(ChannelOffer(("127.0.0.1",), server.getsockname()[1], real.certificate_der, real.token), me, IN_VAIN)
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(PATIENCE)
    assert set(heard) == {b""}


def test_strangers_of_every_kind_leave_it_serving(host: Host):
    with socket.create_connection(("127.0.0.1", host.listener.port)) as unexpected:
        assert unexpected.recv(1) == b""  # nobody is expected: closed without a word
    host.expect(make_certificate(), b"somebody who never comes........")
    silent = [socket.create_connection(("127.0.0.1", host.listener.port)) for _ in range(MAX_HANDSHAKES * 2)]
    for number, stranger in enumerate(silent):
        if number % 2:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 4 == 1 else os.urandom(3000))
    assert host.still_admits()
    assert host.listener.statistics().handshakes <= MAX_HANDSHAKES
    for stranger in silent:
        stranger.close()


def test_older_tls_and_no_certificate_open_nothing(host: Host):
    host.expect(make_certificate())
    for change in ("old", "anonymous"):
        context = client_context(make_certificate(), host.certificate.der)
        if change == "old":
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(OSError):
            speak(host, context)
    assert host.still_admits()


def speak(host: Host, context: ssl.SSLContext) -> None:
    with (
        socket.create_connection(("127.0.0.1", host.listener.port), PATIENCE) as plain,
        context.wrap_socket(plain) as tls,
    ):
        tls.sendall(bytes([32]) + b"t" * 32)
        assert tls.recv(1) == b"?"


@pytest.mark.parametrize("der", [b"garbage", b"\x30\x82\x01\x00", b""])
def test_what_is_no_certificate_is_refused(der: bytes):
    with pytest.raises(ProtocolError):
        check_certificate(der)


async def test_an_origin_gets_its_records(host: Host):
    me = make_certificate()
    offer = host.expect(me)
    channel = await open_origin_channel(offer, me, timeout_seconds=PATIENCE)
    _, theirs = await trio.to_thread.run_sync(host.next_admitted)
    sent = [Token("5" * 32, index, index * 7, "") for index in range(50)]
    for record in sent:
        theirs.send_all(encode_frame(Frame(FrameKind.RECORD, 3, 0, RUNNER_RECORDS.encode(record)))[0])
    with trio.fail_after(PATIENCE):
        assert [await channel.receive() for _ in sent] == sent
        theirs.shut_down()
        with pytest.raises(PeerLost):
            await channel.receive()
    await channel.aclose()


async def test_a_long_prompt_takes_its_time_as_long_as_it_moves(autojump_clock: trio.testing.MockClock):
    here, there = trio.testing.lockstep_stream_pair()
    prompt = OpenSession(
        SessionId("5" * 32), InstanceId("i"), 1, (70_000,) * 4 * PIECE_BYTES, 0, 9, (), Sampling(seed=0)
    )
    whole, came = encode_frame(Frame(FrameKind.RECORD, 0, 0, ORIGIN_RECORDS.encode(prompt)))[0], bytearray()
    channel = OriginChannel(here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.send, prompt)
        while len(came) < len(whole):
            await trio.sleep(STALL_SECONDS * 0.9)
            came += await there.receive_some(PIECE_BYTES)
    assert (len(whole) > 9 * PIECE_BYTES, bytes(came) == whole) == (True, True)
    with pytest.raises(PeerLost, match="took nothing"):
        await channel.send(prompt)
    with pytest.raises(PeerLost, match="gone"):
        await channel.send(prompt)


async def test_an_origin_is_told_that_it_was_refused(host: Host):
    me = make_certificate()
    offer = host.expect(me)
    await (await open_origin_channel(offer, me, timeout_seconds=PATIENCE)).aclose()
    host.expect(me, b"a token that it does not know...")
    with pytest.raises((Refused, PeerLost)):
        await open_origin_channel(offer, me, timeout_seconds=IN_VAIN)
    with pytest.raises(PeerLost):
        await open_origin_channel(ChannelOffer(("127.0.0.1",), 1, me.der, b"t" * 16), me, timeout_seconds=IN_VAIN)
