"""The last stage decides tokens and ends, and one session's trouble stays its own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from meshinfer.base.errors import ProtocolError
from meshinfer.base.ids import SessionId
from meshinfer.pipeline.tail import Tail
from meshinfer.wire.records import RunnerRecord, Sampling, SessionFailed, Token
from meshinfer.wire.steps import SampledToken, SessionStart, StepControl

VOCABULARY = 10


def start(number: int, **changed: Any) -> SessionStart:
    fields: dict[str, Any] = {
        "number": number,
        "session_id": SessionId(f"{number:032x}"),
        "origin": f"origin {number}",
        "prompt_tokens": 3,
        "emitted": 0,
        "max_new_tokens": 3,
        "stop_token_ids": (9,),
        "sampling": Sampling(seed=1, temperature=0),
    } | changed
    return SessionStart(**fields)


class Origins:
    """Who listens, and what they heard."""

    def __init__(self) -> None:
        self.heard: dict[str, list[RunnerRecord]] = {}
        self.gone: set[str] = set()

    def send(self, origin: str, record: RunnerRecord) -> bool:
        if origin in self.gone:
            return False
        self.heard.setdefault(origin, []).append(record)
        return True


@pytest.fixture
def origins() -> Origins:
    return Origins()


@pytest.fixture
def tail(origins: Origins) -> Tail:
    return Tail(origins.send, VOCABULARY, max_sessions=3)


def sampling(*numbers: int, **changed: Any) -> StepControl:
    return StepControl(cache=1, rows=tuple((number, 2, 1) for number in numbers), samples=True, **changed)


def logits(*likeliest: int) -> mx.array:
    rows = mx.zeros((len(likeliest), VOCABULARY))
    for row, token in enumerate(likeliest):
        rows[row, token] = 5.0
    return rows


def test_lengths_and_stop_tokens_end_sessions(tail: Tail, origins: Origins):
    begin = sampling(1, 2, started=(start(1, max_new_tokens=2), start(2)))
    answer = tail.finish_step(begin, [[1], [1]], logits(4, 5))
    assert answer.tokens == (SampledToken(1, 4), SampledToken(2, 5))
    answer = tail.finish_step(sampling(1, 2), [[4], [5]], logits(4, 9))
    assert answer.tokens == (SampledToken(1, 4, "length"), SampledToken(2, 9, "stop"))
    assert tail.sessions == 0
    assert [(t.index, t.finish) for t in origins.heard["origin 1"] if isinstance(t, Token)] == [(0, ""), (1, "length")]


def test_logits_that_are_not_numbers_fail_their_session_only(tail: Tail, origins: Origins):
    broken = logits(4, 5, 6)
    broken[1, 0] = float("nan")
    answer = tail.finish_step(sampling(1, 2, 3, started=(start(1), start(2), start(3))), [[1]] * 3, broken)
    assert answer.tokens == (SampledToken(1, 4), SampledToken(2, 0, "failed"), SampledToken(3, 6))
    assert isinstance(origins.heard["origin 2"][0], SessionFailed)
    assert tail.sessions == 2


def test_an_origin_without_a_channel_ends_its_session_only(tail: Tail, origins: Origins):
    origins.gone.add("origin 2")
    answer = tail.finish_step(sampling(1, 2, started=(start(1), start(2))), [[1], [1]], logits(4, 5))
    assert answer.tokens == (SampledToken(1, 4), SampledToken(2, 5, "origin_lost"))
    assert tail.sessions == 1


def test_penalties_see_the_prompt_and_what_followed(tail: Tail):
    repeating = Sampling(seed=0, temperature=0, repetition_penalty=5.0)
    chunk = StepControl(cache=1, rows=((1, 0, 2),), started=(start(1, sampling=repeating),))
    assert tail.finish_step(chunk, [[4, 5, 0]], None).tokens == ()
    found = mx.array([[0, 0, 0, 3.0, 5.0, 5.0, 0, 0, 0, 0]])
    assert tail.finish_step(sampling(1), [[6]], found).tokens[0].token_id == 3
    found = mx.array([[0, 0, 0, 3.0, 5.0, 5.0, 0, 2.0, 0, 0]])
    assert tail.finish_step(sampling(1), [[3]], found).tokens[0].token_id == 7


@pytest.mark.parametrize(
    "control",
    [
        sampling(7),
        sampling(1, started=(start(1), start(1))),
        sampling(1, started=tuple(start(number) for number in (1, 2, 3, 4))),
        sampling(1, started=(start(1, sampling=Sampling(0, logit_bias=((VOCABULARY, 1.0),))),)),
        sampling(1, started=(start(1, emitted=4),)),
    ],
    ids=["unknown", "twice", "too many", "bias", "emitted"],
)
def test_a_head_that_is_wrong_is_not_followed(tail: Tail, control: StepControl):
    with pytest.raises(ProtocolError):
        tail.finish_step(control, [[1]], logits(1))


def test_ended_sessions_make_room_for_those_that_start(tail: Tail):
    tail.finish_step(StepControl(started=(start(1), start(2), start(3))), [], None)
    tail.finish_step(StepControl(started=(start(4), start(5)), ended=(1, 3)), [], None)
    assert tail.sessions == 3
