r"""A TCP proxy that is a bad cable: slow, lossy in every way that TCP can be, and on time.

    python -m meshinfer.testing.fault_proxy --listen 127.0.0.1:7001 --to 127.0.0.1:7000 \
        --delay 0.1 --jitter 0.02 --rate 600000 --at 10:down.rate=1000 --at 20:reset

It needs no root and works wherever sockets do. Each connection has two directions, `up` (from who dialled)
and `down`, each with its own `Faults`, which may be changed at any time and then hold at once, also for what
is on its way. What a packet filter does to datagrams cannot be done to a stream of bytes, so:

    delay, jitter   every piece arrives later; never out of order
    rate            bytes a second, in pieces of at most 50 ms: change it for a collapse of bandwidth
    drop            a black hole: everything is read and nothing arrives (as when a router forgets us)
    stall           nothing is read either, so the sender's buffers fill (as when the other side is stopped)
    corrupt         one bit in about so many bytes is flipped
    half-close      the receiver reads the end of the stream, the sender notices nothing
    reset           both sides get a reset, as from a machine that restarted

At most 1 MiB of a direction is under way; beyond that the sender waits. Chance comes from the seed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import random
import socket
import struct
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal

import trio

from meshinfer.base.errors import BadInput

log = logging.getLogger(__name__)

Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, Direction] = ("up", "down")

PIECE_BYTES = 16 * 1024
PIECES_UNDER_WAY = 64
"""Of `PIECE_BYTES`: 1 MiB, which is 80 ms of a gigabit. A longer delay at a higher rate would need more."""
RATE_PIECE_SECONDS = 0.05
"""How soon a change of rate is felt."""
CONNECT_SECONDS = 5.0
SO_ORIGINAL_DST = 80
"""Of Linux; the standard library does not know it."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What one direction suffers."""

    delay: float = 0.0
    """Seconds."""
    jitter: float = 0.0
    """Seconds, at most, around the delay."""
    rate: float = math.inf
    """Bytes a second."""
    drop: bool = False
    stall: bool = False
    corrupt: float = 0.0
    """Mean number of bytes between two flipped bits; 0: none."""

    def __post_init__(self) -> None:
        if not (0 <= self.delay < math.inf and 0 <= self.jitter < math.inf and self.rate > 0 and self.corrupt >= 0):
            raise BadInput(f"{self}", expected="seconds of 0 or more, a rate above 0, a corrupt of 0 or more")


@dataclass(eq=False)
class _Connection:
    near: trio.SocketStream
    """Of who dialled us."""
    far: trio.SocketStream
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    readers: dict[Direction, trio.CancelScope] = field(default_factory=dict[Direction, trio.CancelScope])


class FaultProxy:
    """Passes connections on to `target`, as its faults allow; to where each was going before the kernel redirected it
    here, if that is None.
    """

    def __init__(self, target: tuple[str, int] | None, rng: random.Random) -> None:
        self._target = target
        self._rng = rng
        self._faults: dict[Direction, Faults] = {"up": Faults(), "down": Faults()}
        self._changed = trio.Event()
        self._connections: set[_Connection] = set()
        self.passed_bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self.accepted = 0

    @property
    def connections(self) -> int:
        return len(self._connections)

    def faults(self, direction: Direction) -> Faults:
        return self._faults[direction]

    def set(self, faults: Faults, *directions: Direction) -> None:
        """From now on, for every connection; both directions if none is named."""
        for direction in directions or DIRECTIONS:
            self._faults[direction] = faults
        self._changed.set()
        self._changed = trio.Event()

    def half_close(self, direction: Direction) -> None:
        """Every receiver of `direction` reads the end of its stream, after what is under way."""
        for connection in self._connections:
            connection.readers[direction].cancel()

    def reset(self) -> None:
        """Every connection ends with a reset, on both sides."""
        for connection in list(self._connections):
            for stream in (connection.near, connection.far):
                # Closing a socket that lingers for no time sends a reset.
                with contextlib.suppress(OSError):
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.scope.cancel()

    async def run(self, host: str, port: int, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; starts with the port that it listens on."""
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, self._serve, port, host=host))
            bound: int = listeners[0].socket.getsockname()[1]
            task_status.started(bound)
            await trio.sleep_forever()

    # --- inside ---------------------------------------------------------------------------------

    async def _serve(self, near: trio.SocketStream) -> None:
        self.accepted += 1
        target = self._target or _original_target(near)
        try:
            with trio.fail_after(CONNECT_SECONDS):
                far = await trio.open_tcp_stream(*target)
        except (OSError, trio.TooSlowError) as error:
            log.info("%s:%d: %s", *target, error)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        connection = _Connection(near, far)
        self._connections.add(connection)
        try:
            async with near, far:
                with connection.scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._pass_on, connection, "up", near, far)
                        nursery.start_soon(self._pass_on, connection, "down", far, near)
        finally:
            self._connections.discard(connection)

    async def _pass_on(
        self, connection: _Connection, direction: Direction, source: trio.SocketStream, target: trio.SocketStream
    ) -> None:
        send, receive = trio.open_memory_channel[tuple[float, bytes]](PIECES_UNDER_WAY)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, direction, receive, target)
                with send, trio.CancelScope() as reading:
                    connection.readers[direction] = reading
                    await self._read(direction, source, send)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            connection.scope.cancel()  # a side that is gone takes the other with it

    async def _read(
        self, direction: Direction, source: trio.SocketStream, send: trio.MemorySendChannel[tuple[float, bytes]]
    ) -> None:
        arrives_at = 0.0
        while True:
            await self._wait_while_stalled(direction)
            piece = await source.receive_some(PIECE_BYTES)
            if not piece:
                return
            await self._wait_while_stalled(direction)
            faults = self._faults[direction]
            late = faults.delay + self._rng.uniform(-faults.jitter, faults.jitter)
            arrives_at = max(arrives_at, trio.current_time() + max(0.0, late))
            await send.send((arrives_at, self._corrupted(bytes(piece), faults)))

    async def _write(
        self, direction: Direction, receive: trio.MemoryReceiveChannel[tuple[float, bytes]], target: trio.SocketStream
    ) -> None:
        async for arrives_at, piece in receive:
            await trio.sleep_until(arrives_at)
            rest = memoryview(piece)
            while rest:
                await self._wait_while_stalled(direction)
                faults = self._faults[direction]
                if faults.drop:
                    break
                size = min(len(rest), max(1, int(min(faults.rate * RATE_PIECE_SECONDS, PIECE_BYTES))))
                if faults.rate < math.inf:
                    await self._sleep_unless_changed(size / faults.rate)
                    if self._faults[direction] != faults:
                        continue
                self.passed_bytes[direction] += size
                await target.send_all(rest[:size])
                rest = rest[size:]
        await self._wait_while_stalled(direction)
        if not self._faults[direction].drop:
            await target.send_eof()

    def _corrupted(self, piece: bytes, faults: Faults) -> bytes:
        if not faults.corrupt:
            return piece
        damaged = bytearray(piece)
        at = self._rng.expovariate(1 / faults.corrupt)
        while at < len(damaged):
            damaged[int(at)] ^= 1 << self._rng.randrange(8)
            at += 1 + self._rng.expovariate(1 / faults.corrupt)
        return bytes(damaged)

    async def _wait_while_stalled(self, direction: Direction) -> None:
        while self._faults[direction].stall:
            await self._changed.wait()

    async def _sleep_unless_changed(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._changed.wait()


def _original_target(near: trio.SocketStream) -> tuple[str, int]:
    """Where a connection was going, which Linux remembers of those that it redirects (IPv4)."""
    address = near.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
    assert isinstance(address, bytes)
    port, host = struct.unpack("!2xH4s8x", address)
    return socket.inet_ntoa(host), port


@asynccontextmanager
async def fault_proxy(
    target: tuple[str, int], rng: random.Random, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[tuple[FaultProxy, int]]:
    """A proxy that runs in here, and the port that it listens on."""
    async with trio.open_nursery() as nursery:
        proxy = FaultProxy(target, rng)
        bound: int = await nursery.start(proxy.run, host, port)
        yield proxy, bound
        nursery.cancel_scope.cancel()


# --- the command -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Change:
    """What `--at` asks for."""

    at_seconds: float
    directions: tuple[Direction, ...]
    name: str
    value: str

    @classmethod
    def parse(cls, text: str) -> _Change:
        seconds, _, what = text.partition(":")
        assignment, _, value = what.partition("=")
        side, _, name = assignment.rpartition(".")
        names = {*(one.name for one in fields(Faults)), "reset", "half-close"}
        try:
            at = float(seconds)
        except ValueError:
            at = math.nan
        if not at >= 0 or side not in {"", "up", "down"} or name not in names:
            raise argparse.ArgumentTypeError(
                f"{text!r}; expected SECONDS:[up.|down.]NAME[=VALUE] with a name of {', '.join(sorted(names))}"
            )
        return cls(at, DIRECTIONS if not side else tuple(d for d in DIRECTIONS if d == side), name, value)

    def apply(self, proxy: FaultProxy) -> None:
        if self.name == "reset":
            proxy.reset()
            return
        for direction in self.directions:
            if self.name == "half-close":
                proxy.half_close(direction)
            else:
                proxy.set(_with(proxy.faults(direction), self.name, self.value), direction)


def _with(faults: Faults, name: str, value: str) -> Faults:
    """`faults` with one of them changed; a flag without a value is set, with 0 or off unset. Raises BadInput."""
    if name in {"drop", "stall"}:
        return replace(faults, **{name: value not in {"0", "off"}})
    try:
        return replace(faults, **{name: float(value)})
    except ValueError as error:
        raise BadInput(f"{name} is {value!r}", expected="a number") from error


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; expected host:port")
    return host.strip("[]"), int(port)


async def _main(given: argparse.Namespace) -> None:
    proxy = FaultProxy(given.to, random.Random(given.seed))  # noqa: S311 - it replays
    only: tuple[Direction, ...] = (given.only,) if given.only else ()
    proxy.set(Faults(given.delay, given.jitter, given.rate, given.drop, given.stall, given.corrupt), *only)
    changes: Sequence[_Change] = sorted(given.at, key=lambda change: change.at_seconds)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(proxy.run, *given.listen)
        print(f"{given.listen[0]}:{port}", flush=True)  # noqa: T201 - for whoever started us with port 0
        began = trio.current_time()
        for change in changes:
            await trio.sleep_until(began + change.at_seconds)
            change.apply(proxy)
            log.warning("%.1f s: %s %s %s", change.at_seconds, "+".join(change.directions), change.name, change.value)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m meshinfer.testing.fault_proxy", description="A TCP proxy that is a bad cable."
    )
    parser.add_argument("--listen", type=_address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    parser.add_argument("--to", type=_address, required=True, metavar="HOST:PORT")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--jitter", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--rate", type=float, default=math.inf, metavar="BYTES_PER_SECOND")
    parser.add_argument("--drop", action="store_true", help="read everything, pass nothing on")
    parser.add_argument("--stall", action="store_true", help="do not even read")
    parser.add_argument("--corrupt", type=float, default=0.0, metavar="BYTES", help="flip a bit in about so many")
    parser.add_argument("--only", choices=DIRECTIONS, help="the faults above are of one direction; up: from who dials")
    parser.add_argument(
        "--at",
        type=_Change.parse,
        action="append",
        default=[],
        metavar="SECONDS:[up.|down.]NAME[=VALUE]",
        help="change a fault later, or `reset`, or `half-close`; may be given more than once",
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        trio.run(_main, given)
    except* BadInput as group:
        parser.error(str(group.exceptions[0]))
    except* KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
