"""Agents as a person starts them: `meshinfer up`, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 90.0
STOP_SECONDS = 20.0


def meshinfer(*arguments: str, home: Path | None = None, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [sys.executable, "-m", "meshinfer.cli", *arguments]
    if home is not None:
        command += ["--home", str(home)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
    )


@dataclass
class RunningAgent:
    home: Path
    process: subprocess.Popen[str]
    started: dict[str, Any]
    """What `up --json` said."""

    @property
    def url(self) -> str:
        return self.started["api_url"]

    def log(self) -> str:
        return (self.home / "agent.log").read_text(errors="replace")

    def runners(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def agent(home: Path, *options: str) -> Iterator[RunningAgent]:
    """An agent that serves; at the end neither it nor anything that it started is left."""
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "meshinfer.cli", "up", "--json", "--home", str(home), "--api-port", "0", *options]
    with (home / "agent.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True)
    with ending(process):
        yield RunningAgent(home, process, json.loads(first_line(process) or _fail(home)))


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends an agent's process with the block; neither it nor anything that it started is left."""
    runners: list[psutil.Process] = []
    try:
        yield
    finally:
        if process.poll() is None:
            runners = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait(STOP_SECONDS)
            if process.stdout is not None:
                process.stdout.close()
            _, alive = psutil.wait_procs(runners, timeout=STOP_SECONDS)
            for runner in alive:
                runner.kill()
        assert alive == [], "runners outlived their agent"


def first_line(process: subprocess.Popen[str]) -> str:
    """What it prints when it serves; empty if it ends, or says nothing for START_SECONDS."""
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(START_SECONDS)
    return lines[0] if lines else ""


def _fail(home: Path) -> str:
    raise AssertionError(f"the agent did not start:\n{(home / 'agent.log').read_text()[-3000:]}")
