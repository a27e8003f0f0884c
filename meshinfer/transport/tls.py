"""Channels: TLS 1.3 sockets between processes that were told exactly whom to expect.

The standard library's TLS does all the cryptography; both sides show ephemeral certificates and pin the
other's (`transport.certificates`). Opening one, from the dialler's side:

    TCP → TLS handshake, both certificates → length (1 byte) and one-time token → welcome (1 byte) → frames

The welcome is sent when the accepting side is ready to act on the channel, so a dialler that has been
welcomed may rely on it. The token says *which* of the expected channels this is, works once and lapses.

**What a stranger costs.** With nobody expected, a connection is closed before a byte is read. Otherwise
it may hold one of 32 places for 5 s at most, and when all are taken the longest-waiting one goes: a peer
that was meant needs about 10 ms, so only a flood of thousands of connections a second could push it out.

**Two threads on one socket.** OpenSSL's state must not be entered by a reader and a writer at once, and
Python's versions differ in what they do about that (none; or a lock that a blocked reader keeps, so that
writes hang: 3.13.6). So the socket is non-blocking, each call into OpenSSL is short and under a lock of
our own, and the waiting is done by `poll` outside of it. Measured on loopback: a frame of 4 KB and its
answer take 0.1 ms, bulk 1 GB/s.

Plain synchronous code, for runners; the agent's side of an origin's channel is `transport.origin`.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from meshinfer.base import threads
from meshinfer.base.errors import MeshinferError, PeerLost, Refused
from meshinfer.transport.certificates import Certificate, check_certificate, client_context, server_context
from meshinfer.transport.dialling import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    LOADING_ANSWER_SECONDS,
    Unanswered,
    is_unanswered,
    most_telling,
    of_a_dial,
    retry_pauses,
)
from meshinfer.wire.messages import ChannelOffer
from meshinfer.wire.runner_control import ExpectChannel

HANDSHAKE_SECONDS = 5.0
"""From accepting a connection to its token. 10 ms on a LAN; 5 s carries over a Wi-Fi that loses packets."""
MAX_HANDSHAKES = 32
"""Connections that have not shown their token yet. Each costs a thread and about 50 KB."""
MAX_EXPECTED = 256
"""Channels that have been promised but not dialled yet: every origin of a large mesh at once."""
SEND_STALL_SECONDS = 30.0
"""A peer that takes nothing for so long is gone; shorter would mistake a long prefill for it."""
ASK_AFTER_SECONDS, ASK_EVERY_SECONDS, ASKED_TIMES = 3, 1, 4
"""A connection on which nothing passes is asked whether its other end still has it. A machine that slept has most likely
been given up meanwhile (`serving.origins`), and the news was lost: it learns so within three seconds of waking, where the
system's own two hours would outlast any answer. Who is silent is buried by the mesh before these 7 s are over; who is not,
since the mesh reaches it by another of its networks, opens the channel anew there. Raising it has an answer stand still
when a laptop loses one network of two; a Wi-Fi that roams is away for some two to five seconds.
"""
WELCOME = b"\x01"


class SecureSocket:
    """An open channel's bytes: one thread may read while another writes."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        """Held during every call into OpenSSL, none of which waits."""
        self._read_ready, self._write_ready = select.poll(), select.poll()
        self._read_ready.register(tls.fileno(), select.POLLIN)
        self._write_ready.register(tls.fileno(), select.POLLOUT)

    def recv_into(self, buffer: memoryview, timeout_seconds: float | None = None) -> int:
        """Receive up to `len(buffer)` bytes (at most a TLS record's 16 KiB); 0 when the peer has closed.

        Raises:
            PeerLost: `timeout_seconds` passed.
            OSError: the connection broke.
        """
        try:
            return self._do(lambda: self._tls.recv_into(buffer), timeout_seconds)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0

    def send_all(self, data: bytes | memoryview, stall_seconds: float = SEND_STALL_SECONDS) -> None:
        """Send all of `data`.

        Raises:
            PeerLost: the peer took nothing for `stall_seconds`.
            OSError: the connection broke.
        """
        rest = memoryview(data)
        while rest:
            piece = rest
            rest = rest[self._do(lambda piece=piece: self._tls.send(piece), stall_seconds) :]

    def shut_down(self) -> None:
        """End it from any thread: whoever reads or writes wakes up and finds it closed."""
        # Of the plain socket: SSLSocket.shutdown would take OpenSSL's state from under the other threads.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give up the descriptor; only when no thread uses it any more."""
        self._tls.close()

    def _do(self, call: Callable[[], int], timeout_seconds: float | None) -> int:
        """Call into OpenSSL, waiting outside of the lock for what it wants."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                ready = self._read_ready
            except ssl.SSLWantWriteError:
                ready = self._write_ready
            wait = None if deadline is None else (deadline - time.monotonic()) * 1000
            if (wait is not None and wait <= 0) or not ready.poll(wait):
                raise PeerLost(f"the peer let {timeout_seconds:.1f} s pass")


# --- dialling -----------------------------------------------------------------------------------


def dial(offer: ChannelOffer, own: Certificate, timeout_seconds: float) -> SecureSocket:
    """Open the offered channel; returns once the other side has welcomed it.

    Tries again until the time is up, as long as anything is answered: a runner that is busy importing its libraries may
    hear of the channel from its agent later than the dialler does.

    Raises:
        Unanswered: see `transport.dialling.is_unanswered`.
        PeerLost: none of the offer's addresses led to the holder of its certificate in time.
        Refused: the token did not work (used, lapsed, or meant for somebody else).
        ProtocolError: the offer's certificate is none.
    """
    began = time.monotonic()
    deadline = began + timeout_seconds
    context = client_context(own, offer.certificate_der)
    for pause in retry_pauses():
        failures: list[MeshinferError] = []
        for host in offer.hosts:
            try:
                return _open_at(host, context, offer, max(0.1, deadline - time.monotonic()))
            except (PeerLost, Refused) as error:
                failures.append(error)
        now = time.monotonic()
        if now + pause >= deadline or (is_unanswered(failures) and now >= began + ANSWER_SECONDS):
            raise most_telling(failures)
        threads.pause(pause)
    raise AssertionError("there is always another pause")


def _open_at(host: str, context: ssl.SSLContext, offer: ChannelOffer, timeout_seconds: float) -> SecureSocket:
    try:
        plain = socket.create_connection((host, offer.port), min(timeout_seconds, CONNECT_SECONDS))
    except OSError as error:
        raise of_a_dial(error)(f"{host} port {offer.port}: {error}") from error
    try:
        return _open(plain, context, offer, timeout_seconds)
    except OSError as error:
        # In TLS 1.3 a server that does not accept our certificate says so only after the handshake.
        raise PeerLost(f"{host} port {offer.port}: {error}") from error


def _open(plain: socket.socket, context: ssl.SSLContext, offer: ChannelOffer, timeout_seconds: float) -> SecureSocket:
    tls = _wrap(plain, context, server_side=False)
    welcomed = False
    try:
        _shake_hands(tls, min(timeout_seconds, LOADING_ANSWER_SECONDS if offer.loads else ANSWER_SECONDS))
        peer_der = tls.getpeercert(binary_form=True)
        secure = SecureSocket(tls)
        secure.send_all(bytes([len(offer.token)]) + offer.token, timeout_seconds)
        welcome = bytearray(len(WELCOME))
        secure.recv_into(memoryview(welcome), timeout_seconds)
        welcomed = bytes(welcome) == WELCOME and peer_der == offer.certificate_der
    finally:
        if not welcomed:
            tls.close()
    if not welcomed:
        raise Refused("the channel was refused", expected="a token that has not been used and has not lapsed")
    return secure


def _wrap(plain: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
    """`plain` with TLS around it, non-blocking, nothing said yet. Closes it if it is gone already (OSError)."""
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(plain.setsockopt)
        plain.setblocking(False)
        return context.wrap_socket(plain, server_side=server_side, do_handshake_on_connect=False)
    except OSError:
        plain.close()
        raise


def keep_alive(set_option: Callable[[int, int, int], None]) -> None:
    """Have the kernel ask the other end of a silent connection whether it is there, with this `setsockopt` of its socket."""
    set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = socket.TCP_KEEPALIVE if sys.platform == "darwin" else socket.TCP_KEEPIDLE
    set_option(socket.IPPROTO_TCP, idle, ASK_AFTER_SECONDS)
    set_option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_SECONDS)
    set_option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASKED_TIMES)


def _shake_hands(tls: ssl.SSLSocket, timeout_seconds: float) -> None:
    """Raises PeerLost on the deadline, OSError when it fails."""
    deadline = time.monotonic() + timeout_seconds
    ready = select.poll()
    while True:
        try:
            return tls.do_handshake()
        except ssl.SSLWantReadError:
            ready.register(tls.fileno(), select.POLLIN)
        except ssl.SSLWantWriteError:
            ready.register(tls.fileno(), select.POLLOUT)
        wait = (deadline - time.monotonic()) * 1000
        if wait <= 0 or not ready.poll(wait):
            raise Unanswered(f"the handshake took more than {timeout_seconds:.1f} s")


# --- accepting ----------------------------------------------------------------------------------

Admit = Callable[[ExpectChannel, SecureSocket], None]
"""Takes over a channel that showed its token; must send `WELCOME` when it is ready to act on it."""


@dataclass(frozen=True, slots=True)
class ListenerStatistics:
    expected: int
    handshakes: int
    admitted: int
    refused: int


class Listener:
    """Accepts channels that were announced by `expect`, on any free port of `host`."""

    def __init__(self, host: str, own: Certificate, admit: Admit) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._server.getsockname()[1]
        self._own = own
        self._admit = admit
        self._lock = threading.Lock()
        """Guards everything below."""
        self._expected: list[tuple[ExpectChannel, float]] = []
        """Not yet dialled, each with its deadline; the lapsed ones are dropped when somebody looks."""
        self._context: ssl.SSLContext | None = None
        """Pins exactly the certificates of `_expected`; None when that has changed."""
        self._handshakes: dict[ssl.SSLSocket, None] = {}
        """Accepted, token not shown yet; in order of arrival."""
        self._admitted = self._refused = 0
        threading.Thread(target=self._accept_all, name="listener", daemon=True).start()

    def expect(self, channel: ExpectChannel) -> None:
        """Let the holder of its certificate's key in, once, when it shows the token in time.

        Raises:
            ProtocolError: what should be pinned is no certificate.
            Refused: too many are expected already.
        """
        check_certificate(channel.certificate_der)
        with self._lock:
            self._drop_lapsed()
            if len(self._expected) >= MAX_EXPECTED:
                raise Refused(f"{MAX_EXPECTED} channels are expected already", do="try again in a while")
            self._expected.append((channel, time.monotonic() + channel.lapses_in_seconds))
            self._context = None

    def expect_nobody(self) -> None:
        """Forget whoever was expected."""
        with self._lock:
            self._expected, self._context = [], None

    def statistics(self) -> ListenerStatistics:
        with self._lock:
            return ListenerStatistics(len(self._expected), len(self._handshakes), self._admitted, self._refused)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                threads.pause(0.05)  # out of descriptors, most likely: some will come back
                continue
            if (context := self._current_context()) is None:
                connection.close()
                continue
            try:
                tls = _wrap(connection, context, server_side=True)
            except OSError:  # gone already
                continue
            with self._lock:
                self._handshakes[tls] = None
                if len(self._handshakes) > MAX_HANDSHAKES:
                    self._end_oldest()
            threading.Thread(target=self._receive, args=(tls,), name="handshake", daemon=True).start()

    def _receive(self, tls: ssl.SSLSocket) -> None:
        """One connection, from its first byte to its token."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        try:
            _shake_hands(tls, HANDSHAKE_SECONDS)
            secure = SecureSocket(tls)
            token = _receive_token(secure, deadline)
            channel = self._redeem(tls.getpeercert(binary_form=True) or b"", token)
            self._admit(channel, secure)
        except (PeerLost, Refused, OSError):
            tls.close()
            with self._lock:
                self._refused += 1
        finally:
            with self._lock:
                self._handshakes.pop(tls, None)

    def _current_context(self) -> ssl.SSLContext | None:
        """None: nobody is expected, so whoever has connected was not meant."""
        with self._lock:
            self._drop_lapsed()
            if not self._expected:
                self._refused += 1
                return None
            if self._context is None:
                self._context = server_context(self._own, {channel.certificate_der for channel, _ in self._expected})
            return self._context

    def _redeem(self, certificate_der: bytes, token: bytes) -> ExpectChannel:
        """The expected channel that this token opens; it is expected no more."""
        with self._lock:
            self._drop_lapsed()
            for index, (channel, _) in enumerate(self._expected):
                same_holder = hmac.compare_digest(channel.certificate_der, certificate_der)
                if hmac.compare_digest(channel.token, token) and same_holder:
                    del self._expected[index]
                    self._context = None
                    self._admitted += 1
                    return channel
        raise Refused("a token that opens nothing")

    def _drop_lapsed(self) -> None:
        now = time.monotonic()
        still = [(channel, deadline) for channel, deadline in self._expected if deadline > now]
        if len(still) < len(self._expected):
            self._expected, self._context = still, None

    def _end_oldest(self) -> None:
        oldest = next(iter(self._handshakes))
        del self._handshakes[oldest]
        with contextlib.suppress(OSError):
            socket.socket.shutdown(oldest, socket.SHUT_RDWR)


def _receive_token(secure: SecureSocket, deadline: float) -> bytes:
    length = _receive_exactly(secure, 1, deadline)[0]
    return _receive_exactly(secure, length, deadline)


def _receive_exactly(secure: SecureSocket, count: int, deadline: float) -> bytes:
    data = bytearray(count)
    filled = 0
    while filled < count:
        came = secure.recv_into(memoryview(data)[filled:], max(0.0, deadline - time.monotonic()))
        if came == 0:
            raise PeerLost("closed before its token")
        filled += came
    return bytes(data)
