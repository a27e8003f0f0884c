"""A client as clients are: it asks over HTTP, reads server-sent events or one body, and writes down what came and when.

Answers are kept character by character, so that two of them can be compared whatever their chunks were.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from meshinfer.base.ids import ModelId
from meshinfer.testing.chaos import Answer

CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks."""

    text: str
    tokens: int
    temperature: float = 0.0
    seed: int | None = None
    streams: bool = True

    def body(self, model: ModelId) -> dict[str, Any]:
        """Of the request."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "temperature": self.temperature,
            "max_tokens": self.tokens,
            "stream": self.streams,
            **({} if self.seed is None else {"seed": self.seed}),
        }


def ask(
    url: str,
    body: dict[str, Any],
    answer: Answer,
    on_chunk: Callable[[int], None] = lambda _: None,
    on_sign: Callable[[str], None] = lambda _: None,
) -> None:
    """Post `body` and write what comes into `answer`.

    `on_chunk` is told how many pieces of text have come, and `on_sign` what the origin says between them, such as
    "repairing 0%".
    """
    timeout = httpx.Timeout(answer.deadline_seconds, connect=CONNECT_SECONDS)
    answer.asked_at = time.monotonic()
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                _fail(answer, response.json())
            elif body["stream"]:
                _read(response.iter_lines(), answer, on_chunk, on_sign)
            else:
                _take(json.loads(response.read()), answer)
    except (httpx.HTTPError, ValueError) as error:
        answer.error, answer.said = "connection", repr(error)
    if not answer.error and math.isnan(answer.ended_at):
        answer.error, answer.said = "connection", "the stream ended without an end"
    answer.ended_at = time.monotonic()


def _read(
    lines: Iterator[str], answer: Answer, on_chunk: Callable[[int], None], on_sign: Callable[[str], None]
) -> None:
    chunks = 0
    for line in lines:
        if line.startswith(": "):
            on_sign(line.removeprefix(": "))
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            _fail(answer, event)
            return
        answer.ids.add(event["id"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                chunks += 1
                answer.got.extend(text)
                answer.times.append(time.monotonic())
                on_chunk(chunks)
            if choice["finish_reason"]:
                answer.ended_at = time.monotonic()


def _take(body: dict[str, Any], answer: Answer) -> None:
    """An answer that came in one piece."""
    answer.ids.add(body["id"])
    answer.got.extend(body["choices"][0]["message"]["content"])
    answer.ended_at = time.monotonic()
    answer.times.append(answer.ended_at)


def _fail(answer: Answer, body: dict[str, Any]) -> None:
    error = body.get("error", {})
    answer.error, answer.said = str(error.get("code") or "no code"), str(error.get("message"))
