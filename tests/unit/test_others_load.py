"""What others use of the CPU is what is used, less what this agent and its runners use."""

from dataclasses import replace

import pytest

from meshinfer.serving.others_load import CpuSeconds, OthersLoad, others_share, read_cpu_seconds

START = CpuSeconds(all=100.0, own=10.0, possible=1000.0)


@pytest.mark.parametrize(
    ("now", "share"),
    [
        (CpuSeconds(100.0, 10.0, 1020.0), 0.0),
        (CpuSeconds(110.0, 10.0, 1020.0), 0.5),
        (CpuSeconds(120.0, 20.0, 1020.0), 0.5),  # a runner at work is not others
        (CpuSeconds(110.0, 20.5, 1020.0), 0.0),  # clocks that are read one after the other
        (CpuSeconds(110.0, 15.0, 1020.0, frozenset({7, 8})), 0.25),  # a runner more
    ],
)
def test_the_share_of_others(now: CpuSeconds, share: float):
    assert others_share(START, now) == pytest.approx(share)


def test_a_look_says_nothing_when_a_runner_has_ended_or_no_time_has_gone_by():
    """Some systems count what it used nowhere then."""
    assert (
        others_share(replace(START, children=frozenset({7, 8})), CpuSeconds(130.0, 5.0, 1020.0, frozenset({8}))) is None
    )
    assert others_share(START, START) is None


def test_this_system_counts():
    before = read_cpu_seconds()
    sum(range(10**6))
    now = read_cpu_seconds()
    assert 0 <= before.own <= now.own
    assert before.own < before.all < before.possible
    assert 0 <= OthersLoad().look() <= 1
