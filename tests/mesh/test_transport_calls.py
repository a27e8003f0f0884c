"""The framing of calls, over memory streams: what a peer may send, and what becomes of it otherwise."""

from __future__ import annotations

import struct

import pytest
import trio
from conftest import echo
from trio.testing import memory_stream_pair

from meshinfer.base.errors import MeshinferError, NoRoom, PeerLost, ProtocolError
from meshinfer.base.ids import NodeId
from meshinfer.transport.base import MAX_CALL_BYTES
from meshinfer.transport.calls import (
    ANSWER,
    CALLS_AT_ONCE,
    CALLS_WAITING,
    FAILURE,
    MAX_METHOD_BYTES,
    REQUEST,
    Buffered,
    CallLine,
    CallServer,
    encode_frame,
    encode_request,
    read_frame,
)
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import CallError

PEER = NodeId("peer")


class Stream:
    def __init__(self, stream: trio.StapledStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()


def streams() -> tuple[Stream, Stream]:
    one, other = memory_stream_pair()
    return Stream(one), Stream(other)


async def test_a_frame_arrives_whole_one_byte_at_a_time():
    caller, answering = streams()
    answering.read = lambda _n, read=answering.read: read(1)
    await caller.write(encode_request(7, "method", b"payload"))
    assert await read_frame(answering) == (REQUEST, 7, b"\x06methodpayload")
    await caller.write(encode_frame(ANSWER, 2**32 - 1, b"")[:5])
    await caller.close()
    with pytest.raises(EOFError):
        await read_frame(answering)


async def test_many_small_frames_cost_one_read():
    caller, answering = streams()
    reads = 0
    read = answering.read

    async def counted(n: int | None = None) -> bytes:
        nonlocal reads
        reads += 1
        return await read(n)

    answering.read = counted
    await caller.write(b"".join(encode_request(number, "method", b"payload") for number in range(50)))
    buffered = Buffered(answering)
    for number in range(50):
        assert await read_frame(buffered) == (REQUEST, number, b"\x06methodpayload")
    assert reads == 1


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">IBI", 2**32 - 1, REQUEST, 1),
        struct.pack(">IBI", 0, REQUEST, 1),
        struct.pack(">IBI", 5 + MAX_CALL_BYTES + MAX_METHOD_BYTES + 2, REQUEST, 1),
        encode_frame(ANSWER, 1, b"an answer to nothing"),
        encode_frame(FAILURE, 1, b""),
        encode_frame(0, 1, b""),
        encode_frame(255, 1, b""),
        encode_frame(REQUEST, 1, b""),
        encode_frame(REQUEST, 1, b"\x00payload"),
        encode_frame(REQUEST, 1, b"\x10short"),
        encode_frame(REQUEST, 1, bytes([MAX_METHOD_BYTES + 1]) + b"m" * (MAX_METHOD_BYTES + 1)),
        encode_frame(REQUEST, 1, b"\x02\xff\xfe"),
        encode_frame(REQUEST, 1, b"\x01m" + bytes(MAX_CALL_BYTES + 1)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_request_ends_the_stream_and_reserves_nothing(nursery, sent):
    caller, answering = streams()
    await caller.write(sent)
    with pytest.RaisesGroup(ProtocolError, flatten_subgroups=True):
        await CallServer({"echo": echo}).serve_stream(PEER, answering, nursery)


async def test_who_asks_more_than_there_is_room_for_is_refused_and_the_others_are_answered(nursery):
    release = trio.Event()
    running = 0

    async def slow(_peer: NodeId, payload: bytes) -> bytes:
        nonlocal running
        running += 1
        assert running <= CALLS_AT_ONCE
        await release.wait()
        running -= 1
        return payload

    server = CallServer({"slow": slow})
    caller, answering = streams()
    nursery.start_soon(server.serve_stream, PEER, answering, nursery)
    room = CALLS_AT_ONCE + CALLS_WAITING
    for number in range(room + 5):
        await caller.write(encode_request(number, "slow", b"%d" % number))
    for number in range(room, room + 5):
        kind, refused, body = await read_frame(caller)
        assert (kind, refused) == (FAILURE, number)
        assert decode(CallError, body).code == NoRoom.code
    release.set()
    answers = {number: (kind, body) for kind, number, body in [await read_frame(caller) for _ in range(room)]}
    assert answers == {number: (ANSWER, b"%d" % number) for number in range(room)}
    await caller.write(encode_request(1000, "slow", b"room again"))
    assert await read_frame(caller) == (ANSWER, 1000, b"room again")
    assert server._accepted == server._slots == {}
    nursery.cancel_scope.cancel()


async def test_a_flood_from_who_never_reads_is_cut_off(nursery):
    async def never(_peer: NodeId, _payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    class Deaf(Stream):
        async def write(self, data: bytes) -> None:
            await trio.sleep_forever()

    flooding, flooded = memory_stream_pair()
    server = CallServer({"never": never})

    async def flood() -> None:
        for number in range(10_000):
            await flooding.send_all(encode_request(number, "never", b""))

    nursery.start_soon(flood)
    with pytest.RaisesGroup(trio.WouldBlock, flatten_subgroups=True):
        await server.serve_stream(PEER, Deaf(flooded), nursery)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">IBI", 2**31, ANSWER, 1),
        encode_request(1, "echo", b""),
        encode_frame(FAILURE, 1, b"no msgpack"),
        encode_frame(FAILURE, 1, encode({"code": 1})),
        encode_frame(FAILURE, 1, bytes(100_000)),
        encode_frame(ANSWER, 1, bytes(MAX_CALL_BYTES + 1)),
    ],
)
async def test_a_wrong_answer_loses_the_line_and_every_call_on_it(nursery, sent):
    ours, theirs = streams()
    line = CallLine(PEER, ours)
    nursery.start_soon(line.run)
    nursery.start_soon(theirs.write, sent)
    with pytest.raises(PeerLost):
        await line.call("method", b"")
    assert line.ended
    with pytest.raises(PeerLost):
        await line.call("method", b"")


async def test_answers_to_calls_that_nobody_waits_for_are_dropped(nursery):
    ours, theirs = streams()
    line = CallLine(PEER, ours)
    nursery.start_soon(line.run)
    with trio.move_on_after(0):
        await line.call("given up", b"")
    for number in (1, 2, 77, 2**32 - 1):
        await theirs.write(encode_frame(ANSWER, number, b"late"))
        await theirs.write(encode_frame(FAILURE, number, encode(CallError("no_room", "late"))))

    async def answer_next() -> None:
        while True:
            _, number, body = await read_frame(theirs)
            await theirs.write(encode_frame(ANSWER, number, body))

    nursery.start_soon(answer_next)
    with trio.fail_after(5):
        assert await line.call("next", b"!") == b"\x04next!"
    nursery.cancel_scope.cancel()


async def test_words_of_another_node_cannot_write_to_a_terminal(nursery):
    ours, theirs = streams()
    line = CallLine(PEER, ours)
    nursery.start_soon(line.run)
    said = CallError("code of tomorrow", "\x1b[2J\x07cleared\n", "a\u202eb", "\r")
    nursery.start_soon(theirs.write, encode_frame(FAILURE, 1, encode(said)))
    with pytest.raises(MeshinferError) as caught:
        await line.call("method", b"")
    assert caught.value.code == "internal"
    assert str(caught.value).isprintable()
    nursery.cancel_scope.cancel()


async def test_a_retired_line_ends_when_its_last_call_has(nursery):
    ours, theirs = streams()
    line = CallLine(PEER, ours)
    ended = trio.Event()

    async def run() -> None:
        await line.run()
        ended.set()

    nursery.start_soon(run)
    results: list[bytes] = []

    async def call() -> None:
        results.append(await line.call("last", b""))

    nursery.start_soon(call)
    _, number, _ = await read_frame(theirs)
    line.retire()
    assert not line.ended
    await theirs.write(encode_frame(ANSWER, number, b"done"))
    with trio.fail_after(5):
        await ended.wait()
    assert results == [b"done"]
