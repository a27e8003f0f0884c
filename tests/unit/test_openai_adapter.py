"""OpenAI's chat completions, exactly: what is read, what is refused, what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshinfer.api.dialect import Choice, Ended, Piece, Usage
from meshinfer.api.errors import BadParameter, UnsupportedParameter
from meshinfer.api.openai_chat import IGNORED, NOT_SERVED, ChatBody, ChatDialect, parse_chat, to_ask
from meshinfer.base.errors import NoRoom, UnknownModel
from meshinfer.serving.requests import Generated, Waiting
from meshinfer.serving.text import TextModel
from meshinfer.serving.text_answer import TextDelta
from meshinfer.testing.text import tiny_tokenizer

BASE: dict[str, Any] = {"model": "fake/tiny", "messages": [{"role": "user", "content": "hi"}]}
MODEL = TextModel(tiny_tokenizer(), None, {}, (), None, "secret")


def _messages(*messages: dict[str, Any]) -> tuple[Any, ...]:
    return to_ask(parse_chat({"model": "m", "messages": list(messages)})).messages


# --- reading ------------------------------------------------------------------------------------


def test_the_least_that_can_be_asked():
    ask = to_ask(parse_chat(BASE))
    assert (ask.model_id, ask.messages) == ("fake/tiny", ({"role": "user", "content": "hi"},))
    assert (ask.choices, ask.max_new_tokens, ask.stops, ask.seed, dict(ask.sampling)) == (1, None, (), None, {})


def test_null_is_absent_for_every_optional_field():
    every = dict.fromkeys({*ChatBody.model_fields, *IGNORED, *NOT_SERVED} - {"model", "messages"})
    message = {"role": "user", "content": "hi", "name": None, "tool_calls": None, "tool_call_id": None, "refusal": None}
    nulls = {**BASE, **every, "messages": [message]}
    assert to_ask(parse_chat(nulls)) == to_ask(parse_chat(BASE))
    usage = parse_chat({**BASE, "stream": True, "stream_options": {"include_usage": None}})
    assert usage.stream_options is not None
    assert not usage.stream_options.include_usage


def test_every_field_arrives():
    ask = to_ask(
        parse_chat(
            {
                **BASE,
                "temperature": 0,
                "top_p": 0.5,
                "top_k": 7,
                "min_p": 0.1,
                "seed": -1,
                "n": 3,
                "stop": "END",
                "presence_penalty": 1,
                "frequency_penalty": -2,
                "repetition_penalty": 1.1,
                "logit_bias": {"5": -100},
                "logprobs": True,
                "top_logprobs": 4,
                "max_tokens": 5,
                "max_completion_tokens": 6,
            }
        )
    )
    assert dict(ask.sampling) == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "top_logprobs": 4,
        "presence_penalty": 1,
        "frequency_penalty": -2,
        "repetition_penalty": 1.1,
        "logit_bias": ((5, -100),),
    }
    # Of the two names for one thing the newer wins; any 64 bits are a seed.
    assert (ask.max_new_tokens, ask.seed, ask.choices, ask.stops) == (6, 2**64 - 1, 3, ("END",))


def test_top_p_of_zero_is_not_taken_for_off():
    assert 0 < to_ask(parse_chat({**BASE, "top_p": 0})).sampling["top_p"] < 1e-3


def test_logprobs_without_a_number_are_of_the_chosen_tokens():
    assert to_ask(parse_chat({**BASE, "logprobs": True})).sampling["top_logprobs"] == 0
    assert "top_logprobs" not in to_ask(parse_chat({**BASE, "logprobs": False})).sampling


def test_parameters_without_effect_pass():
    harmless = {name: values[0] for name, values in NOT_SERVED.items() if values}
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": False}
    assert to_ask(parse_chat({**BASE, **harmless, **ignored})) == to_ask(parse_chat(BASE))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages.0.colour"),
    ],
)
def test_what_is_not_served_is_refused_by_name(wrong: dict[str, Any], param: str):
    with pytest.raises(UnsupportedParameter, match=param.rsplit(".", maxsplit=1)[-1]) as caught:
        parse_chat({**BASE, **wrong})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
        ({"messages": [5]}, "messages.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"5": 200}}, "logit_bias.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], param: str):
    with pytest.raises(BadParameter) as caught:
        to_ask(parse_chat({**BASE, **wrong}))
    assert caught.value.param == param


def test_an_image_is_refused_with_its_place():
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(BadParameter, match=r"part 1 of type 'image_url'"):
        _messages({"role": "user", "content": parts})


def test_a_name_that_no_model_can_have_is_an_unknown_model():
    with pytest.raises(UnknownModel):
        to_ask(parse_chat({**BASE, "model": "../etc/passwd"}))


def test_messages_as_templates_read_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}}
    developer, user, assistant, tool, refused = _messages(
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "annotations": []},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "assistant", "refusal": "no", "content": None},
    )
    assert developer == {"role": "system", "content": "be kind"}
    assert user == {"role": "user", "content": "ab", "name": "ann"}
    arguments = [entry["function"]["arguments"] for entry in assistant["tool_calls"]]
    assert (assistant["content"], arguments) == ("", [{"a": 1}, "{"])
    assert tool == {"role": "tool", "content": "5", "tool_call_id": "1"}
    assert refused == {"role": "assistant", "content": "no"}


# --- writing ------------------------------------------------------------------------------------


def _dialect(**fields: Any) -> ChatDialect:
    as_delta = fields.pop("as_delta", False)
    return ChatDialect(parse_chat({**BASE, **fields}), "chatcmpl-1", 1700000000, heartbeat_as_delta=as_delta)


def _events(data: bytes) -> list[dict[str, Any]]:
    """Each chunk of a stream, which must be well-formed."""
    events: list[dict[str, Any]] = []
    for block in data.decode().split("\n\n"):
        if block and block != "data: [DONE]":
            assert block.startswith("data: ")
            assert "\n" not in block
            events.append(json.loads(block.removeprefix("data: ")))
    return events


HEAD = {"id": "chatcmpl-1", "created": 1700000000, "model": "fake/tiny", "object": "chat.completion.chunk"}


def test_a_stream_word_by_word():
    dialect = _dialect(stream=True)
    first = _events(dialect.piece(Piece(0, TextDelta("hel")), MODEL))
    assert first == [
        {**HEAD, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {**HEAD, "choices": [{"index": 0, "delta": {"content": "hel"}, "finish_reason": None}]},
    ]
    second = _events(dialect.piece(Piece(0, TextDelta("lo")), MODEL))
    assert second == [{**HEAD, "choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None}]}]
    end = _events(dialect.ended(Ended(0, "stop", "END")))
    assert end == [{**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    assert dialect.complete(Usage(3, 2)) == b"data: [DONE]\n\n"


def test_an_empty_answer_has_its_role_and_its_end():
    roles = [event["choices"][0]["delta"] for event in _events(_dialect(stream=True).ended(Ended(0, "length", None)))]
    assert roles == [{"role": "assistant", "content": ""}, {}]


def test_tokens_without_text_say_nothing():
    assert _dialect(stream=True).piece(Piece(0, TextDelta("", (Generated(0, 1),))), MODEL) == b""


def test_usage_comes_where_it_is_asked_for():
    dialect = _dialect(stream=True, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in _events(dialect.piece(Piece(0, TextDelta("a")), MODEL)))
    (last,) = _events(dialect.complete(Usage(3, 2)))
    assert last == {**HEAD, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


def test_each_choice_has_its_own_role():
    dialect = _dialect(stream=True, n=2)
    data = dialect.piece(Piece(1, TextDelta("b")), MODEL) + dialect.piece(Piece(0, TextDelta("a")), MODEL)
    roles = [event["choices"][0]["index"] for event in _events(data) if "role" in event["choices"][0]["delta"]]
    assert roles == [1, 0]


def test_log_probabilities_are_the_same_streamed_or_whole():
    ids = tiny_tokenizer().encode("a😀").ids
    tokens = tuple(Generated(i, token_id, -0.5, ((ids[0], -0.5), (1, float("-inf")))) for i, token_id in enumerate(ids))
    dialect = _dialect(stream=True, logprobs=True, top_logprobs=2)
    data = dialect.piece(Piece(0, TextDelta("a", tokens[:1])), MODEL)
    data += dialect.piece(Piece(0, TextDelta("😀", tokens[1:])), MODEL)
    streamed = [
        entry for event in _events(data) for entry in event["choices"][0].get("logprobs", {"content": []})["content"]
    ]
    whole = _dialect(logprobs=True, top_logprobs=2).whole(
        [Choice("a😀", TextDelta("a😀", tokens), "stop", None)], Usage(1, 5), MODEL
    )
    assert streamed == json.loads(whole)["choices"][0]["logprobs"]["content"]
    assert streamed[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": '"', "logprob": -9999.0, "bytes": [34]},
        ],
    }
    assert [byte for entry in streamed[1:] for byte in entry["bytes"]] == list("😀".encode())


def test_a_whole_answer():
    body = json.loads(_dialect().whole([Choice("hi", TextDelta("hi"), "length", None)], Usage(3, 2), MODEL))
    assert body == {
        **HEAD,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_a_failed_stream_does_not_say_done():
    (event,) = _events(_dialect(stream=True).failed(NoRoom("the mesh is full", do="wait")))
    assert event == {
        "error": {"message": "the mesh is full. Wait.", "type": "server_error", "param": None, "code": "no_room"}
    }


def test_signs_of_life_are_comments_of_one_line():
    assert _dialect(stream=True).sign_of_life(Waiting("loading", 0.4)) == b": loading 40%\n"
    assert _dialect(stream=True).sign_of_life(None) == b": alive\n"


def test_signs_of_life_can_be_deltas():
    dialect = _dialect(stream=True, as_delta=True)
    first, second = _events(dialect.sign_of_life(None)), _events(dialect.sign_of_life(None))
    assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second[0]["choices"][0]["delta"] == {}
    # The role was in the first one.
    assert len(_events(dialect.piece(Piece(0, TextDelta("a")), MODEL))) == 1


def test_a_model_may_be_asked_for_by_its_short_name():
    body = parse_chat({**BASE, "model": "qwen3-0.6b"})

    assert to_ask(body).model_id == "mlx-community/Qwen3-0.6B-4bit"
