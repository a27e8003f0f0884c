"""A node's HTTP API on a real port with a fake agent behind it, and real clients in threads."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import trio

from meshinfer.api.app import listen, make_app, serve
from meshinfer.config import Settings
from meshinfer.testing.backend import FakeBackend

T = TypeVar("T")


@dataclass
class Server:
    backend: FakeBackend
    url: str

    async def openai(self, ask: Callable[[openai.OpenAI], T], **options: Any) -> T:
        """What `ask` gets of a real client, in a thread."""

        def call() -> T:
            client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30, **options)
            with client:
                return ask(client)

        return await trio.to_thread.run_sync(call)

    async def http(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            return await client.request(method, path, **options)

    @asynccontextmanager
    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[httpx.Response]:
        """A chat completion as raw lines."""
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            yield response

    async def wait_in_thread(self, event: threading.Event) -> None:
        """Until a client in its thread sets `event`."""
        assert await trio.to_thread.run_sync(event.wait, 30)


@asynccontextmanager
async def running(directory: Path, *, backend: FakeBackend | None = None, **dials: Any) -> AsyncGenerator[Server]:
    """A server until the block ends."""
    backend = backend or FakeBackend(directory)
    settings = Settings(home=directory, api_port=0, **{"context_tokens": 512, **dials})
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(serve, make_app(backend, settings), listen(settings)))
        yield Server(backend, address.url)
        nursery.cancel_scope.cancel()


MODEL = "fake/tiny"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
