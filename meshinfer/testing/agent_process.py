"""An agent as a person starts it, `meshinfer up` in a process of its own, and the one way in which tests end it.

    with agent(home, "--memory", "1GiB") as running:
        httpx.get(running.url + "/state")

Ending is asking (SIGTERM, as Ctrl-C does), waiting, and only then force. An agent that has to be killed, or
whose runners outlive it, is an error of the product, so it is one here.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from meshinfer.base.ids import NodeId

START_SECONDS = 90.0
STOP_SECONDS = 60.0
"""An agent may first have others load its seats, and let its clients' answers end."""
LOG_CHARACTERS = 3000
"""Of an agent's last words, in errors."""


class AgentProcessError(Exception):
    """An agent did not start, or did not end as it should."""


@dataclass
class RunningAgent:
    """One that serves, or did, or will."""

    home: Path
    process: subprocess.Popen[str]
    log_file: Path
    started: dict[str, Any] = field(default_factory=dict[str, Any])
    """What `up --json` said; nothing before `wait_started`."""

    @property
    def name(self) -> str:
        return self.started["name"]

    @property
    def url(self) -> str:
        return self.started["api_url"]

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.started["node_id"])

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_started(self) -> None:
        """Until it serves.

        Raises:
            AgentProcessError: it does not within START_SECONDS; with its log. Nothing of it is left.
        """
        line = ""
        try:
            line = _first_line(self.process)
        finally:
            if not line:
                with contextlib.suppress(AgentProcessError):
                    end(self.process)
        if not line:
            raise AgentProcessError(f"the agent did not start:\n{self.log()[-LOG_CHARACTERS:]}")
        self.started = json.loads(line)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def runners(self) -> list[psutil.Process]:
        """And whatever else it started."""
        return children(self.process)

    def signal(self, what: signal.Signals) -> None:
        """To its runners and it, as a lid or a power cut has it; runners first, so that none sees its agent go."""
        for process in self.runners():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(what)
        if self.is_alive:
            self.process.send_signal(what)

    def kill(self) -> None:
        """It and its runners, at once."""
        self.signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)
        end(self.process)


def start(
    home: Path,
    *options: str,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log_file: Path | None = None,
) -> RunningAgent:
    """Start one, and return once it serves. For the arguments see `launch`.

    Raises:
        AgentProcessError: it does not serve within START_SECONDS; with its log. Nothing of it is left.
    """
    launched = launch(home, *options, prefix=prefix, environment=environment, log_file=log_file)
    launched.wait_started()
    return launched


def launch(
    home: Path,
    *options: str,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log_file: Path | None = None,
    ends_with_us: bool = False,
) -> RunningAgent:
    """Start one, and return at once.

    Args:
        home: made if need be.
        options: of `meshinfer up`.
        environment: of the process; this one's if None.
        prefix: of its command line, such as the way into a namespace.
        log_file: where its log goes on; `agent.log` in its home if None.
        ends_with_us: when this process ends, however that is, the agent does; and Ctrl-C in a terminal is for this
            process alone, which ends the agent.
    """
    home.mkdir(parents=True, exist_ok=True)
    log_file = log_file or home / "agent.log"
    command = [*prefix, sys.executable, "-m", "meshinfer.cli", "up", "--json", "--home", str(home), "--api-port", "0"]
    if ends_with_us:
        command.append("--end-with-stdin")
    with log_file.open("a") as log:
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            # Into the pipe nothing is ever written; it closes when we end.
            stdin=subprocess.PIPE if ends_with_us else subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=ends_with_us,
        )
    return RunningAgent(home, process, log_file)


@contextmanager
def agent(home: Path, *options: str) -> Generator[RunningAgent]:
    """An agent that serves; at the end neither it nor anything that it started is left."""
    running = start(home, *options)
    with ending(running.process):
        yield running


@contextmanager
def ending(process: subprocess.Popen[str]) -> Generator[None]:
    """Ends an agent's process with the block; neither it nor anything that it started is left."""
    try:
        yield
    finally:
        end(process)


def end(process: subprocess.Popen[str], seconds: float = STOP_SECONDS) -> None:
    """End an agent; one that is dead already is only buried.

    Raises:
        AgentProcessError: it, or a runner of it, had to be killed.
    """
    runners: list[psutil.Process] = []
    if process.poll() is None:
        runners = children(process)
        process.terminate()
    forced = ""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        forced = f"the agent did not end within {seconds:.0f} s"
        process.kill()
        process.wait(STOP_SECONDS)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    _, alive = psutil.wait_procs(runners, timeout=STOP_SECONDS)
    for runner in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            runner.kill()
    if forced or alive:
        raise AgentProcessError(forced or f"{len(alive)} runners outlived their agent")


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All that it started and that lives, also below."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _first_line(process: subprocess.Popen[str]) -> str:
    """What it prints when it serves; empty if it ends, or says nothing for START_SECONDS."""
    assert process.stdout is not None
    output = process.stdout
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(islice(output, 1)), daemon=True)
    reader.start()
    reader.join(START_SECONDS)
    return lines[0] if lines else ""
