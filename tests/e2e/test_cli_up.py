"""`meshinfer up` and the commands that ask it, as processes: what a newcomer types, and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from command import meshinfer
from mesh import wait_until

from meshinfer.testing.agent_process import START_SECONDS, STOP_SECONDS, RunningAgent, agent, ending
from meshinfer.transport.mesh_key import remembered_code

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model_store: Path) -> Iterator[RunningAgent]:
    """One agent that holds the small model."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(model_store)
    options = ["--name", "anna", "--no-discovery", "--memory", "2GiB", "--context", "512", "--concurrency", "1"]
    with agent(home, *options) as started:
        yield started


def test_it_says_where_it_answers_and_keeps_the_code_to_itself(running: RunningAgent):
    assert httpx.get(f"{running.url}/healthz", timeout=10).status_code == 200
    code = json.loads(meshinfer("invite", "--json", home=running.home).stdout)["join_code"]
    assert code not in json.dumps(running.started) + running.log()


def test_its_start_says_what_it_is_at(running: RunningAgent):
    steps = [line for line in running.log().splitlines() if line.startswith("starting: ")]

    assert steps == [
        f"starting: {step} …" for step in ("loading libraries", "measuring this machine", "opening the network")
    ]


def test_status_shows_this_node(running: RunningAgent):
    result = meshinfer("status", "--api", running.url)

    assert result.returncode == 0, result.stderr
    assert "anna" in result.stdout


def test_a_question_is_answered_and_the_model_stays_loaded(running: RunningAgent):
    asked = ["chat", MODEL, "What is the capital of France?", "--temperature", "0", "--json", "--api", running.url]

    answer = json.loads(meshinfer(*asked).stdout)

    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    seats = json.loads(meshinfer("status", "--json", "--api", running.url).stdout)["instances"][0]["seats"]
    assert [(seat["start"], seat["end"], seat["state"]) for seat in seats] == [(0, 30, "ready")]


def test_a_served_model_is_not_removed(running: RunningAgent):
    meshinfer("chat", MODEL, "Hello", "--max-tokens", "1", "--api", running.url)

    result = meshinfer("models", "rm", MODEL, home=running.home)

    assert result.returncode == 1
    assert "in use" in result.stderr


def test_a_plan_says_what_a_model_needs(running: RunningAgent):
    result = meshinfer("plan", MODEL, "--context", "512", "--concurrency", "1", "--json", "--api", running.url)

    (choice, *_) = json.loads(result.stdout)["previews"]
    assert choice["error"] is None or "free" in choice["error"]


def test_what_does_not_fit_is_refused_with_numbers(running: RunningAgent):
    result = meshinfer("plan", MODEL, "--context", "2048", "--concurrency", "1000", "--api", running.url)

    assert result.returncode == 1
    assert "GiB" in result.stdout


@pytest.mark.parametrize("model", ["no-such-model", "nobody/has-this"])
def test_an_unknown_model_is_said_at_once(running: RunningAgent, model: str):
    result = meshinfer("chat", model, "Hello", "--api", running.url)

    assert result.returncode == 1
    assert model in result.stderr
    assert "Traceback" not in result.stderr


def test_a_second_agent_in_one_home_is_refused_and_the_first_lives(running: RunningAgent):
    second = meshinfer("up", "--api-port", "0", home=running.home)

    assert second.returncode == 1
    assert str(running.process.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert httpx.get(f"{running.url}/healthz", timeout=10).status_code == 200


def test_a_port_in_use_is_named_and_nothing_is_left_behind(running: RunningAgent, tmp_path: Path):
    port = str(urlsplit(running.url).port)

    result = meshinfer("up", "--no-discovery", "--api-port", port, home=tmp_path / "other")

    assert result.returncode == 1
    assert port in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "other" / "agent.pid").exists()


def test_an_open_api_without_a_key_is_refused(tmp_path: Path):
    result = meshinfer("up", "--no-discovery", "--api-host", "0.0.0.0", "--api-port", "0", home=tmp_path)

    assert result.returncode == 1
    assert "key" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """By what is started here, though these tests themselves may run under `nohup`, which an agent takes for a wish to stay."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ending_it_is_quick_and_leaves_nothing(tmp_path: Path, how: signal.Signals, hangups_are_heard: None):
    with agent(tmp_path, "--no-discovery") as ending:
        ending.process.send_signal(how)

        assert ending.process.wait(STOP_SECONDS) == 0
        assert "Traceback" not in ending.log()
        assert not (tmp_path / "agent.pid").exists()


def test_a_terminals_ctrl_c_while_it_asks_the_engine_blames_nothing(tmp_path: Path):
    """The terminal signals every process in its foreground group: the agent, and not what the agent started."""
    command = [sys.executable, "-m", "meshinfer.cli", "up", "--no-discovery", "--api-port", "0"]
    command += ["--home", str(tmp_path)]
    with (tmp_path / "agent.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, process_group=0
        )
        with ending(process):
            wait_until(lambda: bool(engines_of(process.pid)), START_SECONDS, "it asks the engine")
            asked = engines_of(process.pid)
            os.killpg(process.pid, signal.SIGINT)

            assert process.wait(STOP_SECONDS) == 0
            _, alive = psutil.wait_procs(asked, timeout=STOP_SECONDS)
            assert alive == []
        log.seek(0)
        assert "engine" not in log.read()


def engines_of(pid: int) -> list[psutil.Process]:
    """Those of its children that are the engine already: between fork and exec a child looks like its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children() if "meshinfer.runner" in child.cmdline()]
    return []


def test_an_agent_ends_with_the_program_that_started_it(tmp_path: Path):
    """However that ends: a closed pipe is all that a killed one leaves."""
    command = [sys.executable, "-m", "meshinfer.cli", "up", "--end-with-stdin", "--no-discovery", "--api-port", "0"]
    starting = subprocess.Popen([*command, "--home", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    output, _ = starting.communicate(timeout=START_SECONDS)

    assert starting.returncode == 0
    assert not (tmp_path / "agent.pid").exists()
    # What is not a terminal may be a log: no code, and no code that nobody was shown.
    if (code := remembered_code(tmp_path)) is not None:
        assert code.reveal() not in output.decode()


def test_a_start_that_fails_makes_no_mesh(tmp_path: Path):
    meshinfer("up", "--no-discovery", "--api-host", "0.0.0.0", "--api-port", "0", home=tmp_path)

    assert remembered_code(tmp_path) is None


def test_who_still_waits_when_it_leaves_is_told_so_and_asks_another(tmp_path: Path, model_store: Path):
    (tmp_path / "models").symlink_to(model_store)
    options = ["--no-discovery", "--memory", "2GiB", "--context", "8192", "--concurrency", "2"]
    # Its two stop tokens are never said: much longer than the 15 s that a node waits.
    wish = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "logit_bias": {"0": -100, "2": -100}}
    with agent(tmp_path, *options) as ending, ThreadPoolExecutor(1) as pool:
        url = f"{ending.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**wish, "stream": True}, timeout=60) as streamed:
            lines = streamed.iter_lines()
            assert next(lines)
            whole = pool.submit(httpx.post, url, json=wish, timeout=60)
            wait_until(lambda: sessions(ending) == 2, 30, "both are being answered")
            ending.process.send_signal(signal.SIGTERM)
            *_, last = [line.removeprefix("data: ") for line in lines if line]
        told = json.loads(last)["error"]
        assert told["code"] == "node_leaving"
        assert "Ask again at another node." in told["message"]
        assert (whole.result().status_code, whole.result().json()) == (503, {"error": told})
        assert ending.process.wait(STOP_SECONDS) == 0


def sessions(agent: RunningAgent) -> int:
    runners = httpx.get(f"{agent.url}/state", timeout=10).json()["runners"]
    return sum(runner["sessions"] for runner in runners)


def test_the_code_of_one_lets_the_other_in(tmp_path: Path, model_store: Path):
    """The README's quickstart, on one machine: the second laptop has no model, and answers all the same."""
    options = ["--loopback", "--memory", "1GiB", "--context", "512", "--concurrency", "1"]
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "models").symlink_to(model_store)
    with agent(tmp_path / "first", "--name", "anna", *options) as first:
        assert first.started["key_source"] == "made"
        code = json.loads(meshinfer("invite", "--json", home=first.home).stdout)["join_code"]
        joined = meshinfer("join", code, home=tmp_path / "second")
        assert joined.returncode == 0, joined.stderr

        with agent(tmp_path / "second", "--name", "ben", *options) as second:
            deadline = time.monotonic() + 30
            names: set[str] = set()
            while names != {"anna", "ben"} and time.monotonic() < deadline:
                nodes = json.loads(meshinfer("status", "--json", "--api", second.url).stdout)["topology"]["nodes"]
                names = {node["name"] for node in nodes.values()}
            assert names == {"anna", "ben"}

            question = ["chat", MODEL, "What is the capital of France?", "--temperature", "0", "--api", second.url]
            answer = meshinfer(*question)
            assert answer.returncode == 0, answer.stderr
            assert "Paris" in answer.stdout


def test_a_second_ctrl_c_does_not_wait_for_answers(running: RunningAgent):
    """The last test here: nothing of the shared agent is left."""
    wish = {"model": MODEL, "messages": [{"role": "user", "content": "Write a long story."}], "temperature": 0}
    wish |= {"stream": True, "max_tokens": 400}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=wish, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        runners = running.runners()
        running.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{running.url}/readyz", timeout=10).status_code == 503, 10, "it is leaving")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(STOP_SECONDS) == 128 + signal.SIGINT
        with contextlib.suppress(httpx.TransportError):  # closed, or reset
            assert "data: [DONE]" not in list(lines)
    _, alive = psutil.wait_procs(runners, timeout=STOP_SECONDS)
    assert alive == []
    assert "Traceback" not in running.log()
