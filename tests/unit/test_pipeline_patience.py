"""The head waits long enough for slow pipelines, and not for stopped ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.pipeline.patience import FIRST_FLOOR_SECONDS, FLOOR_SECONDS, UNKNOWN_SECONDS, Patience

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


def test_the_very_first_step_is_waited_for_by_the_pace_of_the_head_s_own_stage():
    patience = Patience(3)
    patience.expect(0.007)  # ten layers of the small model on a core
    assert UNKNOWN_SECONDS + 512 * 0.007 * 3 < patience.allowance(512) < 60
    slow = Patience(3)
    slow.expect(0.042)  # MLX's own BLAS: 8 tokens a second through all layers
    assert slow.allowance(512) > 512 * 0.042 * 3 * 2


def test_after_one_chunk_a_first_token_is_waited_for_five_seconds_or_ten_times_as_long_as_the_chunk():
    patience = Patience(3)
    patience.observe(512, 0.3, was_idle=True)
    assert patience.allowance(0) == FIRST_FLOOR_SECONDS
    assert patience.allowance(512) == FIRST_FLOOR_SECONDS
    patience.observe(512, 1.0, was_idle=False)  # behind another: of the slowest stage
    assert 29 < patience.allowance(0) <= 30


def test_fast_steps_are_waited_for_two_seconds_and_first_ones_longer():
    patience = Patience(3)
    assert patience.allowance(0) == UNKNOWN_SECONDS
    patience.observe(0, 0.002, was_idle=True)
    assert patience.allowance(0) == FIRST_FLOOR_SECONDS
    for _ in range(2):
        patience.observe(0, 0.002, was_idle=True)
    assert patience.allowance(0) == FLOOR_SECONDS
    for _ in range(50):
        patience.observe(0, 3.0, was_idle=True)
    assert 14 < patience.allowance(0) <= 15
