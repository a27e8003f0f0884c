"""Runner processes of this node: started, listened to, ended. A thin driver.

One process per seat (`models.engine_process`), with one end of a socket pair as its control channel.
Either side's death closes the pair, which is the other's signal. Its memory and its crashes go with the process.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import struct
import subprocess
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from meshinfer.base.errors import ProtocolError
from meshinfer.models.engine_process import engine_command, engine_options
from meshinfer.wire.codec import MAX_MESSAGE_BYTES
from meshinfer.wire.runner_control import (
    AGENT_MESSAGES,
    RUNNER_MESSAGES,
    AgentMessage,
    Listening,
    RunnerMessage,
    StopRunner,
)

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 1.0
"""From asking a runner to stop to killing it. It has nothing to save; longer only delays the next seat's memory."""
KILLED_SECONDS = 5.0
"""From the kill to the end: the kernel frees tens of gigabytes in a second or two. A process that hangs in the kernel (a
dead disk, a driver) may never end; what is served here must not wait for it."""
STDERR_LINES = 40
"""Of a runner's last words, kept for the error message when it dies without one."""


class Runner(Protocol):
    """What `SeatRunners` needs of a runner; a simulation has a fake one."""

    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def started_at(self) -> float:
        """When its process was, by trio's clock."""
        ...

    @property
    def listening(self) -> Listening | None:
        """Where its channels listen, once it has said so."""
        ...

    @property
    def heard(self) -> trio.Event:
        """Set when `listening` is known."""
        ...

    async def send(self, message: AgentMessage) -> None:
        """Messages arrive in the order in which this was called.

        Raises trio.BrokenResourceError or trio.ClosedResourceError if the runner is gone.
        """
        ...

    async def listen(self, heard: Callable[[RunnerMessage], Awaitable[None]]) -> str:
        """Pass on every message until the runner is gone; returns why it is (its last words if it crashed)."""
        ...

    async def stop(self, *, at_once: bool = False) -> None:
        """Ask it to end and wait a moment, unless `at_once`; then kill it. Returns when it is gone, or when the kernel
        does not let it go. May be called more than once.
        """
        ...


class RunnerProcess:
    """One runner process and its control channel."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self._process = process
        self._stream = stream
        self._send_lock = trio.Lock()
        self._last_words: deque[str] = deque(maxlen=STDERR_LINES)
        self._listening: Listening | None = None
        self._heard = trio.Event()
        self._started_at = trio.current_time()

    @classmethod
    async def start(cls) -> RunnerProcess:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.enter_context(ours)
            process = await trio.lowlevel.open_process(
                engine_command("seat", "--fd", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=tempfile.gettempdir(),
                **engine_options(),
            )
            unless_it_starts.pop_all()
        return cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def started_at(self) -> float:
        return self._started_at

    @property
    def listening(self) -> Listening | None:
        return self._listening

    @property
    def heard(self) -> trio.Event:
        return self._heard

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def send(self, message: AgentMessage) -> None:
        body = AGENT_MESSAGES.encode(message)
        async with self._send_lock:
            await self._stream.send_all(struct.pack(">I", len(body)) + body)

    async def listen(self, heard: Callable[[RunnerMessage], Awaitable[None]]) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_last_words)
            try:
                while (message := await self._receive()) is not None:
                    if isinstance(message, Listening):
                        self._listening = message
                        self._heard.set()
                    await heard(message)
            except (ProtocolError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._last_words.append(str(error))
            await self.stop()
            nursery.cancel_scope.cancel()
        return self._obituary()

    async def stop(self, *, at_once: bool = False) -> None:
        with trio.CancelScope(shield=True):
            if not at_once:
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                    with trio.move_on_after(STOP_GRACE_SECONDS / 2):
                        await self.send(StopRunner())
                with trio.move_on_after(STOP_GRACE_SECONDS):
                    await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                with trio.move_on_after(KILLED_SECONDS):
                    await self._process.wait()
            if self._process.returncode is None:
                log.error(
                    "runner process %d was killed and has not ended within %.0f s: it hangs in the kernel, and holds its "
                    "memory; if it stays (ps %d), restart the machine",
                    self.pid,
                    KILLED_SECONDS,
                    self.pid,
                )
            await self._stream.aclose()

    async def _receive(self) -> RunnerMessage | None:
        header = await self._exactly(4)
        if header is None:
            return None
        (size,) = struct.unpack(">I", header)
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a runner's message of {size} bytes", expected=f"at most {MAX_MESSAGE_BYTES}")
        body = await self._exactly(size)
        return None if body is None else RUNNER_MESSAGES.decode(body)

    async def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            piece = await self._stream.receive_some(size - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)

    async def _keep_last_words(self) -> None:
        if self._process.stderr is None:
            return
        rest = b""
        with contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            async for piece in self._process.stderr:
                *lines, rest = (rest + piece).split(b"\n")
                self._last_words.extend(line.decode(errors="replace")[:500] for line in lines)
                rest = rest[-4096:]

    def _obituary(self) -> str:
        code = self._process.returncode
        if code is None:
            return f"its runner, process {self.pid}, was killed and hangs in the kernel"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory, or by hand)"
        else:
            how = f"ended with exit code {code}"
        words = "; ".join(self._last_words)[-300:]
        return f"its runner was {how}" if code < 0 else f"its runner {how}: {words}"
