"""The head waits long enough for slow pipelines, and not for stopped ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.pipeline.patience import FIRST_SECONDS, FLOOR_SECONDS, Patience

STAGE_SECONDS = st.lists(st.floats(0.001, 10), min_size=1, max_size=8)


@given(STAGE_SECONDS, st.booleans(), st.integers(1, 2048))
def test_an_even_pace_is_never_too_slow(stages: list[float], streaming: bool, chunk: int):
    patience = Patience(len(stages))
    alone, behind_others = chunk * sum(stages), chunk * max(stages)
    for number in range(30):
        was_idle = number == 0 or not streaming
        seconds = alone if was_idle else behind_others
        if number > 3:
            assert seconds <= patience.allowance(chunk)
        patience.observe(chunk, seconds, was_idle=was_idle)
    # After any mixture, neither a first chunk nor a following one is taken for lost.
    assert alone <= patience.allowance(chunk)
    assert behind_others <= patience.allowance(chunk)


@given(STAGE_SECONDS)
def test_a_decode_step_behind_a_chunk_does_not_spoil_the_mean(stages: list[float]):
    patience = Patience(len(stages))
    for _ in range(5):
        patience.observe(0, sum(stages), was_idle=True)
        patience.observe(0, min(stages), was_idle=False)
    assert sum(stages) <= patience.allowance(0) <= max(FLOOR_SECONDS, 5 * sum(stages) + 1e-6)


def test_fast_steps_are_waited_for_two_seconds_and_first_ones_longer():
    patience = Patience(3)
    assert patience.allowance(0) == FIRST_SECONDS
    assert patience.allowance(512) > 200
    for _ in range(3):
        patience.observe(0, 0.002, was_idle=True)
    assert patience.allowance(0) == FLOOR_SECONDS
    for _ in range(50):
        patience.observe(0, 3.0, was_idle=True)
    assert 14 < patience.allowance(0) <= 15
