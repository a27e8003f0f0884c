"""A generation as an HTTP answer: when the status goes out, what keeps the line alive, who may leave.

The status of a streamed answer waits for the first token or the first error, so that what fails
before it is a proper status with the protocol's error body. It does not wait for ever: after
`api_first_token_wait_seconds` (the model is still being placed or loaded, or the prompt is long) the
status goes out as 200 with signs of life behind it, and an error after that is the protocol's
in-stream error. See docs/decisions/streams-begin-late.md.

A client that leaves cancels everything below: one task does nothing but wait for that. An answer that
is not streamed is watched in the same way.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import trio
from starlette.types import Receive, Scope, Send

from meshinfer.api.dialect import Choice, Dialect, Ended, Happening, Piece
from meshinfer.api.errors import headers_of, status_of
from meshinfer.api.generation import Generation
from meshinfer.base.errors import MeshinferError, QueueFull
from meshinfer.config import Settings
from meshinfer.serving.requests import Generated, Waiting
from meshinfer.serving.text_answer import TextDelta

FAREWELL_SECONDS = 60.0
"""For what has been generated to reach its client. Half a minute more than a laptop takes to change its Wi-Fi."""


class InFlight:
    """The requests that this node is the origin of: how many there may be, and how to find one by its id."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_id: dict[str, Generation] = {}
        """All and only requests that may have sessions."""

    @property
    def sessions(self) -> int:
        return sum(generation.ask.choices for generation in self._by_id.values())

    def find(self, request_id: str) -> Generation | None:
        return self._by_id.get(request_id)

    @contextmanager
    def hold(self, request_id: str, generation: Generation) -> Generator[None]:
        """A place for each of its sessions.

        Raises:
            QueueFull: there is none.
        """
        if self.sessions + generation.ask.choices > self.limit:
            raise QueueFull(
                f"this node has {self.sessions} sessions in flight and {generation.ask.choices} more were asked for",
                expected=f"at most {self.limit} at once",
                do="try again in a moment, or ask another node",
            )
        self._by_id[request_id] = generation
        try:
            yield
        finally:
            del self._by_id[request_id]


class GenerationResponse:
    """An ASGI response."""

    def __init__(
        self, request_id: str, generation: Generation, dialect: Dialect, in_flight: InFlight, settings: Settings
    ) -> None:
        self._request_id = request_id
        self._generation = generation
        self._dialect = dialect
        self._in_flight = in_flight
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope  # as ASGI wants it
        out = _Out(send, self._dialect)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_client_leaves, receive, nursery.cancel_scope)
                # No buffer: what the client does not read is not generated.
                report, happenings = trio.open_memory_channel[Happening](0)
                nursery.start_soon(self._generate, report, nursery.cancel_scope)
                await (self._stream if self._dialect.stream else self._whole)(happenings, out)
                nursery.cancel_scope.cancel()
        except MeshinferError as error:
            await out.fail(error)
        except (
            Exception
        ):  # a bug; the server says 500 and logs it, unless the stream has begun, which must not just end
            await out.fail(MeshinferError("this node made a mistake", do="look into its log")) if out.begun else None
            raise

    async def _generate(self, report: trio.MemorySendChannel[Happening], answer: trio.CancelScope) -> None:
        """Have it generated; the last report is `complete` or a MeshinferError."""
        try:
            with self._in_flight.hold(self._request_id, self._generation):
                last = await self._generation.run(report)
        except QueueFull as full:
            last = full
        answer.deadline = trio.current_time() + FAREWELL_SECONDS
        await report.send(last)

    async def _stream(self, happenings: trio.MemoryReceiveChannel[Happening], out: _Out) -> None:
        silence = self._settings.api_first_token_wait_seconds
        waiting: Waiting | None = None
        deadline = trio.current_time() + silence
        while True:
            happening = await _receive_before(happenings, deadline)
            if happening is None:
                await out.write(self._dialect.sign_of_life(waiting))
            elif isinstance(happening, Waiting):
                news = waiting is None or happening.phase != waiting.phase
                waiting = happening
                if not (out.begun and news):
                    continue
                # What a pause is for is said as it begins, be it a repair or the loading after it.
                await out.write(self._dialect.sign_of_life(waiting))
            elif isinstance(happening, MeshinferError):
                return await out.fail(happening)
            elif happening == "complete":
                await out.write(self._dialect.complete(self._generation.usage))
                return await out.end()
            elif isinstance(happening, Piece):
                waiting = None
                assert self._generation.model is not None
                await out.write(self._dialect.piece(happening, self._generation.model))
            else:
                await out.write(self._dialect.ended(happening))
            if out.begun:
                deadline = trio.current_time() + self._settings.api_heartbeat_seconds

    async def _whole(self, happenings: trio.MemoryReceiveChannel[Happening], out: _Out) -> None:
        texts: dict[int, list[str]] = {}
        tokens: dict[int, list[Generated]] = {}
        ends: dict[int, Ended] = {}
        while True:
            happening = await happenings.receive()
            if isinstance(happening, MeshinferError):
                return await out.fail(happening)
            if happening == "complete":
                break
            if isinstance(happening, Piece):
                texts.setdefault(happening.index, []).append(happening.delta.text)
                tokens.setdefault(happening.index, []).extend(happening.delta.tokens)
            elif isinstance(happening, Ended):
                ends[happening.index] = happening
        choices: list[Choice] = []
        for index, end in sorted(ends.items()):
            text = "".join(texts.get(index, []))
            choices.append(Choice(text, TextDelta(text, tuple(tokens.get(index, []))), end.reason, end.stop))
        model = self._generation.model
        assert model is not None
        return await out.whole(self._dialect.whole(choices, self._generation.usage, model))


async def _receive_before(happenings: trio.MemoryReceiveChannel[Happening], deadline: float) -> Happening | None:
    """The next report, or None at `deadline`; nothing is lost then."""
    with trio.move_on_at(deadline):
        return await happenings.receive()
    return None


async def _cancel_when_client_leaves(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


class _Out:
    """The HTTP answer as far as it is out."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self.begun = False
        """The status of a stream is out."""

    async def write(self, data: bytes) -> None:
        """More of a stream; its status goes first."""
        if not data:
            return
        if not self.begun:
            self.begun = True
            # no-transform, no buffering: proxies that gather a stream break it.
            headers = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
            await self._start(200, self._dialect.content_type, headers)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        length = {"content-length": str(len(body))}
        await self._start(status, "application/json", {**(headers or {}), **length})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: MeshinferError) -> None:
        """A status with the protocol's body if that is still possible, else the protocol's in-stream error."""
        if self.begun:
            await self.write(self._dialect.failed(error))
            await self.end()
        else:
            await self.whole(self._dialect.error_body(error), status_of(error), headers_of(error))

    async def _start(self, status: int, content_type: str, headers: dict[str, str]) -> None:
        pairs = [(name.encode(), value.encode()) for name, value in {"content-type": content_type, **headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
