"""What a heartbeat says of the time that steps take."""

import time

import pytest

from meshinfer.pipeline.progress import Progress


def test_a_decode_step_s_computing_is_told_by_the_engine_s_clock() -> None:
    now = 0.0
    progress = Progress(timer=lambda: now)
    for seconds in (2.0, 2.0):
        progress.begin_step(0)
        now += seconds
        progress.end_step(decode=True)
    assert progress.heartbeat().computing_seconds == pytest.approx(2.0)
    progress.begin_step(100)
    now += 50.0
    progress.end_step(decode=False)
    assert progress.heartbeat().computing_seconds == pytest.approx(2.0), "a prompt is no step of one token"
    progress.begin_step(0)
    now += 3.0
    progress.end_step(decode=True)
    assert 2.0 < progress.heartbeat().computing_seconds < 3.0


def test_what_a_prompt_may_take_is_told_by_the_longest_step_of_one_but_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress()
    told: list[tuple[float, int]] = []
    for tokens, seconds in ((16, 30.0), (512, 4.0), (20, 1.0), (256, 3.0)):
        progress.begin_step(tokens)
        assert progress.heartbeat().busy_tokens == tokens
        now += seconds
        progress.end_step(decode=False)
        told.append((progress.prompt_seconds, progress.prompt_tokens))
    assert told[0] == (30.0, 16), "the rehearsal, until there is another"
    beat = progress.heartbeat()
    assert (beat.prompt_seconds, beat.prompt_tokens, beat.busy_tokens) == (4.0, 512, 0)


def test_the_first_step_of_a_process_is_not_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress()
    for seconds in (2.0, *[0.1] * 9):
        progress.begin_step(0)
        now += seconds
        progress.end_step(decode=True)
    assert progress.heartbeat().step_seconds == pytest.approx(0.29), "a mean, in which the first is one of ten"
