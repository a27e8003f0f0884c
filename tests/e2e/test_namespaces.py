"""Two machines on one cable and nothing else: no default route, no name server, no address given to anyone.

The machines are network namespaces that the test makes itself, joined by a veth pair.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from mesh import FRANCE, MODEL, wait_until

from meshinfer.testing.agent_process import LOG_CHARACTERS, START_SECONDS, RunningAgent, ending, launch
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]


@dataclass
class Machine:
    namespace: str
    agent: RunningAgent

    def run(self, *arguments: str, seconds: float = 180) -> str:
        """A meshinfer command on this machine; its standard output."""
        command = [*inside(self.namespace), sys.executable, "-m", "meshinfer.cli", *arguments, "--api", self.agent.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0, done.stderr + self.agent.log()[-LOG_CHARACTERS:]
        return done.stdout


@pytest.fixture
def machines(tmp_path: Path, model_store: Path) -> Iterator[tuple[Machine, Machine]]:
    tag = uuid.uuid4().hex[:6]
    environment = {**os.environ, JOIN_CODE_VARIABLE: new_join_code().reveal()}
    with ExitStack() as stack:
        names = (f"mi-{tag}-a", f"mi-{tag}-b")
        stack.enter_context(_cable(tag, names))
        started: list[Machine] = []
        for index, name in enumerate(names):
            home = tmp_path / name
            home.mkdir()
            (home / "models").symlink_to(model_store)
            started.append(stack.enter_context(_machine(name, home, f"node{index}", environment)))
        yield started[0], started[1]


@contextmanager
def _cable(tag: str, names: tuple[str, str]) -> Iterator[None]:
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = (f"v{tag}a", f"v{tag}b")
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "address", "add", f"10.77.0.{index + 1}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def _machine(namespace: str, home: Path, name: str, environment: dict[str, str]) -> Iterator[Machine]:
    options = ("--name", name, "--memory", "340MiB", "--context", "512", "--concurrency", "1")
    agent = launch(home, *options, prefix=inside(namespace), environment=environment)
    with ending(agent.process):
        yield Machine(namespace, agent)


def inside(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def test_two_machines_without_a_route_find_each_other_and_serve(machines: tuple[Machine, Machine]) -> None:
    one, other = machines
    for machine in machines:
        machine.agent.wait_started()
        addresses = machine.agent.started["addresses"]
        assert [a for a in addresses if a.startswith("10.77.0.")], addresses

    def found() -> bool:
        nodes = json.loads(one.run("status", "--json"))["topology"]["nodes"]
        return {node["name"] for node in nodes.values()} == {"node0", "node1"}

    wait_until(found, START_SECONDS, "they see each other")
    answer = json.loads(other.run("chat", MODEL, FRANCE, "--temperature", "0", "--json"))
    assert "Paris" in answer["text"]
    placed = json.loads(one.run("status", "--json"))["instances"][0]
    assert len({seat["node_id"] for seat in placed["seats"]}) == 2
