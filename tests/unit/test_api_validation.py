"""What is wrong with a client's input is said as in all our errors, whatever it sent, and a prompt is not repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.api.control import _parse_wish, _Wish
from meshinfer.api.errors import BadParameter
from meshinfer.api.openai_chat import ChatBody, parse_chat

CHAT: dict[str, Any] = {"model": "fake/tiny", "messages": [{"role": "user", "content": "hi"}]}
WISH: dict[str, Any] = {"model_id": "fake/tiny"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"context": "many"}, "'context' is 'many'; expected a whole number"),
        ({"context": 1.5}, "'context' is 1.5; expected a whole number"),
        ({"concurrency": "0"}, "'concurrency' is '0'; expected at least 1"),
        ({"objective": "speed"}, "'objective' is 'speed'; expected 'latency', 'throughput' or 'fit'"),
        ({"nodes": ["a"] * 300}, "'nodes' has 300 entries; expected at most 256"),
        ({"model_id": None}, "'model_id' is missing. Add it."),
        ({"colour": "red"}, "unknown parameter 'colour'. Leave it out."),
    ],
)
def test_a_wish_that_cannot_be(wish: dict[str, Any], said: str):
    with pytest.raises(BadParameter) as refused:
        _parse_wish({**WISH, **wish})
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 11}, "'temperature' is 11; expected at most 10"),
        ({"stream": "yes"}, "'stream' is 'yes'; expected true or false"),
        ({"stop": [""]}, "'stop.0' has 0 characters; expected at least 1"),
        ({"logit_bias": [1]}, "'logit_bias' is a list of 1 entry; expected an object"),
        ({"messages": "x" * 99}, "'messages' is a text of 99 characters; expected a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "'messages.0.content' has part 0 of type 'image_url'; expected text parts, and no others"),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be(change: dict[str, Any], said: str):
    with pytest.raises(BadParameter) as refused:
        parse_chat({**CHAT, **change})
    assert str(refused.value) == said


def refusal(read: Callable[[dict[str, Any]], object], body: dict[str, Any]) -> BadParameter | None:
    try:
        read(body)
    except BadParameter as refused:
        return refused
    return None


@given(name=st.sampled_from(sorted(ChatBody.model_fields)), value=VALUES)
def test_whatever_is_wrong_with_a_chat_has_an_expectation(name: str, value: Any):
    refused = refusal(parse_chat, {**CHAT, name: value})
    assert refused is None or refused.expected or refused.do


@given(name=st.sampled_from(sorted(_Wish.model_fields)), value=VALUES)
def test_whatever_is_wrong_with_a_wish_has_an_expectation(name: str, value: Any):
    refused = refusal(_parse_wish, {**WISH, name: value})
    assert refused is None or refused.expected or refused.do
