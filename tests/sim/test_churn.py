"""The figures that are published come from code that is itself right: short runs of each."""

import math

from meshinfer.testing import churn


def test_clients_get_right_answers_while_nodes_come_and_go() -> None:
    quiet = churn.goodput(math.inf, 1, seconds=5.0)
    churned = churn.goodput(20.0, 1, seconds=20.0)
    assert quiet.answers > 0
    assert quiet.errors == {}
    assert churned.deaths > 0
    assert churned.answers > 0
    assert quiet.wrong == churned.wrong == 0
    assert quiet.violations == churned.violations == []


def test_a_failure_beside_an_answer_is_not_felt_on_other_nodes() -> None:
    assert max(churn.gaps(1, failure=True)) <= max(churn.gaps(1, failure=False)) + 0.001
