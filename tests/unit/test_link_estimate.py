"""Samples become estimates: one lie costs nothing, the truth needs two; and which path is taken."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.mesh.link_estimate import (
    DEGRADED_AFTER_SECONDS,
    DISAGREE,
    FAILURES_TO_LOSE,
    SWITCH_SHARE,
    WINDOW,
    Figure,
    Health,
    Path,
    best_path,
)

positive = st.floats(1e-6, 1e12, allow_nan=False)


def figure(*samples: float) -> Figure:
    made = Figure()
    for sample in samples:
        made.add(sample)
    return made


def path(rtt: float, rate: float = 0.0, failures: int = 0) -> Path:
    made = Path(failures=failures)
    made.rtt.add(rtt)
    made.bandwidth_out.add(rate)
    return made


@given(st.lists(positive, min_size=1, max_size=30))
def test_an_estimate_lies_among_its_last_samples(samples):
    made = figure(*samples)
    assert min(samples[-WINDOW:]) <= made.value <= max(samples[-WINDOW:])


@given(st.lists(st.floats(max_value=0, allow_nan=False), max_size=10), positive)
def test_what_is_not_positive_says_nothing(nothing, sample):
    assert figure(*nothing).value == 0
    assert figure(sample, *nothing).value == sample


@given(positive, st.lists(st.floats(0.95, 1.05), min_size=3, max_size=10), st.floats(1e-3, 1e3))
def test_one_sample_that_lies_costs_nothing(truth, noise, lie):
    made = figure(*(truth * off for off in noise), truth * lie)
    assert 0.9 * truth <= made.value <= 1.1 * truth


@given(
    st.lists(st.floats(0.95, 1.05), min_size=1, max_size=10),
    st.one_of(st.floats(1e-3, 0.5), st.floats(2, 1e3)),
    st.tuples(st.floats(0.95, 1.05), st.floats(0.95, 1.05)),
)
def test_two_that_agree_are_the_new_truth(before, step, after):
    made = figure(*before, *(step * off for off in after))
    assert 0.9 * step <= made.value <= 1.1 * step
    assert not made.in_doubt


@given(st.lists(st.floats(0.95, 1.05), min_size=1, max_size=4), st.floats(2, 1e3))
def test_a_sample_that_disagrees_leaves_a_doubt(before, step):
    assert not figure(*before).in_doubt
    assert figure(*before, step).in_doubt


@given(st.lists(positive, min_size=1, max_size=12), st.floats(1.0, 100.0))
def test_estimates_scale(samples, factor):
    scaled = figure(*(sample * factor for sample in samples)).value
    # Thresholds may fall the other way in the last bit; then the estimate is another sample's.
    assert min(samples) * factor * 0.999 <= scaled <= max(samples) * factor * 1.001


def test_the_median_of_what_is_steady():
    samples = [1.0, 1.1, 0.9, 1.2, 1.05, 0.95]
    assert figure(*samples).value == statistics.median(samples[-WINDOW:])
    assert max(samples) < DISAGREE


# --- paths --------------------------------------------------------------------------------------


def test_a_cable_beats_wifi_and_wifi_does_not_beat_itself():
    paths = {"wifi": path(4e-3, 20e6), "cable": path(0.3e-3, 110e6)}
    assert best_path(paths, "wifi") == "cable"
    assert best_path(paths, None) == "cable"
    assert best_path({"wifi": path(4e-3, 20e6), "wifi6": path(3.9e-3, 21e6)}, "wifi") == "wifi"


def test_a_path_that_does_not_answer_is_left():
    paths = {"cable": path(0.3e-3, 110e6, failures=FAILURES_TO_LOSE), "wifi": path(4e-3, 20e6)}
    assert best_path(paths, "cable") == "wifi"
    assert best_path({"cable": paths["cable"]}, "cable") is None
    assert best_path({}, None) is None


def test_one_failure_does_not_move_an_edge():
    paths = {"cable": path(0.3e-3, 110e6, failures=FAILURES_TO_LOSE - 1), "wifi": path(4e-3, 20e6)}
    assert best_path(paths, "cable") == "cable"


def test_before_any_bandwidth_is_known_latency_decides():
    assert best_path({"far": path(30e-3), "near": path(1e-3)}, None) == "near"


path_values = st.builds(
    path, st.floats(1e-5, 1.0), st.one_of(st.just(0.0), st.floats(1e4, 1e10)), st.integers(0, FAILURES_TO_LOSE)
)


@given(st.dictionaries(st.sampled_from("abcd"), path_values), st.one_of(st.none(), st.sampled_from("abcd")))
def test_a_choice_is_stable_works_and_does_not_depend_on_order(paths, present):
    chosen = best_path(paths, present)
    assert chosen is None or paths[chosen].works
    assert (chosen is None) == (not any(one.works for one in paths.values()))
    assert best_path(paths, chosen) == chosen
    assert best_path(dict(reversed(paths.items())), present) == chosen


@given(st.dictionaries(st.sampled_from("abcd"), path_values, min_size=2), st.sampled_from("abcd"))
def test_a_change_is_worth_a_fifth(paths, present):
    chosen = best_path(paths, present)
    held = paths.get(present)
    if chosen != present and held is not None and held.works and held.bandwidth_out.value:
        assert paths[chosen].message_seconds() < SWITCH_SHARE * held.message_seconds()


# --- health -------------------------------------------------------------------------------------


def test_a_link_that_stays_bad_is_degraded_and_recovers():
    health = Health()
    health.look(1e-3, 100e6, 0.0)
    health.look(1e-3, 40e6, 10.0)
    assert not health.is_degraded(10.0)
    assert not health.is_degraded(10.0 + DEGRADED_AFTER_SECONDS - 1)
    health.look(1e-3, 40e6, 10.0 + DEGRADED_AFTER_SECONDS)
    assert health.is_degraded(10.0 + DEGRADED_AFTER_SECONDS)
    health.look(1e-3, 90e6, 100.0)
    assert not health.is_degraded(1000.0)


def test_a_moment_or_a_busy_machine_is_no_degradation():
    health = Health()
    health.look(0.1e-3, 100e6, 0.0)
    health.look(1e-3, 60e6, 10.0)  # ten times the round trip, by less than a millisecond
    health.look(1e-3, 60e6, 1000.0)
    assert not health.is_degraded(1000.0)
    health.look(0, 0, 2000.0)  # nothing known: nothing said
    assert not health.is_degraded(3000.0)
