"""`meshinfer chat`: one question, or a conversation, with the figures that people ask for.

TTFT is measured here, from sending the request to the first text; tokens per second from the first
token to the last, so that loading a model and a long prompt do not hide in it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from meshinfer.base.errors import MeshinferError, PeerLost
from meshinfer.base.units import format_seconds
from meshinfer.cli.asked_agent import agent_url
from meshinfer.cli.options import ApiKeyOption, ApiOption, HomeOption, JsonOption, ModelArgument
from meshinfer.cli.terminal import err, out, print_json, printable, show_error

if TYPE_CHECKING:
    import httpx

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast

# Often enough for a bar that moves, rarely enough to be no load.
_PROGRESS_SECONDS = 0.5

# Its node may be lost or leaving, its runner may have crashed, a link may be down: from here all look alike.
REPAIR = "a part of the model no longer answers; the answer goes on when it does again, there or on another node …"

Message = dict[str, str]


@dataclass
class Answer:
    """One answer as it comes in."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sent_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    last_at: float = 0.0

    def add(self, text: str, finish_reason: str) -> None:
        """More text, or the end: the stop token brings none, but takes a step and is counted."""
        self.last_at = time.monotonic()
        self.first_at = self.first_at or self.last_at
        self.text += text
        self.finish_reason = finish_reason or self.finish_reason

    @property
    def ttft_seconds(self) -> float:
        return max(0.0, self.first_at - self.sent_at)

    @property
    def tokens_per_second(self) -> float:
        """Of decoding alone; 0 where there was nothing to measure."""
        elapsed = self.last_at - self.first_at
        return (self.completion_tokens - 1) / elapsed if elapsed > 0 and self.completion_tokens > 1 else 0.0

    def footer(self) -> str:
        parts = [f"{self.completion_tokens} tokens", f"first after {format_seconds(self.ttft_seconds)}"]
        if self.tokens_per_second:
            parts.append(f"then {self.tokens_per_second:.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("cut at --max-tokens")
        return " · ".join(parts)

    def to_json(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_seconds": round(self.ttft_seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


@dataclass(frozen=True)
class Dials:
    """What goes with every request of a conversation."""

    url: str
    api_key: str
    model: str
    max_tokens: int | None
    temperature: float | None
    seed: int | None

    def body(self, messages: list[Message]) -> dict[str, Any]:
        optional = {"max_completion_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
        }


def chat(
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Asked once. Without it: a conversation.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told before all else.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")] = None,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0,
            help="0 always takes the likeliest token, and suits small models; those that think aloud want about 0.6.",
        ),
    ] = 0.0,
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Tokens to reserve per conversation, if this places the model."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Conversations to reserve for, if this places the model.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")] = None,
    home: HomeOption = None,
    api: ApiOption = None,
    api_key: ApiKeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Ask a model of the mesh. It is placed and loaded if nobody serves it yet."""
    dials = Dials(agent_url(api, home), api_key, model, max_tokens, temperature, seed)
    if context is not None or concurrency is not None:
        _place(dials, context, concurrency)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if prompt is None and sys.stdin.isatty():
        _talk(dials, messages, home)
        return
    messages.append({"role": "user", "content": prompt if prompt is not None else sys.stdin.read()})
    if as_json:
        print_json(ask_model(dials, messages, Page(lambda _: None)).to_json(model))
    else:
        _show_answer(dials, messages)


def _place(dials: Dials, context: int | None, concurrency: int | None) -> None:
    """Have the model placed with so much reserved, unless it is placed already. Loading it is left to the question."""
    from meshinfer.cli.agent_client import get, post

    instances = get(dials.url, dials.api_key, "/instance")["instances"]
    if not any(instance["model_id"] == dials.model and instance["state"] != "broken" for instance in instances):
        wish = {"model_id": dials.model, "context": context, "concurrency": concurrency}
        post(dials.url, dials.api_key, "/instance", wish)


def _talk(dials: Dials, messages: list[Message], home: Path | None) -> None:
    err.print(f"Talking to {dials.model}. Ctrl-D or /bye ends it, /new starts over.", style="dim")
    opening = list(messages)
    while True:
        try:
            said = out.input(Text("> ", style="bold cyan")).strip()
        except EOFError:
            err.print()
            return
        except KeyboardInterrupt:
            err.print("  (Ctrl-D ends the conversation)", style="dim")
            continue
        if said == "/bye":
            return
        if said == "/new":
            messages = list(opening)
            continue
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        try:
            answer = _show_answer(dials, messages)
        except KeyboardInterrupt:
            # Only this answer is unwanted; leaving the stream has ended it everywhere.
            err.print(" …", style="dim")
            messages.pop()
        except MeshinferError as error:
            show_error(error, home)
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer.text})


class Page:
    """An answer, as `show` shows it, and on standard error what is told of it, each notice on lines of its own.

    The eye may see both in one place, also where standard output is a pipe (`| tee answer.txt`, `2>&1`). So before a
    notice the line ends, on standard error: standard output is the answer and nothing else.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._is_within_line = False

    def write(self, text: str) -> None:
        self._show(text)
        self._is_within_line = not text.endswith("\n")

    def tell(self, notice: str) -> None:
        self.break_line()
        err.print(notice, style="dim", soft_wrap=True)

    def break_line(self) -> None:
        if self._is_within_line:
            err.print()
        self._is_within_line = False


def _show_answer(dials: Dials, messages: list[Message]) -> Answer:
    page = Page(_write)
    try:
        answer = ask_model(dials, messages, page)
    except MeshinferError:
        page.break_line()  # of what is wrong, too
        raise
    page.write("\n")
    page.tell(answer.footer())
    return answer


def _write(text: str) -> None:
    # Not through rich: the model's words are not markup, and a half line must show at once.
    out.file.write(printable(text) if out.is_terminal else text)
    out.file.flush()


def ask_model(dials: Dials, messages: list[Message], page: Page) -> Answer:
    """Stream one answer to `page`; until its first words, say what the mesh is doing.

    Raises:
        MeshinferError: what the agent says is wrong, or what is wrong with the way to it.
    """
    import httpx

    from meshinfer.cli.agent_client import explain, http_client

    answer = Answer()
    try:
        with http_client(dials.url, dials.api_key) as client, _waiting_shown(dials) as stop_showing:
            body = dials.body(messages)
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                for chunk in _chunks(response, dials.url, lambda: page.tell(REPAIR)):
                    text = _take(chunk, answer)
                    if text:
                        stop_showing()
                        page.write(text)
    except httpx.HTTPError as error:
        raise explain(error, dials.url) from error
    if not answer.finish_reason:
        raise PeerLost("the answer broke off", do="ask again; `meshinfer status` shows who is left")
    return answer


def _chunks(response: httpx.Response, url: str, on_repair: Callable[[], None]) -> Iterator[Any]:
    """The JSON of each event of a stream; of the comments, which say that the agent lives, a repair is news."""
    from meshinfer.cli.agent_client import answer_of, error_of

    if response.is_error:
        response.read()
        answer_of(response, url)
    repairing = False
    for line in response.iter_lines():
        if line.startswith(": repairing") and not repairing:
            repairing = True  # once, however long it takes
            on_repair()
        if not line.startswith("data:"):
            continue
        repairing = False
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise error_of(chunk, response.status_code)
        yield chunk


def _take(chunk: Any, answer: Answer) -> str:
    """Enter one chunk into the answer; the text that it brought."""
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    text = finish_reason = ""
    for choice in chunk.get("choices", []):
        text += choice.get("delta", {}).get("content") or ""
        finish_reason = choice.get("finish_reason") or ""
    if text or finish_reason:
        answer.add(text, finish_reason)
    return text


@contextmanager
def _waiting_shown(dials: Dials) -> Generator[Callable[[], None]]:
    """A line that says what is being waited for, until the function that this gives is called."""
    stopped = threading.Event()
    if not err.is_terminal:
        yield stopped.set
        return
    line = err.status(f"asking {dials.model} …")

    def follow() -> None:
        while not stopped.wait(_PROGRESS_SECONDS):
            line.update(_what_is_done(dials))

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            line.stop()

    follower = threading.Thread(target=follow, name="progress", daemon=True)
    line.start()
    follower.start()
    try:
        yield stop
    finally:
        stop()


def _what_is_done(dials: Dials) -> str:
    from meshinfer.cli.agent_client import get

    try:
        instances = get(dials.url, dials.api_key, "/instance")["instances"]
    except MeshinferError:
        return f"asking {dials.model} …"  # the request itself will say what is wrong
    for instance in instances:
        if instance["model_id"] == dials.model and instance["state"] != "ready":
            return f"{instance['state']} {dials.model} · {instance['progress']:.0%}"
    return f"asking {dials.model} …"
