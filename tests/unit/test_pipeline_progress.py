"""What a heartbeat says of the time that steps take."""

import pytest

from meshinfer.pipeline.progress import Progress


def test_a_decode_step_s_computing_is_told_by_the_engine_s_clock() -> None:
    now = 0.0
    progress = Progress(timer=lambda: now)
    for seconds in (2.0, 2.0):
        progress.begin_step(1)
        now += seconds
        progress.end_step(decode=True)
    assert progress.heartbeat().computing_seconds == pytest.approx(2.0)
    progress.begin_step(100)
    now += 50.0
    progress.end_step(decode=False)
    assert progress.heartbeat().computing_seconds == pytest.approx(2.0), "a prompt is no step of one token"
    progress.begin_step(1)
    now += 3.0
    progress.end_step(decode=True)
    assert 2.0 < progress.heartbeat().computing_seconds < 3.0
