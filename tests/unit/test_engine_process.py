"""Engine processes know no secrets, do not hear the terminal's Ctrl-C, and do not outlive the wait for them."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest
import trio

from meshinfer.models.engine_process import SECRET_VARIABLES, engine_options, run_engine

TELL = "import json, os; print(json.dumps([os.getsid(0) == os.getpid(), sorted(os.environ)]))"


def test_a_session_of_its_own_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRET_VARIABLES, "MESHINFER_BLAS"):
        monkeypatch.setenv(name, "x")
    told = subprocess.check_output([sys.executable, "-c", TELL], **engine_options())
    leads_its_session, variables = json.loads(told)
    assert leads_its_session
    assert "MESHINFER_BLAS" in variables, "settings reach it"
    assert SECRET_VARIABLES.isdisjoint(variables)


async def test_it_is_killed_when_its_time_is_over() -> None:
    before = psutil.Process().children()
    assert await run_engine(["accelerator"], seconds=0) is None
    assert psutil.Process().children() == before


async def test_it_is_killed_when_the_wait_is_cancelled() -> None:
    before = psutil.Process().children()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_engine, ["accelerator"], 60)
        while psutil.Process().children() == before:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert psutil.Process().children() == before


async def test_its_last_words_come_back_with_its_code() -> None:
    done = await run_engine(["no-such-job"], seconds=60)
    assert done is not None
    assert done.returncode != 0
    assert b"no-such-job" in done.stderr
