"""Whoever is waited for has ended when the wait has, however that came."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest

from meshinfer.base.errors import DeadlineExceeded
from meshinfer.models.progress import Stopped
from meshinfer.models.watched_process import wait_watched


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def nothing() -> None:
    pass


def test_its_exit_code_comes_back() -> None:
    assert wait_watched(python("raise SystemExit(3)"), 60, "trying", nothing, do="wait") == 3


def test_after_its_time_it_is_killed() -> None:
    process = python("import time; time.sleep(600)")
    with pytest.raises(DeadlineExceeded, match=r"trying took more than 0 s.*[Bb]e patient"):
        wait_watched(process, 0, "trying", nothing, do="be patient")
    assert process.returncode is not None


def test_when_somebody_stops_the_wait_it_is_killed() -> None:
    def stopped() -> None:
        raise Stopped("enough")

    process = python("import time; time.sleep(600)")
    with pytest.raises(Stopped):
        wait_watched(process, 60, "trying", stopped, do="wait")
    assert process.returncode is not None


def test_one_that_hangs_in_the_kernel_is_not_waited_for() -> None:
    class Hanging:
        killed = False

        def kill(self) -> None:
            self.killed = True

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "this wait would never end"
            raise subprocess.TimeoutExpired("hanging", timeout)

    process = Hanging()
    with pytest.raises(DeadlineExceeded):
        wait_watched(cast("subprocess.Popen[Any]", process), 0, "trying", nothing, do="wait")
    assert process.killed
