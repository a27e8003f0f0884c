"""Real runs refine the probe, within bounds, whatever they say."""

from __future__ import annotations

import math
from dataclasses import astuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.serving.calibration import (
    GREATEST_FACTOR,
    HALF_LIFE_SECONDS,
    KINDS_LIMIT,
    LEAST_STEPS,
    MOST_STEPS,
    Calibration,
)
from meshinfer.topology.speed import NodeSpeed

KIND = "q4g64"
any_float = st.floats(allow_nan=True, allow_infinity=True)
observations = st.lists(st.tuples(any_float, any_float, st.integers(-5, 10**6), st.floats(0, 1e6)), max_size=30)
speeds = st.builds(
    NodeSpeed,
    st.floats(1e-3, 1e18),
    st.floats(1e-3, 1e18),
    st.floats(0, 3600),
    st.floats(0, 3600),
    st.floats(0, 3600),
    st.floats(0, 1e18),
)


def after(*observed: tuple[float, float, int, float]) -> Calibration:
    calibration = Calibration()
    for predicted, measured, steps, now in observed:
        calibration.observe(KIND, predicted, measured, steps, now)
    return calibration


@given(observations)
def test_the_factor_stays_within_its_bounds(observed: list[tuple[float, float, int, float]]) -> None:
    factor = after(*observed).factor(KIND)
    assert 1 / GREATEST_FACTOR * (1 - 1e-9) <= factor <= GREATEST_FACTOR * (1 + 1e-9)


@given(observations, speeds)
def test_what_is_published_is_a_speed(observed: list[tuple[float, float, int, float]], speed: NodeSpeed) -> None:
    """One that a card may carry: positive, finite, within the wire's bounds."""
    applied = after(*observed).applied(KIND, speed)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(applied), type=NodeSpeed) == applied
    assert all(math.isfinite(number) for number in astuple(applied))


@given(st.floats(1 / GREATEST_FACTOR, GREATEST_FACTOR), st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_runs_that_agree_are_believed(ratio: float, steps: list[int]) -> None:
    calibration = after(*((0.01, 0.01 * ratio, count, float(index)) for index, count in enumerate(steps)))
    expected = ratio if sum(steps) >= LEAST_STEPS else 1.0
    assert calibration.factor(KIND) == pytest.approx(expected)


@given(observations, observations, st.floats(1.01, 10))
def test_slower_runs_never_make_a_node_look_faster(before, later, slower: float) -> None:
    fast = after(*before, (1.0, 1.0, 100, 1e6), *later).factor(KIND)
    slow = after(*before, (1.0, slower, 100, 1e6), *later).factor(KIND)
    assert slow >= fast * (1 - 1e-9)


@given(observations)
def test_kinds_do_not_mix(observed: list[tuple[float, float, int, float]]) -> None:
    assert after(*observed).factor("float32") == 1.0


def test_a_few_steps_change_nothing() -> None:
    assert after((1.0, 3.0, LEAST_STEPS - 1, 0.0)).factor(KIND) == 1.0


def test_new_runs_count_the_more_the_older_the_last_ones_are() -> None:
    past = (1.0, 2.0, 200, 0.0)
    soon = after(past, (1.0, 1.0, 200, 1.0)).factor(KIND)
    late = after(past, (1.0, 1.0, 200, 3 * HALF_LIFE_SECONDS)).factor(KIND)
    assert late < soon
    assert soon == pytest.approx(math.sqrt(2), rel=0.01)


def test_a_long_past_does_not_hold_the_factor_for_ever() -> None:
    """A year of steps weighs no more than MOST_STEPS: as many new ones move it half-way."""
    steps = int(MOST_STEPS)
    factor = after((1.0, 1.0, 10**9, 0.0), (1.0, 4.0, steps, 0.0)).factor(KIND)
    assert factor == pytest.approx(2.0, rel=0.01)


def test_rest_says_nothing() -> None:
    calibration = after((1.0, 2.0, 100, 0.0))
    assert calibration.factor(KIND) == pytest.approx(2.0)
    calibration.observe(KIND, 1.0, 0.0, 0, 1e6)
    assert calibration.factor(KIND) == pytest.approx(2.0)


def test_a_new_probe_starts_anew() -> None:
    calibration = after((1.0, 2.0, 100, 0.0))
    calibration.forget(KIND)
    assert calibration.factor(KIND) == 1.0


def test_the_kinds_are_bounded() -> None:
    calibration = Calibration()
    for index in range(3 * KINDS_LIMIT):
        calibration.observe(f"kind {index}", 1.0, 2.0, 100, float(index))
    assert sum(calibration.factor(f"kind {index}") != 1.0 for index in range(3 * KINDS_LIMIT)) == KINDS_LIMIT
    assert calibration.factor(f"kind {3 * KINDS_LIMIT - 1}") == pytest.approx(2.0)
