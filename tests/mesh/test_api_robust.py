"""What a server meets outside: broken bodies, strangers, bugs, a port that is taken, an end in mid-answer, readers that do not read."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from api_server import ASK, Server, running
from starlette.types import Message, Receive, Scope, Send

from meshinfer.api.app import Address, listen, make_app, serve
from meshinfer.base.errors import BadInput
from meshinfer.config import Settings
from meshinfer.serving.requests import GenerateRequest
from meshinfer.testing.backend import FakeBackend, Script

CHAT = "/v1/chat/completions"


async def _still_serves(server: Server) -> bool:
    return (await server.http("POST", CHAT, json=ASK)).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b'"text"',
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b"model=fake/tiny",
    ],
    ids=lambda content: repr(content[:12]),
)
@pytest.mark.parametrize("path", [CHAT, "/instance"])
async def test_a_body_that_is_no_json_object_is_a_400(tmp_path: Path, path: str, content: bytes):
    async with running(tmp_path) as server:
        answer = await server.http("POST", path, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_input")
        assert await _still_serves(server)


async def test_a_body_over_the_bound_is_a_413_that_arrives(tmp_path: Path):
    async with running(tmp_path, api_body_limit_bytes=100_000) as server:
        huge = {**ASK, "user": "x" * 30_000_000}
        with pytest.raises(openai.APIStatusError) as caught:
            await server.openai(lambda client: client.chat.completions.create(**huge))
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 100_000
                await trio.lowlevel.checkpoint()

        assert (await server.http("POST", CHAT, content=endless())).status_code == 413
        assert await _still_serves(server)


async def test_a_stranger_needs_the_key(tmp_path: Path):
    async with running(tmp_path, api_host="0.0.0.0", api_key="s3cret") as server:
        local = Server(server.backend, server.url.replace("0.0.0.0", "127.0.0.1"))
        with pytest.raises(openai.AuthenticationError):
            await local.openai(lambda client: client.chat.completions.create(**ASK))
        assert (await local.http("DELETE", "/instance/x")).status_code == 401
        assert (await local.http("GET", "/", headers={"x-api-key": "s3cret"})).status_code == 200
        assert (await local.http("GET", "/healthz")).status_code == 200
        answer = await local.openai(lambda client: client.with_options(api_key="s3cret").chat.completions.create(**ASK))
        assert answer.choices[0].finish_reason == "stop"


async def test_a_page_on_a_rebound_name_stays_out(tmp_path: Path):
    async with running(tmp_path) as server:
        answer = await server.http("GET", "/state", headers={"host": "evil.example"})
        assert answer.status_code == 403
        answer = await server.http("POST", "/instance", headers={"origin": "https://evil.example"}, json={})
        assert answer.status_code == 403
        answer = await server.http("OPTIONS", CHAT, headers={"origin": server.url})
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_an_open_port_beyond_loopback_without_a_key_does_not_start(tmp_path: Path):
    with pytest.raises(BadInput, match="has no key"):
        make_app(FakeBackend(tmp_path), Settings(home=tmp_path, api_host="0.0.0.0"))


async def test_a_port_in_use_is_said_before_anything_else(tmp_path: Path):
    async with running(tmp_path) as server:
        port = int(server.url.rsplit(":", maxsplit=1)[1])
        settings = Settings(home=tmp_path, api_port=port)
        with pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{port}.*another port"):
            listen(settings)
        assert await _still_serves(server)


class BuggyBackend(FakeBackend):
    """Its requests meet a mistake of ours."""

    async def _speak(self, request: GenerateRequest, script: Script, events: Any) -> None:
        await super()._speak(request, script, events)
        raise ZeroDivisionError

    async def previews(self, *args: Any) -> Any:
        raise ZeroDivisionError


async def test_a_bug_is_a_500_in_the_protocols_shape(tmp_path: Path):
    async with running(tmp_path, backend=BuggyBackend(tmp_path, script=Script(answer="hi"))) as server:
        for answer in (
            await server.http("POST", CHAT, json=ASK),
            await server.http("GET", "/instance/previews?model_id=fake/tiny"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
            assert "ZeroDivision" not in answer.text
        assert (await server.http("GET", "/healthz")).status_code == 200


async def test_a_bug_in_mid_stream_does_not_just_end_it(tmp_path: Path):
    backend = BuggyBackend(tmp_path, script=Script(answer="hi", silent_after_tokens=None))
    async with running(tmp_path, backend=backend) as server:
        with pytest.raises(openai.APIError, match="mistake"):
            await server.openai(lambda client: list(client.chat.completions.create(**ASK, stream=True)))
        assert (await server.http("GET", "/healthz")).status_code == 200


async def test_many_requests_on_one_connection(tmp_path: Path):
    """Hypercorn's own bound closes a connection after 1000; here only that ours is not below a busy client's needs."""
    async with running(tmp_path, backend=FakeBackend(tmp_path, script=Script(answer="a"))) as server:

        def ask(client: openai.OpenAI) -> list[str]:
            return [client.chat.completions.create(**ASK).choices[0].message.content or "" for _ in range(50)]

        assert await server.openai(ask) == ["a"] * 50


async def test_stopping_ends_with_an_open_answer(tmp_path: Path):
    backend = FakeBackend(tmp_path, script=Script(pace=trio.Event()))
    settings = Settings(home=tmp_path, api_port=0)
    stop, begun, ended = trio.Event(), threading.Event(), threading.Event()
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve, make_app(backend, settings), listen(settings), stop=stop))
        server = Server(backend, address.url)

        def read(client: openai.OpenAI) -> None:
            # The answer breaks off, and the client can tell.
            chunks = client.chat.completions.create(**ASK, stream=True)
            with pytest.raises(openai.APIError):
                list(map(see, chunks))
            ended.set()

        def see(_: Any) -> None:
            begun.set()

        nursery.start_soon(server.openai, read)
        await server.wait_in_thread(begun)
        stop.set()
        await server.wait_in_thread(ended)
        with trio.fail_after(10):
            await backend.wait_idle()


# --- clients that do not read -------------------------------------------------------------------


@asynccontextmanager
async def _endless(directory: Path, patience_seconds: float) -> AsyncGenerator[tuple[Served, Address]]:
    """A server that sends without end to whoever asks, until the block ends."""
    served = Served()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.write, send)
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()
        served.ended.set()

    listener = listen(Settings(home=directory, api_port=0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(served.notice_a_full_connection)
        run = partial(serve, app, listener, patience_seconds=patience_seconds)
        yield served, await nursery.start(run)
        nursery.cancel_scope.cancel()


class Served:
    """What became of the one answer."""

    def __init__(self) -> None:
        self.full, self.ended = trio.Event(), trio.Event()
        self._writes = 0

    async def write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(64 * 1024), "more_body": True})
            self._writes += 1

    async def notice_a_full_connection(self) -> None:
        """Buffers are full when a while brings no further write: how much they take is the kernel's affair."""
        while True:
            before = self._writes
            await trio.sleep(0.2)
            if before and self._writes == before:
                return self.full.set()


async def _ask_and_not_read(address: Address) -> trio.SocketStream:
    client = await trio.open_tcp_stream(address.host, address.port)
    await client.send_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return client


async def test_a_client_that_takes_nothing_is_gone(tmp_path: Path):
    async with _endless(tmp_path, patience_seconds=0.3) as (served, address), await _ask_and_not_read(address):
        with trio.fail_after(20):
            await served.ended.wait()


async def test_a_client_that_takes_a_little_stays(tmp_path: Path):
    async with _endless(tmp_path, patience_seconds=2) as (served, address), await _ask_and_not_read(address) as client:
        with trio.move_on_after(4):  # twice the patience
            while True:
                await client.receive_some(256 * 1024)
                await trio.sleep(0.05)
        assert not served.ended.is_set()


async def test_the_server_ends_though_a_client_does_not_read(tmp_path: Path):
    with trio.fail_after(20):
        async with _endless(tmp_path, patience_seconds=3600) as (served, address):
            client = await _ask_and_not_read(address)
            await served.full.wait()
        await client.aclose()


async def test_a_client_that_does_not_read_gives_its_place_back_at_the_deadline(tmp_path: Path):
    """As the server sees it: its body is not taken. The next client gets the one place that there is."""
    backend = FakeBackend(tmp_path, script=Script(pace=trio.Event()))
    settings = Settings(home=tmp_path, request_deadline_seconds=0.1, request_queue_limit=1)
    app = make_app(backend, settings)
    stuck = trio.Event()

    async def takes_nothing(message: Message) -> None:
        if message["type"] == "http.response.body":
            stuck.set()
            await trio.sleep_forever()

    taken: list[Message] = []

    async def takes_all(message: Message) -> None:
        await trio.lowlevel.checkpoint()
        taken.append(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, *_post({**ASK, "stream": True}), takes_nothing)
        with trio.fail_after(20):
            await stuck.wait()
            await backend.wait_idle()
            backend.script = Script(answer="hi")
            await app(*_post(ASK), takes_all)
        nursery.cancel_scope.cancel()
    assert taken[0]["status"] == 200


def _post(body: dict[str, Any]) -> tuple[Scope, Receive]:
    """A chat completion as an ASGI server hands it over."""
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await trio.sleep_forever()
        return messages.pop()

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    path = "/v1/chat/completions"
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }
    return scope, receive
