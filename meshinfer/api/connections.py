"""The connections under the HTTP server: hypercorn speaks the protocol, this decides how long it waits for a client.

Hypercorn's writes have no deadline and are shielded from cancellation, so one client that stops reading would keep
its answer, and at the end the whole agent, for ever. Here each connection is given to hypercorn as a stream that
has patience: a client that takes nothing for PATIENCE_SECONDS is gone, and its connection is closed, which the
request sees as a client that left. When the server is cancelled, what is being written gets LAST_SECONDS.

A slow client is not a silent one: any 16 KiB taken in time are a sign of life.
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from functools import partial

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.types import ASGIApp

PATIENCE_SECONDS = 60.0
"""With nothing taken or acknowledged. A laptop that changes its Wi-Fi is away for 10 to 30 s, and its answer may wait
for it; raising it keeps the sessions of machines that have vanished that much longer."""
LAST_SECONDS = 1.0
"""For the write under way when the server is cancelled."""
_PIECE_BYTES = 16 * 1024
_CONNECTION_DROP_TIME = 0x80  # macOS's name for it, from <netinet/tcp.h>; Python has none


class PatientStream(trio.abc.HalfCloseableStream):
    """A client's connection whose writes have a deadline."""

    def __init__(self, stream: trio.SocketStream, patience_seconds: float) -> None:
        self.socket = stream.socket
        """Hypercorn asks it for both addresses."""
        self._stream = stream
        self._patience = patience_seconds
        self._writing = trio.CancelScope()

    def hurry(self) -> None:
        """From now on nothing waits longer than LAST_SECONDS."""
        self._patience = min(self._patience, LAST_SECONDS)
        self._writing.deadline = min(self._writing.deadline, trio.current_time() + self._patience)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES) or (0,):
            with trio.CancelScope(deadline=trio.current_time() + self._patience) as self._writing:
                await self._stream.send_all(view[start : start + _PIECE_BYTES])
            if self._writing.cancelled_caught:
                self._drop()
                raise trio.BrokenResourceError("the client takes nothing")

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _drop(self) -> None:
        """Close it with a reset: the kernel forgets what the client has not taken, instead of keeping it."""
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


async def serve_connections(
    app: ASGIApp,
    config: Config,
    listener: trio.SocketListener,
    stop: trio.Event,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Serve until `stop` is set (open answers get `config.graceful_timeout`) or the task is cancelled."""
    context = WorkerContext(None)
    wrapped = ASGIWrapper(app)  # pyright: ignore[reportArgumentType] - hypercorn's own spelling of ASGI's types

    async def serve_one(stream: trio.SocketStream) -> None:
        _let_the_kernel_notice(stream, patience_seconds)
        patient = PatientStream(stream, patience_seconds)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hurry_when_cancelled, patient)
            await TCPServer(wrapped, config, context, ConnectionState({}), patient)  # pyright: ignore[reportArgumentType] - it wants no more of a stream than this one has
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as door:
            door.start_soon(partial(trio.serve_listeners, serve_one, [listener], handler_nursery=connections))
            await stop.wait()
            door.cancel_scope.cancel()
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout


async def _hurry_when_cancelled(stream: PatientStream) -> None:
    try:
        await trio.sleep_forever()
    finally:
        stream.hurry()


def _let_the_kernel_notice(stream: trio.SocketStream, patience_seconds: float) -> None:
    """Of a machine that has vanished, whose share of our writes would fit into buffers for many minutes."""
    with suppress(OSError):  # a client that has gone already
        if sys.platform == "linux":
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(patience_seconds * 1000)))
        elif sys.platform == "darwin":
            stream.setsockopt(socket.IPPROTO_TCP, _CONNECTION_DROP_TIME, max(1, round(patience_seconds)))
