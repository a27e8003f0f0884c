"""The real small model, whole and in two and three stages: the same tokens, and a right answer."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_tokenizer

from meshinfer.base.ids import ModelId
from meshinfer.engine.describe import describe_model
from meshinfer.engine.loader import load_seat
from meshinfer.engine.sampling import Draw, draw_tokens
from meshinfer.wire.records import Sampling

QUESTION = "What is the capital of France?"
NEW_TOKENS = 12
GREEDY = Sampling(seed=0, temperature=0.0)


@functools.cache
def prompt_ids(directory: Path) -> tuple[int, ...]:
    messages = [{"role": "user", "content": QUESTION}]
    return tuple(load_tokenizer(directory).apply_chat_template(messages, add_generation_prompt=True))


def greedy(directory: Path, cuts: tuple[int, ...]) -> list[int]:
    """Prefill in one chunk, then one token after another, through stages in this process."""
    stages = [load_seat(directory, a, b, computes_float32=True).stage for a, b in pairwise((0, *cuts, 30))]
    caches = [stage.make_cache() for stage in stages]
    emitted: list[int] = []
    step = list(prompt_ids(directory))
    while len(emitted) < NEW_TOKENS and emitted[-1:] != [2]:
        tokens, carried = mx.array([step]), None
        for stage, cache in zip(stages, caches, strict=True):
            carried = stage(tokens, carried, cache)
            wanted = carried[:, -1] if stage.is_last else carried
            mx.eval(wanted, stage.state_arrays(cache))
        (drawn,) = draw_tokens(carried[:, -1], [Draw(GREEDY, len(emitted))])
        emitted.append(drawn.token_id)
        step = [drawn.token_id]
    return emitted


@pytest.fixture(scope="module")
def whole(smollm2: Path) -> list[int]:
    return greedy(smollm2, ())


def test_the_answer_is_right(smollm2: Path, whole: list[int]) -> None:
    assert "Paris" in load_tokenizer(smollm2).decode(whole)


@pytest.mark.parametrize("cuts", [(15,), (7, 21)], ids=["two stages", "three stages"])
def test_stages_give_the_same_tokens(smollm2: Path, whole: list[int], cuts: tuple[int, ...]) -> None:
    assert greedy(smollm2, cuts) == whole


def test_a_middle_seat_holds_its_layers_only(smollm2: Path) -> None:
    card = describe_model(smollm2, ModelId("smollm2-135m"))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    seat = load_seat(smollm2, 10, 20, computes_float32=True)
    assert seat.weight_bytes == card.weight_bytes(10, 20, True)
    assert mx.get_active_memory() - before < seat.weight_bytes * 1.01
    assert seat.weight_bytes < card.weight_bytes(0, 30, True) / 4
    # Loading is layer by layer: never much more than what stays.
    assert mx.get_peak_memory() - before < seat.weight_bytes * 1.2
