"""The stream of events of one request: a memory channel that can end with an error.

`receive` is cancel-safe, as a memory channel's is, so that a reader may wait for the next event with
a time-out (for heartbeats) and come back.
"""

from __future__ import annotations

import trio

from meshinfer.base.errors import MeshinferError
from meshinfer.serving.requests import Finished, GenerateEvent, GenerationFailed


class EventStream:
    """Events until `Finished`; `receive` raises the request's MeshinferError if it ends otherwise."""

    def __init__(self, buffer: int) -> None:
        self._send, self._receive = trio.open_memory_channel[GenerateEvent](buffer)
        self._error: MeshinferError | None = None
        self._finished = False

    # --- the writer -----------------------------------------------------------------------------

    async def send(self, event: GenerateEvent) -> None:
        await self._send.send(event)

    def send_nowait(self, event: GenerateEvent) -> bool:
        """False if the buffer is full: for signs of life, which may be dropped."""
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            return False
        return True

    def end(self, error: MeshinferError | None = None) -> None:
        """No more events; what is in the buffer is read first."""
        self._error = self._error or error
        self._send.close()

    # --- the reader -----------------------------------------------------------------------------

    async def receive(self) -> GenerateEvent:
        """The next event.

        Raises:
            MeshinferError: the request failed.
            trio.EndOfChannel: after `Finished`.
        """
        try:
            event = await self._receive.receive()
        except trio.EndOfChannel:
            if self._error is not None:
                raise self._error from None
            if not self._finished:
                raise GenerationFailed("the request was cancelled") from None
            raise
        self._finished = isinstance(event, Finished)
        return event

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> GenerateEvent:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
