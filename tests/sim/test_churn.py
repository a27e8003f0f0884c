"""The figures that are published come from code that is itself right: short runs of each."""

import math

from meshinfer.testing import churn


def test_an_answer_comes_to_its_end_while_stages_fail_where_starting_over_takes_longer() -> None:
    quiet = churn.steps_per_second(0.0, 64, 1, resume=True)
    resumed = churn.steps_per_second(0.01, 64, 1, resume=True)
    restarted = churn.steps_per_second(0.01, 64, 1, resume=False)
    assert quiet.failures == 0
    assert resumed.failures > 0
    assert all(pace.finished and pace.correct for pace in (quiet, resumed, restarted))
    assert quiet.steps_per_second > resumed.steps_per_second > restarted.steps_per_second


def test_clients_get_right_answers_while_nodes_come_and_go() -> None:
    quiet = churn.goodput(math.inf, 1, seconds=5.0)
    churned = churn.goodput(20.0, 1, seconds=20.0)
    assert quiet.answers > 0
    assert quiet.errors == {}
    assert churned.deaths > 0
    assert churned.answers > 0
    assert quiet.wrong == churned.wrong == 0


def test_a_failure_beside_an_answer_is_not_felt_on_other_nodes() -> None:
    assert max(churn.gaps(1, failure=True)) <= max(churn.gaps(1, failure=False)) + 0.001
