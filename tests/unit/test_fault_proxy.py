"""The bad cable, on loopback: each fault does what its line says, at once, and nothing else."""

import math
import random
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from meshinfer.base.errors import BadInput
from meshinfer.testing.fault_proxy import PIECE_BYTES, PIECES_UNDER_WAY, FaultProxy, Faults, fault_proxy

LIMIT_SECONDS = 30.0


class Room:
    """Two ends, and the proxy between them."""

    def __init__(self, proxy: FaultProxy, near: trio.SocketStream, far: trio.SocketStream) -> None:
        self.proxy, self.near, self.far = proxy, near, far


@asynccontextmanager
async def room(seed: int = 1) -> AsyncGenerator[Room]:
    send, receive = trio.open_memory_channel[trio.SocketStream](1)

    async def accept(stream: trio.SocketStream) -> None:
        await send.send(stream)
        await trio.sleep_forever()

    with trio.fail_after(LIMIT_SECONDS):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, accept, 0, host="127.0.0.1"))
            target = ("127.0.0.1", listeners[0].socket.getsockname()[1])
            async with (
                fault_proxy(target, random.Random(seed)) as (proxy, port),
                await trio.open_tcp_stream("127.0.0.1", port) as near,
            ):
                yield Room(proxy, near, await receive.receive())
            nursery.cancel_scope.cancel()


async def exactly(stream: trio.SocketStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await stream.receive_some(size - len(data))
        assert piece, f"ended after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


async def test_without_faults_bytes_and_ends_pass_unchanged() -> None:
    content = random.Random(2).randbytes(300_000)
    async with room() as here:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.near.send_all, content)
            assert await exactly(here.far, len(content)) == content
        await here.far.send_all(b"thanks")
        assert await exactly(here.near, 6) == b"thanks"
        await here.near.send_eof()
        assert await here.far.receive_some() == b""
        await here.far.send_all(b"still")
        assert await exactly(here.near, 5) == b"still"
        assert here.proxy.passed_bytes == {"up": len(content), "down": 11}


async def test_delay_and_rate_take_their_time_and_keep_the_order() -> None:
    async with room() as here:
        here.proxy.set(Faults(delay=0.05, jitter=0.05), "up")
        began = trio.current_time()
        for number in range(20):
            await here.near.send_all(bytes([number]) * 100)
        assert await exactly(here.far, 2000) == b"".join(bytes([number]) * 100 for number in range(20))
        here.proxy.set(Faults(rate=10_000), "up")
        began = trio.current_time()
        await here.near.send_all(b"x" * 2000)
        await exactly(here.far, 2000)
        assert trio.current_time() - began >= 0.19  # a lower bound: no machine is too slow for it


async def test_a_collapse_of_bandwidth_holds_at_once_and_ends_at_once() -> None:
    async with room() as here:
        here.proxy.set(Faults(rate=0.01), "up")  # a byte in 100 s
        await here.near.send_all(b"slow")
        with trio.move_on_after(0.1) as waited:
            await here.far.receive_some()
        assert waited.cancelled_caught
        here.proxy.set(Faults())
        assert await exactly(here.far, 4) == b"slow"


async def test_a_black_hole_swallows_and_says_nothing() -> None:
    async with room() as here:
        here.proxy.set(Faults(drop=True), "up")
        await here.near.send_all(b"x" * (8 * PIECES_UNDER_WAY * PIECE_BYTES))  # more than any buffer holds
        await here.far.send_all(b"the other way is open")
        assert await exactly(here.near, 21) == b"the other way is open"
        assert here.proxy.passed_bytes["up"] == 0


async def test_a_stall_makes_the_sender_wait_and_loses_nothing() -> None:
    async with room() as here:
        here.proxy.set(Faults(stall=True), "up")
        content = random.Random(3).randbytes(64 * 1024 * 1024)
        async with trio.open_nursery() as nursery:
            sent = trio.Event()

            async def send() -> None:
                await here.near.send_all(content)
                sent.set()

            nursery.start_soon(send)
            with trio.move_on_after(0.3):
                await sent.wait()
            assert not sent.is_set()
            here.proxy.set(Faults(), "up")
            assert await exactly(here.far, len(content)) == content


async def test_corruption_flips_some_bits_the_same_for_the_same_seed() -> None:
    async def through(seed: int) -> bytes:
        async with room(seed) as here:
            here.proxy.set(Faults(corrupt=1000), "up")
            await here.near.send_all(bytes(PIECE_BYTES))
            return await exactly(here.far, PIECE_BYTES)

    damaged = await through(5)
    assert 4 <= sum(byte.bit_count() for byte in damaged) <= 40
    assert await through(5) == damaged
    assert await through(6) != damaged


async def test_a_half_close_ends_one_direction_only() -> None:
    async with room() as here:
        await here.near.send_all(b"before")
        assert await exactly(here.far, 6) == b"before"
        here.proxy.half_close("up")
        assert await here.far.receive_some() == b""
        await here.far.send_all(b"yes")
        assert await exactly(here.near, 3) == b"yes"


async def test_a_reset_breaks_both_sides_and_the_next_connection_works() -> None:
    async with room() as here:
        await here.near.send_all(b"x")
        await exactly(here.far, 1)
        here.proxy.reset()
        for stream in (here.near, here.far):
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        while here.proxy.connections:
            await trio.lowlevel.checkpoint()


async def test_a_side_that_goes_takes_the_other_with_it() -> None:
    async with room() as here:
        await here.far.aclose()
        assert await here.near.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError):
            await here.near.send_all(bytes(4 * PIECES_UNDER_WAY * PIECE_BYTES))


async def test_nobody_behind_it_is_a_reset() -> None:
    with trio.fail_after(LIMIT_SECONDS):
        with trio.socket.socket() as taken:  # bound and not listening: nobody can be there
            await taken.bind(("127.0.0.1", 0))
            async with (
                fault_proxy(taken.getsockname(), random.Random(1)) as (_, port),
                await trio.open_tcp_stream("127.0.0.1", port) as stream,
            ):
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()


@pytest.mark.parametrize("wrong", [{"delay": -1.0}, {"rate": 0.0}, {"delay": math.inf}, {"corrupt": -1.0}])
def test_faults_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Faults(**wrong)  # type: ignore[arg-type]


def test_the_command_says_where_it_listens_and_what_it_does_not_understand() -> None:
    command = [sys.executable, "-m", "meshinfer.testing.fault_proxy", "--to", "127.0.0.1:9"]
    with subprocess.Popen([*command, "--at", "0:down.rate=1000"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("127.0.0.1:")
        process.terminate()
    refused = subprocess.run([*command, "--at", "soon"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "SECONDS:[up.|down.]NAME" in refused.stderr
