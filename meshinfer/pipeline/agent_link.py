"""The runner's end of the socket pair with its agent: messages both ways, and the heartbeat.

One thread reads, one writes; the MLX thread only leaves messages. When the agent is gone, so is the
reason for this process to be.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from meshinfer.base.errors import ProtocolError
from meshinfer.base.threads import pause
from meshinfer.pipeline.progress import Progress
from meshinfer.wire.codec import MAX_MESSAGE_BYTES
from meshinfer.wire.runner_control import AGENT_MESSAGES, RUNNER_MESSAGES, AgentMessage, RunnerMessage

HEARTBEAT_SECONDS = 0.25
"""Silence and steps that hang are judged by these (`serving.runner_watch`), and found out by as much later."""
LAST_WORDS_SECONDS = 1.0
"""For what is still to be sent when the process ends; an agent that does not read is not waited for."""
_OUTBOX_MESSAGES = 1024
"""A loading report for each layer, and some. Full only when the agent has stopped reading for minutes."""


class AgentLink:
    """The socket pair, from the runner's side."""

    def __init__(self, connection: socket.socket, progress: Progress) -> None:
        self._connection = connection
        self._progress = progress
        self._outbox: queue.Queue[RunnerMessage | None] = queue.Queue(_OUTBOX_MESSAGES)
        self._exit_code = 0
        self._beats = False

    def start(self, handle: Callable[[AgentMessage], None]) -> None:
        """Begin to read and send; `handle` is called on the reader thread with each message."""
        threading.Thread(target=self._read, args=(handle,), name="agent reads", daemon=True).start()
        threading.Thread(target=self._write, name="agent writes", daemon=True).start()

    def beat(self) -> None:
        """Begin to send heartbeats. Not before the first message: nobody listens to a process that waits."""
        self._beats = True

    def send(self, message: RunnerMessage) -> None:
        """Leave `message` to be sent, without waiting."""
        # Full: the agent has not read for minutes, and will find out from the socket's end.
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(message)

    def end_process(self, code: int) -> NoReturn:
        """Send what is left, then end at once: MLX and its threads may abort an orderly exit."""
        self._exit_code = code
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(None)
        pause(LAST_WORDS_SECONDS)  # the writer thread ends the process as soon as it has nothing left to send
        os._exit(code)

    def _read(self, handle: Callable[[AgentMessage], None]) -> None:
        try:
            while (message := self._receive()) is not None:
                handle(message)
        except (OSError, ProtocolError):  # the agent died, or is not one: the same to us
            pass
        os._exit(0)

    def _write(self) -> None:
        beat_at = time.monotonic()
        while True:
            try:
                message = self._outbox.get(timeout=max(0.0, beat_at - time.monotonic()))
                if message is None:
                    os._exit(self._exit_code)
            except queue.Empty:
                beat_at = time.monotonic() + HEARTBEAT_SECONDS
                if not self._beats:
                    continue
                message = self._progress.heartbeat()
            body = RUNNER_MESSAGES.encode(message)
            try:
                self._connection.sendall(struct.pack(">I", len(body)) + body)
            except OSError:
                os._exit(0)  # the agent is gone

    def _receive(self) -> AgentMessage | None:
        header = self._exactly(4)
        if header is None:
            return None
        (size,) = struct.unpack(">I", header)
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"an agent's message of {size} bytes", expected=f"at most {MAX_MESSAGE_BYTES}")
        body = self._exactly(size)
        return None if body is None else AGENT_MESSAGES.decode(body)

    def _exactly(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            piece = self._connection.recv(count - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)
