"""OpenAI's chat completions: a body to an `Ask`, and what happens to chunks or one response. Pure.

Nothing that a client sends is ignored unless OpenAI defines it as having no effect on the answer:
what we do not serve is refused by name. A null is an absent field everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError, from_json

from meshinfer.api.dialect import Ask, Choice, Ended, Piece, Usage
from meshinfer.api.errors import BadParameter, UnsupportedParameter, openai_body
from meshinfer.api.sse import CONTENT_TYPE, DONE, comment, data_event, to_json
from meshinfer.api.validation import bad_parameter, shown
from meshinfer.base.errors import BadInput, MeshinferError, UnknownModel
from meshinfer.models.catalogue import parse_model_name
from meshinfer.serving.requests import Generated, Waiting
from meshinfer.serving.text import TextModel
from meshinfer.serving.text_answer import TextDelta
from meshinfer.wire.records import LOWEST_LOGPROB

# OpenAI: names of the end user, storage and caching; none of them changes an answer.
IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    )
)

# Not served; the listed values ask for nothing and pass.
NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}

# OpenAI allows 4, other servers up to 32.
MAX_STOPS = 32
# OpenAI's bound; each choice is a session of its own.
MAX_CHOICES = 128


def _join_parts(content: Any) -> Any:
    """Content given as parts, as one text."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            is_other = isinstance(kind, str) and kind not in ("text", "refusal")
            what = f"has part {index} of type {shown(kind)}" if is_other else f"has part {index} without text"
            raise PydanticCustomError("part", "{what}", {"what": what})
        texts.append(text)
    return "".join(texts)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, allow_inf_nan=False)


class _Function(_Strict):
    name: str
    arguments: str


class _ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: _Function
    index: int | None = None


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_join_parts)] = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    """Comes back with an assistant's own message, when a client sends that again; says nothing to a model."""


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against eavesdroppers: has no effect on the answer."""


class ChatBody(_Strict):
    """What we serve of the request body."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[_Message], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1000)]],
            Field(max_length=MAX_STOPS),
            BeforeValidator(_listed),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    """The body as far as we serve it.

    Raises:
        BadParameter: naming the first part that is wrong, unknown or not served.
    """
    body = _without_nulls(body)
    for name, harmless in NOT_SERVED.items():
        if name in body and body[name] not in harmless:
            raise UnsupportedParameter(name, f"the parameter '{name}' is not served", do="leave it out")
    served = {key: value for key, value in body.items() if key not in IGNORED and key not in NOT_SERVED}
    if isinstance(served.get("messages"), list):
        served["messages"] = [_without_nulls(message) for message in served["messages"]]
    if "stream_options" in served:
        served["stream_options"] = _without_nulls(served["stream_options"])
    try:
        parsed = ChatBody.model_validate(served)
    except ValidationError as error:
        raise bad_parameter(error) from None
    _check_together(parsed)
    return parsed


def to_ask(body: ChatBody) -> Ask:
    """The protocol-free request.

    Raises:
        UnknownModel: the name is none that a model can have.
        BadParameter: a `logit_bias` key is not a token id.
    """
    try:
        model_id = parse_model_name(body.model)
    except BadInput as error:
        raise UnknownModel(error.what, expected=error.expected, do="GET /v1/models lists what there is") from None
    given = {
        "temperature": body.temperature,
        # 0 means "the likeliest token alone"; engines take 0 for "off".
        "top_p": body.top_p if body.top_p is None else max(body.top_p, 1e-6),
        "top_k": body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": _logit_bias(body.logit_bias),
        "top_logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    return Ask(
        model_id=model_id,
        messages=tuple(_for_template(message) for message in body.messages),
        choices=body.n,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        stops=tuple(body.stop or ()),
        # The engine counts seeds from 0; a negative one is as good as any other.
        seed=None if body.seed is None else body.seed % 2**64,
        sampling={name: value for name, value in given.items() if value is not None},
    )


class ChatDialect:
    """One chat completion on its way out."""

    content_type = CONTENT_TYPE

    def __init__(self, body: ChatBody, completion_id: str, created: int, *, heartbeat_as_delta: bool = False) -> None:
        """`created`: Unix time in seconds."""
        self.stream = body.stream
        self._usage_wanted = body.stream_options is not None and body.stream_options.include_usage
        self._logprobs_wanted = body.logprobs
        self._heartbeat_as_delta = heartbeat_as_delta
        self._begun: set[int] = set()
        """Answers whose first delta, the one with the role, is out."""
        self._head: dict[str, Any] = {"id": completion_id, "created": created, "model": body.model}

    # --- streamed -------------------------------------------------------------------------------

    def piece(self, piece: Piece, model: TextModel) -> bytes:
        logprobs = self._logprobs(piece.delta, model)
        if not piece.delta.text and logprobs is None:
            return b""
        return self._role(piece.index) + self._chunk(piece.index, {"content": piece.delta.text}, logprobs=logprobs)

    def ended(self, ended: Ended) -> bytes:
        return self._role(ended.index) + self._chunk(ended.index, {}, reason=ended.reason)

    def complete(self, usage: Usage) -> bytes:
        last = self._event({"choices": [], "usage": _usage(usage)}) if self._usage_wanted else b""
        return last + DONE

    def failed(self, error: MeshinferError) -> bytes:
        # No [DONE] after it: that word means that the answer is whole.
        return data_event(openai_body(error))

    def sign_of_life(self, waiting: Waiting | None) -> bytes:
        if self._heartbeat_as_delta:
            return self._role(0) or self._chunk(0, {})
        return comment(f"{waiting.phase} {waiting.done:.0%}" if waiting else "alive")

    # --- whole ----------------------------------------------------------------------------------

    def whole(self, choices: list[Choice], usage: Usage, model: TextModel) -> bytes:
        out: list[dict[str, Any]] = []
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": choice.text}
            entry: dict[str, Any] = {"index": index, "message": message, "finish_reason": choice.reason}
            logprobs = self._logprobs(choice.delta, model, empty=True)
            if logprobs is not None:
                entry["logprobs"] = logprobs
            out.append(entry)
        return to_json({**self._head, "object": "chat.completion", "choices": out, "usage": _usage(usage)})

    def error_body(self, error: MeshinferError) -> bytes:
        return to_json(openai_body(error))

    # --- parts ----------------------------------------------------------------------------------

    def _role(self, index: int) -> bytes:
        """The first delta of an answer; nothing later."""
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._chunk(index, {"role": "assistant", "content": ""})

    def _chunk(
        self, index: int, delta: dict[str, str], *, reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        # finish_reason is null until the end: OpenAI's own chunks have it so, and clients read it without a default.
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        # Where usage was asked for, OpenAI's chunks before the last say null.
        return self._event({"choices": [choice], **({"usage": None} if self._usage_wanted else {})})

    def _event(self, rest: dict[str, Any]) -> bytes:
        return data_event({**self._head, "object": "chat.completion.chunk", **rest})

    def _logprobs(self, delta: TextDelta, model: TextModel, *, empty: bool = False) -> dict[str, Any] | None:
        """The log-probabilities of a piece; None if not asked for, or if there are none (unless `empty`)."""
        if not self._logprobs_wanted or not (delta.tokens or empty):
            return None
        return {"content": [_token_logprob(token, model) for token in delta.tokens]}


def _token_logprob(token: Generated, model: TextModel) -> dict[str, Any]:
    entry = _logprob_entry(token.token_id, token.logprob if token.logprob is not None else LOWEST_LOGPROB, model)
    return {**entry, "top_logprobs": [_logprob_entry(token_id, value, model) for token_id, value in token.top_logprobs]}


def _logprob_entry(token_id: int, logprob: float, model: TextModel) -> dict[str, Any]:
    text, data = model.token_text(token_id)
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data) if data else None}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _without_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value


def _check_together(body: ChatBody) -> None:
    """What no field shows alone."""
    if body.top_logprobs is not None and not body.logprobs:
        raise BadParameter("top_logprobs", "'top_logprobs' without logprobs", expected="logprobs: true beside it")
    if body.stream_options is not None and not body.stream:
        raise BadParameter("stream_options", "'stream_options' without stream", expected="stream: true beside it")
    for index, message in enumerate(body.messages):
        if message.content is None and not (message.role == "assistant" and (message.tool_calls or message.refusal)):
            raise BadParameter(f"messages.{index}.content", f"message {index} has no content", expected="text")


def _logit_bias(biases: Mapping[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    if biases is None:
        return None
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise BadParameter("logit_bias", f"'logit_bias' has the key {key[:32]!r}", expected="token ids")
    return tuple((int(key), value) for key, value in biases.items())


def _for_template(message: _Message) -> dict[str, Any]:
    """A message as chat templates read it: `system` for developers too, arguments of calls as objects."""
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content if message.content is not None else message.refusal or "",
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return out


def _arguments(text: str) -> Any:
    """Templates print arguments as JSON themselves; text that is none stays as it is."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
