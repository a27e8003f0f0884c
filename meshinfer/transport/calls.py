"""Calls between two nodes: many at once over one stream that stays open.

Opening a stream costs two round trips and more (3 to 6 ms on loopback, 29 ms at 10 ms RTT), so each
caller keeps one per peer, and every frame carries the number of its call:

    length (4) · kind (1) · number (4) · body
    REQUEST   length of the method (1) · method · payload
    ANSWER    payload
    FAILURE   a CallError

Rules that the library below forces on us, each of them measured:
- A write that is cancelled halfway kills the whole connection. So no caller writes: it leaves its
  frame with the stream's one writer, and giving up is to forget the number. The stream is never in
  an unknown state, and a late answer is dropped.
- A reader that pauses for 5 s is reset. So readers never wait for handlers: a call that finds all
  slots taken waits in a task of its own, and one that finds the waiting room full too is refused.

A handler that has started runs to its end, even if its caller has gone: what was asked is done or
not done, never half. `HANDLER_SECONDS` is only there for one that hangs.

Nothing here knows libp2p; a stream is what `Stream` says.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import trio

from meshinfer.base.errors import (
    ERRORS_BY_CODE,
    BadInput,
    DeadlineExceeded,
    MeshinferError,
    NoRoom,
    PeerLost,
    ProtocolError,
    Refused,
)
from meshinfer.base.ids import NodeId
from meshinfer.transport.base import MAX_CALL_BYTES, Handler
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import CallError

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 16
"""Handlers of one peer that run at once, and calls to one peer that are under way at once. Control calls take
milliseconds; a peer that needs more is waiting for something else."""
CALLS_WAITING = 64
"""Calls of one peer that may wait for a handler's slot. More are refused: their callers have given up already."""
HANDLER_SECONDS = 120.0
"""No caller waits that long; a handler that does holds a slot for nobody."""
MAX_METHOD_BYTES = 64
READ_BYTES = 64 * 1024
"""At once: more than most frames have, and what one record of the library's holds."""

REQUEST, ANSWER, FAILURE = 1, 2, 3
_HEADER = struct.Struct(">IBI")
_LENGTH_COVERS = _HEADER.size - 4
_MAX_BODY_BYTES = 1 + MAX_METHOD_BYTES + MAX_CALL_BYTES
# Frames that wait for the one writer: every call under way may have one, and refusals beside them.
_OUTBOX_FRAMES = CALLS_AT_ONCE + CALLS_WAITING


class Stream(Protocol):
    """Bytes both ways to one peer. `read` may return fewer bytes, and none at the end."""

    async def read(self, n: int | None = None) -> bytes: ...

    async def write(self, data: bytes) -> None: ...


class Buffered:
    """A stream that is read in large pieces: a small frame costs one read below, not one for each of its parts."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._waiting = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        if not self._waiting:
            self._waiting += await self._stream.read(READ_BYTES)
        count = len(self._waiting) if n is None else n
        piece = bytes(self._waiting[:count])
        del self._waiting[:count]
        return piece

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)


def encode_frame(kind: int, number: int, body: bytes) -> bytes:
    return _HEADER.pack(_LENGTH_COVERS + len(body), kind, number) + body


def encode_request(number: int, method: str, payload: bytes) -> bytes:
    name = method.encode()
    return encode_frame(REQUEST, number, bytes([len(name)]) + name + payload)


async def read_frame(stream: Stream) -> tuple[int, int, bytes]:
    """The next frame's kind, number and body.

    Raises:
        ProtocolError: its length is not one that a frame can have.
        EOFError: the stream has ended.
    """
    length, kind, number = _HEADER.unpack(await _read_exactly(stream, _HEADER.size))
    if not _LENGTH_COVERS <= length <= _LENGTH_COVERS + _MAX_BODY_BYTES:
        raise ProtocolError(f"a frame of {length} bytes", expected=f"at most {_LENGTH_COVERS + _MAX_BODY_BYTES}")
    return kind, number, await _read_exactly(stream, length - _LENGTH_COVERS)


async def _read_exactly(stream: Stream, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        more = await stream.read(count - len(received))
        if not more:
            raise EOFError
        received += more
    return bytes(received)


async def _write_all(stream: Stream, outbox: trio.MemoryReceiveChannel[bytes]) -> None:
    """The stream's one writer. Cancelled only when the connection itself is given up."""
    async for frame in outbox:
        await stream.write(frame)


# --- the caller's side --------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Waiting:
    """One call under way."""

    settled: trio.Event = field(default_factory=trio.Event)
    answer: bytes = b""
    error: MeshinferError | None = None

    def settle(self, answer: bytes, error: MeshinferError | None) -> None:
        self.answer, self.error = answer, error
        self.settled.set()


class CallLine:
    """One open stream for calls to one peer."""

    def __init__(self, peer: NodeId, stream: Stream) -> None:
        self._peer, self._stream = peer, Buffered(stream)
        self._outbox, self._to_write = trio.open_memory_channel[bytes](_OUTBOX_FRAMES)
        self._waiting: dict[int, _Waiting] = {}
        """All and only calls whose caller still waits."""
        self._last_number = 0
        self._at_once = trio.Semaphore(CALLS_AT_ONCE)
        self._retired = False
        self.ended = False
        """Nothing can be asked any more; open another."""

    async def run(self) -> None:
        """Carries frames until the stream ends or breaks, or until it is retired and idle."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_answers)
                await _write_all(self._stream, self._to_write)
                nursery.cancel_scope.cancel()  # retired, and idle
        except* Exception as group:  # noqa: BLE001 - whatever breaks a stream, its calls are lost and the next one opens another
            log.debug("calls to %s: %r", self._peer, group.exceptions[0])
        finally:
            self.ended = True
            self._to_write.close()
            lost = PeerLost(f"the connection to {self._peer} broke during the call", do="use another node")
            for waiting in self._waiting.values():
                waiting.settle(b"", lost)

    def retire(self) -> None:
        """No new calls: there is a better line. Ends when those under way have ended."""
        self._retired = True
        if not self._waiting:
            self._outbox.close()

    async def call(self, method: str, payload: bytes) -> bytes:
        """The peer's answer. Cancelling it forgets the call and harms no other.

        Raises:
            MeshinferError: what the peer's handler raised; PeerLost if the stream breaks meanwhile.
        """
        async with self._at_once:
            if self.ended:
                raise PeerLost(f"the connection to {self._peer} is gone", do="use another node")
            number = self._last_number = (self._last_number + 1) % 2**32
            waiting = self._waiting[number] = _Waiting()
            try:
                await self._outbox.send(encode_request(number, method, payload))
                await waiting.settled.wait()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise PeerLost(f"the connection to {self._peer} is gone", do="use another node") from None
            finally:
                del self._waiting[number]
                if self._retired and not self._waiting:
                    self._outbox.close()
        if waiting.error is not None:
            raise waiting.error
        return waiting.answer

    async def _read_answers(self) -> None:
        while True:
            kind, number, body = await read_frame(self._stream)
            waiting = self._waiting.get(number)
            if kind == ANSWER:
                if len(body) > MAX_CALL_BYTES:
                    raise ProtocolError(f"an answer of {len(body)} bytes", expected=f"at most {MAX_CALL_BYTES}")
                answer, error = body, None
            elif kind == FAILURE:
                answer, error = b"", _decode_failure(body)
            else:
                raise ProtocolError(f"frame kind {kind} on the caller's side", expected="an answer or a failure")
            if waiting is not None:
                waiting.settle(answer, error)


def _decode_failure(body: bytes) -> MeshinferError:
    failure = decode(CallError, body, max_bytes=32 * 1024)
    kind = ERRORS_BY_CODE.get(failure.code, MeshinferError)
    return kind(_one_line(failure.what), expected=_one_line(failure.expected), do=_one_line(failure.do))


def _one_line(text: str) -> str:
    """Words of another node may end on a terminal: no control characters."""
    return "".join(character if character.isprintable() else " " for character in text)


def check_request(method: str, payload: bytes) -> None:
    """Whether a call can be sent at all.

    Raises:
        BadInput: its method's name or its payload is too long.
    """
    if not 0 < len(method.encode()) <= MAX_METHOD_BYTES:
        raise BadInput(f"method {method[:80]!r}", expected=f"1 to {MAX_METHOD_BYTES} bytes")
    if len(payload) > MAX_CALL_BYTES:
        raise BadInput(f"a request of {len(payload)} bytes", expected=f"at most {MAX_CALL_BYTES}")


# --- the answering side -------------------------------------------------------------------------


class CallServer:
    """Answers the calls of all peers with the handlers that were registered."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._slots: defaultdict[NodeId, trio.Semaphore] = defaultdict(lambda: trio.Semaphore(CALLS_AT_ONCE))
        self._accepted: Counter[NodeId] = Counter()
        """Calls of each peer that run or wait; peers without any are not in it, nor in `_slots`."""
        self.served = 0

    async def serve_stream(self, peer: NodeId, stream: Stream, handlers_nursery: trio.Nursery) -> None:
        """Answers what comes over `stream` until it ends.

        Raises:
            ProtocolError, EOFError, or whatever the stream raises: the caller resets it.
        """
        outbox, to_write = trio.open_memory_channel[bytes](_OUTBOX_FRAMES)
        stream = Buffered(stream)
        # Closing our end first makes handlers that outlive the stream find that nobody listens.
        with to_write:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_write_all, stream, to_write)
                try:
                    while True:
                        kind, number, body = await read_frame(stream)
                        if kind != REQUEST:
                            raise ProtocolError(f"frame kind {kind} on the answering side", expected="a request")
                        method, payload = _decode_request(body)
                        if self._accepted[peer] >= CALLS_AT_ONCE + CALLS_WAITING:
                            full = NoRoom(f"{self._accepted[peer]} calls of yours wait here", do="send fewer at once")
                            # WouldBlock rises: who floods and does not read is cut off.
                            outbox.send_nowait(encode_frame(FAILURE, number, _encode_failure(full)))
                            continue
                        self._accepted[peer] += 1
                        handlers_nursery.start_soon(self._answer, peer, method, payload, number, outbox)
                finally:
                    nursery.cancel_scope.cancel()

    async def _answer(
        self, peer: NodeId, method: str, payload: bytes, number: int, outbox: trio.MemorySendChannel[bytes]
    ) -> None:
        try:
            async with self._slots[peer]:
                frame = await self._frame_for(peer, method, payload, number)
            await outbox.send(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("nobody waits any more for %s asked by %s", method, peer)
        finally:
            self._accepted[peer] -= 1
            if not self._accepted[peer]:
                del self._accepted[peer], self._slots[peer]

    async def _frame_for(self, peer: NodeId, method: str, payload: bytes, number: int) -> bytes:
        try:
            with trio.move_on_after(HANDLER_SECONDS):
                return encode_frame(ANSWER, number, await self._run_handler(peer, method, payload))
            error: MeshinferError = DeadlineExceeded(f"{method} hung for {HANDLER_SECONDS:g} s and was given up")
        except MeshinferError as raised:
            error = raised
        except Exception:  # a bug in one handler must not end the node; its words stay here, they may hold anything
            log.exception("the handler of %s failed", method)
            error = MeshinferError(f"{method} failed on the other node", do="see that node's log")
        return encode_frame(FAILURE, number, _encode_failure(error))

    async def _run_handler(self, peer: NodeId, method: str, payload: bytes) -> bytes:
        handler = self._handlers.get(method)
        if handler is None:
            known = ", ".join(self._handlers)
            raise Refused(f"method {method!r} is not known here", expected=f"one of {known}", do="update this node")
        self.served += 1
        answer = await handler(peer, payload)
        if len(answer) > MAX_CALL_BYTES:
            raise ProtocolError(f"an answer of {len(answer)} bytes to {method}", expected=f"at most {MAX_CALL_BYTES}")
        return answer


def _decode_request(body: bytes) -> tuple[str, bytes]:
    length = body[0] if body else 0
    if not 0 < length <= MAX_METHOD_BYTES or len(body) - 1 - length not in range(MAX_CALL_BYTES + 1):
        raise ProtocolError(f"a request of {len(body)} bytes, method of {length}", expected=f"1 to {MAX_METHOD_BYTES}")
    try:
        return body[1 : 1 + length].decode(), body[1 + length :]
    except UnicodeDecodeError as error:
        raise ProtocolError("a method's name is not UTF-8") from error


def _encode_failure(error: MeshinferError) -> bytes:
    return encode(CallError(error.code, error.what[:4096], error.expected[:1024], error.do[:1024]))
