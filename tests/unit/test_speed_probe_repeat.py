"""Repeating a measurement: never beyond its time, at least once, no longer than it takes to be steady."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.engine.repeat import LEAST_RUNS, MOST_RUNS, STEADY_SPREAD, Times, repeat

durations = st.lists(st.integers(1, 10_000).map(float), min_size=1, max_size=40)
"""Whole seconds: their sums are exact."""


class Machine:
    """Runs that take as long as it says, on a clock of its own."""

    def __init__(self, durations: list[float]) -> None:
        self.durations = durations
        self.time = 0.0
        self.runs = 0

    def run(self) -> None:
        self.time += self.durations[self.runs % len(self.durations)]
        self.runs += 1

    def now(self) -> float:
        return self.time


def repeated(machine: Machine, allowed: float) -> Times:
    return repeat(machine.run, allowed, now=machine.now, timer=machine.now)


@given(durations, st.integers(0, 20_000))
def test_its_time_is_kept_but_for_one_run(durations: list[float], allowed: float) -> None:
    machine = Machine(durations)
    times = repeated(machine, allowed)
    assert machine.runs >= 1
    assert machine.time <= max(allowed, 0) + max(durations)
    assert min(durations) <= times.median <= max(durations)
    assert times.count <= MOST_RUNS
    assert 0 <= times.spread <= 1 or times.count >= LEAST_RUNS


@given(st.integers(1, 10_000), st.integers(0, 20_000))
def test_equal_runs_never_exceed_their_time(duration: float, allowed: float) -> None:
    machine = Machine([duration])
    repeated(machine, allowed)
    assert machine.runs == 1 or machine.time <= allowed


def test_a_steady_machine_is_believed_at_once() -> None:
    machine = Machine([5.0, *[1.0] * 30])
    times = repeated(machine, 1000)
    assert times == Times(1.0, 0.0, LEAST_RUNS)
    assert machine.runs == LEAST_RUNS + 1, "the first run warms up and does not count"


def test_an_unsteady_one_is_asked_often_and_its_spread_told() -> None:
    machine = Machine([1.0, 3.0])
    times = repeated(machine, 1000)
    assert times.count == MOST_RUNS
    assert times.spread > STEADY_SPREAD


def test_few_runs_say_nothing_of_the_spread() -> None:
    assert repeated(Machine([1.0]), 0.5) == Times(1.0, 1.0, 1)
    assert repeated(Machine([1.0]), 2.5).spread == 1.0


@given(st.lists(st.floats(1e-6, 100), min_size=LEAST_RUNS, max_size=30), st.randoms())
def test_order_does_not_matter(seconds: list[float], random) -> None:
    shuffled = list(seconds)
    random.shuffle(shuffled)
    assert Times.of(shuffled) == Times.of(seconds)
