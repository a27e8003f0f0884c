"""The figure of failure rates says what it claims: short answers of it."""

from dataclasses import replace
from itertools import islice, takewhile

from meshinfer.testing import failing_stages
from meshinfer.testing.failing_stages import STAGES, Cell, Pace, deaths, play


def test_an_answer_comes_to_its_end_while_stages_fail_where_starting_over_takes_longer() -> None:
    quiet = play(0.0, 64, 1, resume=True)
    resumed = play(0.01, 64, 1, resume=True)
    restarted = play(0.01, 64, 1, resume=False)
    assert quiet.failures == 0
    assert resumed.failures > 0
    assert restarted.attempts > resumed.attempts == 1
    assert all(pace.finished and pace.correct for pace in (quiet, resumed, restarted))
    assert quiet.steps_per_second > resumed.steps_per_second > restarted.steps_per_second


def test_an_answer_whose_first_death_comes_after_its_end_goes_as_without_failures_on_both_sides() -> None:
    seed = next(seed for seed in range(1000) if next(deaths(1e-3, 16, seed)) == STAGES * 16 + 1)
    quiet = play(0.0, 16, seed, resume=True)
    assert play(1e-3, 16, seed, resume=True) == play(1e-3, 16, seed, resume=False) == quiet


def test_a_death_after_the_very_last_step_takes_the_last_token_with_it() -> None:
    seed = next(seed for seed in range(10_000) if next(deaths(1e-3, 16, seed)) == STAGES * 16)
    pace = play(1e-3, 16, seed, resume=True)
    assert (pace.failures, pace.finished, pace.correct) == (1, True, True)
    assert pace.seconds > play(0.0, 16, seed, resume=True).seconds


def test_stages_die_as_often_as_the_rate_says() -> None:
    assert not list(deaths(0.0, 128, 0))
    steps = 1_000_000
    met = list(takewhile(lambda step: step <= steps, deaths(1e-3, 128, 0)))
    assert met == sorted(set(met))
    assert abs(len(met) - 1000) < 150  # five standard deviations; seeded


def test_an_answer_that_is_given_up_costs_its_time_and_brings_nothing() -> None:
    done = Pace(tokens=100, seconds=10.0, failures=1, attempts=1, finished=True, correct=True)
    cell = Cell((done, replace(done, seconds=40.0, finished=False)))
    assert cell.useful_steps_per_second == 2.0
    assert (cell.finished, cell.failures, cell.attempts) == (1, 2, 2)


def test_a_cell_has_as_many_answers_as_bring_enough_failures() -> None:
    for tokens in failing_stages.LENGTHS:
        for rate in failing_stages.RATES[1:]:
            dying = [deaths(rate, tokens, seed) for seed in range(failing_stages.answers(rate, tokens))]
            met = sum(step <= STAGES * tokens for each in dying for step in islice(each, STAGES * tokens))
            assert met >= failing_stages.LEAST
