"""What a server meets outside: broken bodies, strangers, bugs, a port that is taken, an end in mid-answer."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from api_server import ASK, Server, running

from meshinfer.api.app import listen, make_app, serve
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
