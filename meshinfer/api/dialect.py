"""What a protocol adapter gives and gets: the seam between one generation and the many ways to ask for it. Pure.

An adapter turns a body into an `Ask` and a `Dialect`. `generation.py` runs the ask and reports what
happens as `Piece`, `Ended` and signs of life; the dialect puts those into the protocol's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import ModelId
from meshinfer.serving.requests import FinishReason, Waiting
from meshinfer.serving.text import TextModel
from meshinfer.serving.text_answer import TextDelta


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants, whatever protocol it speaks."""

    model_id: ModelId
    messages: tuple[Mapping[str, Any], ...]
    """As the chat template reads them."""
    choices: int = 1
    """Independent answers to one prompt."""
    max_new_tokens: int | None = None
    """None: as many as the reserved context leaves."""
    stops: tuple[str, ...] = ()
    seed: int | None = None
    """None: a random one."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `wire.records.Sampling` that were given, other than the seed."""

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.get("top_logprobs", -1) >= 0


@dataclass(frozen=True, slots=True)
class Piece:
    """More of answer `index`."""

    index: int
    delta: TextDelta


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer `index` is complete."""

    index: int
    reason: FinishReason
    stop: str | None
    """The stop string that was hit."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    """Over all its answers, stop tokens included."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer as a whole."""

    text: str
    delta: TextDelta
    """All of it in one: for the log-probabilities."""
    reason: FinishReason
    stop: str | None


class Dialect(Protocol):
    """One request's answer in one protocol's words. Stateful: called in the order of events."""

    stream: bool
    content_type: str
    """Of the stream."""

    def piece(self, piece: Piece, model: TextModel) -> bytes: ...

    def ended(self, ended: Ended) -> bytes: ...

    def complete(self, usage: Usage) -> bytes:
        """The end of a stream in which every answer ended."""
        ...

    def failed(self, error: MeshinferError) -> bytes:
        """The end of a stream that cannot go on, so that no client takes what it has for the whole."""
        ...

    def sign_of_life(self, waiting: Waiting | None) -> bytes: ...

    def whole(self, choices: list[Choice], usage: Usage, model: TextModel) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def error_body(self, error: MeshinferError) -> bytes:
        """The body that goes with the error's HTTP status."""
        ...


Happening = Piece | Ended | Waiting | MeshinferError | Literal["complete"]
"""What a generation reports, in order; a MeshinferError or `complete` is the last."""
