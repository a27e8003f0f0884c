"""A channel that only measures: of the very kind that carries activations, between two agents.

The dialler commands, the acceptor obeys; frames, TLS, sockets and threads are those of runners:

    dialler ── STEP, 4 KiB ────► acceptor          eleven times: the round trip, and what CPU it takes
            ◄── ANSWER, receipt ─
            ── STEP, a burst ──► acceptor          twice as large and more each time, until its second half
            ◄── ANSWER, receipt ─                  takes 25 ms and two round trips; how fast it *arrived*
            ── RECORD, size ───► acceptor          the same in the other direction, timed here
            ◄── STEP, a burst ──

*Software cost.* What a message takes at both ends is counted as the CPU time of the two threads that do
nothing else (`time.thread_time`): encoding, TLS, system calls and the kernel's work on their behalf. Waiting is
not in it, neither for the wire nor for a processor that others use, so it is stable on a busy machine.

*Cost.* Round trips: 45 KiB and one TLS handshake, about 10 ms of CPU. Bursts grow by what the last one
took, so a pair of machines on 100 Mbit/s spends 1 to 2 MiB for both directions, on 1 Gbit/s 15 to 20, never more
than what both ends allow.

All of it happens in worker threads with deadlines; the agent's loop makes offers and waits.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import trio

from meshinfer.base.bounds import between
from meshinfer.base.errors import MeshinferError, PeerLost, ProtocolError, Refused
from meshinfer.base.ids import NodeId
from meshinfer.base.units import KIB, MIB
from meshinfer.transport.arrivals import Arrival, Arrivals
from meshinfer.transport.certificates import make_certificate
from meshinfer.transport.tls import WELCOME, Listener, SecureSocket, dial
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.frames import Frame, FrameKind, FrameReader, Tensor, TensorSpec, encode_frame
from meshinfer.wire.messages import ChannelOffer
from meshinfer.wire.runner_control import ExpectChannel

MESSAGE_BYTES = 4 * KIB
"""What a decode step sends: 2048 wide in 16 bits."""
WARM_UP_MESSAGES = 2
"""The first pays for cold caches and threads that sleep."""
MESSAGES = 9
"""Measured; their median counts. An odd number has one."""
ENOUGH_SECONDS = 1.0
"""On a link where nine round trips take longer, three are enough."""
FIRST_BURST_BYTES = 64 * KIB
MAX_BURST_BYTES = 8 * MIB
"""67 ms at 1 Gbit/s. Raising it measures faster links better and costs each probe of them as much again."""
BURST_SECONDS = 0.025
"""Of a burst's second half: an order above what schedulers do to it."""
MAX_GROWTH = 16
DOUBTED_BYTES = 256 * KIB
"""A burst no larger that took long enough is sent once more, and the faster of the two counts: a thread that did not
get its turn for 25 ms makes 9 Mbit/s of 40 (seen while agents start)."""
BULK_BYTES = 4 * MAX_BURST_BYTES
"""What the bursts of one probe can use at most, both directions together."""
LATENCY_BYTES = 64 * KIB
"""What the round trips of one probe can use at most."""

DIAL_SECONDS = 2.0
"""One host: a TCP connection and a handshake. A cable that leads nowhere answers nothing."""
PROBE_SECONDS = 15.0
"""All of one probe. 8 MiB both ways at 10 Mbit/s would take 13 s; there it stops at 128 KiB."""
LAPSE_SECONDS = 10.0
"""From an offer to its use."""
MAX_SERVED = 4
"""Probes that are answered at once: more would measure each other. Each costs a thread."""
MAX_OFFERS = 64
"""That are remembered and not used yet."""
_BLOCK_BYTES = 64 * KIB
"""Of random bytes, repeated: further apart than what a link that compresses looks back."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one probe found; 0 for what was not measured."""

    rtt_seconds: float
    """Median round trip of a 4 KiB frame and its acknowledgement."""
    message_seconds: float
    """CPU of one message, both ends together."""
    out_bytes_per_second: float
    in_bytes_per_second: float
    spent_bytes: int
    """Of payload, both directions together."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Acceptor → dialler: what became of a frame."""

    cpu_seconds: Annotated[float, between(0, 1e9)]
    """Of the acceptor's thread since it began."""
    whole_seconds: Annotated[float, between(0, 3600)]
    half_bytes: Annotated[int, between(0, 2**40)]
    half_seconds: Annotated[float, between(0, 3600)]


@dataclass(frozen=True, slots=True)
class SendMe:
    """Dialler → acceptor: a frame of this size."""

    byte_count: Annotated[int, between(4, MAX_BURST_BYTES)]


class ProbeDoor:
    """This node's end of every probe: offers to be probed, and probing where another offered."""

    def __init__(self, bind_host: str) -> None:
        self._certificate = make_certificate()
        self._bind_host = bind_host
        self._lock = threading.Lock()
        """Guards what follows."""
        self._allowed: dict[bytes, int] = {}
        """Tokens of offers that were not used yet, and the bytes of bursts that each allows; oldest first."""
        self._serving: set[SecureSocket] = set()
        self._served_bytes = 0
        self._listener: Listener | None = None
        self._limit = trio.CapacityLimiter(MAX_SERVED)

    @property
    def certificate_der(self) -> bytes:
        """What this node shows when it dials."""
        return self._certificate.der

    @property
    def is_serving(self) -> bool:
        """Somebody probes this node now."""
        return bool(self._serving)

    def take_served_bytes(self) -> int:
        """Of payload, in probes by others, since this was asked last."""
        with self._lock:
            taken, self._served_bytes = self._served_bytes, 0
        return taken

    def own_host_towards(self, host: str) -> str:
        """The address that this machine would dial `host` from; empty if there is no way. Sends nothing."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect((host, 9))  # connecting a datagram socket only asks the routing table
            return unsent.getsockname()[0]
        return ""

    @contextmanager
    def listening(self) -> Generator[None]:
        """Offers can be made inside."""
        self._listener = Listener(self._bind_host, self._certificate, self._admit)
        try:
            yield
        finally:
            self._listener.close()
            with self._lock:
                for secure in self._serving:
                    secure.shut_down()

    def offer(self, certificate_der: bytes, hosts: tuple[str, ...], bulk_bytes: int) -> ChannelOffer:
        """Let the holder of this certificate's key probe, once.

        Raises:
            Refused: this node does not listen, or has too many offers open.
            ProtocolError: that is no certificate.
        """
        if self._listener is None or not hosts:
            raise Refused("this node cannot be probed now")
        token = secrets.token_bytes(32)
        # The role is the runners' business; at this door there is only one.
        self._listener.expect(ExpectChannel("activations", 0, certificate_der, token, LAPSE_SECONDS))
        with self._lock:
            self._allowed[token] = bulk_bytes
            while len(self._allowed) > MAX_OFFERS:
                del self._allowed[next(iter(self._allowed))]
        return ChannelOffer(hosts, self._listener.port, self._certificate.der, token)

    async def measure(self, peer: NodeId, offer: ChannelOffer, bulk_bytes: int) -> Measured:
        """Probe the first of the offer's hosts that answers, in a worker thread; cancelling leaves it to its deadline.

        Raises:
            PeerLost: nobody there, or it stalls, or the connection breaks.
            Refused: the offer was used or has lapsed.
            ProtocolError: what came is no answer.
        """
        del peer  # the offer's certificate says who is meant
        work = partial(self._measure, offer, bulk_bytes)
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limit)

    def _measure(self, offer: ChannelOffer, bulk_bytes: int) -> Measured:
        deadline = time.monotonic() + PROBE_SECONDS
        secure = dial(offer, self._certificate, DIAL_SECONDS)
        try:
            return _Dialler(_Wire(secure, deadline)).measure(bulk_bytes)
        except OSError as error:
            raise PeerLost(f"the probe of {offer.hosts[0]} broke: {error}") from error
        finally:
            secure.close()

    # --- being probed ---------------------------------------------------------------------------

    def _admit(self, expected: ExpectChannel, secure: SecureSocket) -> None:
        with self._lock:
            allowed = self._allowed.pop(expected.token, None)
            if allowed is None or len(self._serving) >= MAX_SERVED:
                raise Refused("too many probes at once")
            self._serving.add(secure)
        # A thread of its own: this one still counts as a handshake.
        threading.Thread(target=self._serve, args=(secure, allowed), name="probe answers", daemon=True).start()

    def _serve(self, secure: SecureSocket, allowed_bytes: int) -> None:
        try:
            secure.send_all(WELCOME, DIAL_SECONDS)
            _answer(_Wire(secure, time.monotonic() + PROBE_SECONDS), LATENCY_BYTES + allowed_bytes, self._count)
        except (MeshinferError, OSError, ValueError):  # the dialler notices; nothing here depends on it
            pass
        finally:
            with self._lock:
                self._serving.discard(secure)
            secure.close()

    def _count(self, byte_count: int) -> None:
        with self._lock:
            self._served_bytes += byte_count


class _Wire:
    """Frames over one probe's socket, until one deadline."""

    def __init__(self, secure: SecureSocket, deadline: float) -> None:
        self._secure, self._deadline = secure, deadline
        self._reader = FrameReader((FrameKind.STEP, FrameKind.ANSWER, FrameKind.RECORD), MAX_BURST_BYTES, _room)
        self._arrivals = Arrivals(time.perf_counter())

    def send(self, frame: Frame) -> None:
        pieces = encode_frame(frame)
        if sum(len(piece) for piece in pieces) <= FIRST_BURST_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            self._secure.send_all(piece, self._left())

    def receive(self) -> tuple[Frame, Arrival] | None:
        """The next frame and how it came; None when the other side has closed between frames."""
        self._arrivals.ready(time.perf_counter())
        while (count := self._secure.recv_into(self._reader.buffer(), self._left())) > 0:
            self._arrivals.came(count, time.perf_counter())
            if (frame := self._reader.advance(count)) is not None:
                return frame, self._arrivals.end()
        if not self._reader.between_frames:
            raise PeerLost("the probe's other end closed in the middle of a frame")
        return None

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise PeerLost(f"the probe took more than {PROBE_SECONDS:.0f} s")
        return left


_Burst = Callable[[int], tuple[int, float]]
"""Moves a frame of that size; bytes and seconds of its second half."""


class _Dialler:
    """The commands, and what is made of the answers."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._spent = 0

    def measure(self, bulk_bytes: int) -> Measured:
        rtt, message = self._round_trips()
        out = self._burst(bulk_bytes // 2, rtt, self._send_burst)
        incoming = self._burst(bulk_bytes // 2, rtt, self._fetch_burst)
        return Measured(rtt, min(message, rtt / 2), out, incoming, self._spent)

    def _round_trips(self) -> tuple[float, float]:
        """Median round trip, and CPU seconds of one message."""
        frame = _frame(MESSAGE_BYTES)
        receipt = self._exchange(frame)
        for _ in range(WARM_UP_MESSAGES - 1):
            receipt = self._exchange(frame)
        their_cpu, own_cpu = receipt.cpu_seconds, time.thread_time()
        times: list[float] = []
        while len(times) < MESSAGES and (len(times) < 3 or sum(times) < ENOUGH_SECONDS):
            began = time.perf_counter()
            receipt = self._exchange(frame)
            times.append(time.perf_counter() - began)
        cpu = receipt.cpu_seconds - their_cpu + time.thread_time() - own_cpu
        return statistics.median(times), max(0.0, cpu) / len(times) / 2  # a frame and its receipt: two messages

    def _burst(self, allowed_bytes: int, rtt_seconds: float, burst: _Burst) -> float:
        """Bytes per second of the largest burst that was needed; 0 if none was allowed."""
        size, rate, doubted_rate = FIRST_BURST_BYTES, 0.0, 0.0
        long_enough = max(BURST_SECONDS, 2 * rtt_seconds)
        while size <= allowed_bytes:
            half_bytes, half_seconds = burst(size)
            allowed_bytes -= size
            if half_seconds > 0:
                rate = max(half_bytes / half_seconds, doubted_rate)
            if half_seconds >= long_enough and size <= DOUBTED_BYTES and not doubted_rate:
                doubted_rate = rate
                continue
            if half_seconds >= long_enough or size == MAX_BURST_BYTES:
                break
            doubted_rate = 0.0
            growth = 1.2 * long_enough / half_seconds if half_seconds > 0 else MAX_GROWTH
            wanted = 4 * int(size / 4 * min(MAX_GROWTH, max(2.0, growth)))  # an array of whole numbers
            # What is left of the allowance serves too, if it is a larger burst than this one.
            size = min(wanted, MAX_BURST_BYTES, max(4 * (allowed_bytes // 4), 2 * size))
        return rate

    def _send_burst(self, size: int) -> tuple[int, float]:
        receipt = self._exchange(_frame(size))
        return receipt.half_bytes, receipt.half_seconds

    def _fetch_burst(self, size: int) -> tuple[int, float]:
        self._wire.send(Frame(FrameKind.RECORD, 0, 0, encode(SendMe(size))))
        frame, arrival = self._receive(FrameKind.STEP)
        payload = _payload_bytes(frame)
        if payload != size:
            raise ProtocolError(f"a burst of {payload} bytes", expected=f"{size}")
        self._spent += size
        return arrival.half_bytes, arrival.half_seconds

    def _exchange(self, frame: Frame) -> Receipt:
        self._wire.send(frame)
        self._spent += _payload_bytes(frame)
        answer, _ = self._receive(FrameKind.ANSWER)
        return decode(Receipt, answer.control)

    def _receive(self, kind: FrameKind) -> tuple[Frame, Arrival]:
        received = self._wire.receive()
        if received is None:
            raise PeerLost("the probe's other end closed it")
        if received[0].kind != kind:
            raise ProtocolError(f"a frame of kind {received[0].kind.name} in a probe", expected=kind.name)
        return received


def _answer(wire: _Wire, allowed_bytes: int, count: Callable[[int], None]) -> None:
    """The acceptor's side, until the dialler closes or asks for too much; `count` is told of every frame's bytes."""
    while (received := wire.receive()) is not None:
        frame, arrival = received
        size = decode(SendMe, frame.control).byte_count if frame.kind == FrameKind.RECORD else _payload_bytes(frame)
        allowed_bytes -= size
        if allowed_bytes < 0:
            raise ProtocolError("a probe that uses more than it was allowed")
        count(size)
        if frame.kind == FrameKind.RECORD:
            wire.send(_frame(size))
        else:
            receipt = Receipt(time.thread_time(), arrival.whole_seconds, arrival.half_bytes, arrival.half_seconds)
            wire.send(Frame(FrameKind.ANSWER, 0, 0, encode(receipt)))


def _frame(size: int) -> Frame:
    """A frame like a step's, with an array of `size` bytes, a multiple of 4."""
    words = size // 4
    block = os.urandom(_BLOCK_BYTES)
    data = _room(4 * words)
    for start in range(0, 4 * words, _BLOCK_BYTES):
        data[start : start + _BLOCK_BYTES] = block[: 4 * words - start]
    return Frame(FrameKind.STEP, 0, 0, b"", (Tensor(TensorSpec("int32", (words,)), data),))


def _room(size: int) -> memoryview:
    """Memory that goes back to the system with its last user.

    malloc keeps what was freed, for each thread apart, and every probe has threads of its own: an idle agent grew by
    9 MiB with each burst.
    """
    return memoryview(mmap.mmap(-1, size) if size > _BLOCK_BYTES else bytearray(size))


def _payload_bytes(frame: Frame) -> int:
    return sum(tensor.data.nbytes for tensor in frame.tensors)
