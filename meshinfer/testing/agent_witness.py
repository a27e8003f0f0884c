"""What real agents and the kernel say of themselves: at rest (`read_agent`), and while a run goes on (`Witness`).

The witness looks twice a second, as often as runners report. It finds promises broken that a look at rest cannot:

6.  a runner that works under an epoch older than one that its own agent holds already (its counters move), unless two sides
    of a partition have met and that epoch brings to an end what it has;
7.  runners of one node that take more memory together, by the kernel's count, than the node offers.

And it adds up `recomputed_tokens`. A runner that dies takes what it counted since its last report with it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import psutil

from meshinfer.testing.agent_process import RunningAgent
from meshinfer.testing.agent_room import HTTP, AgentRoom, get
from meshinfer.testing.chaos import Reading
from meshinfer.testing.machines import OneMachine

LOOK_SECONDS = 0.5
NEWS_LOOKS = 2
"""Each of them brings a report of every runner."""
KERNEL_SLACK = 0.05
"""Of what a node offers: pages of libraries that all runners share are counted in each."""


def read_agent(agent: RunningAgent) -> Reading:
    """What it says of itself, and what the kernel says of it."""
    state = get(agent, "/state")
    placed = tuple(
        sorted(
            (i["instance_id"], i["epoch"], json.dumps(i["placement"]["seats"]), i["state"]) for i in state["instances"]
        )
    )
    seats = [seat for i in state["instances"] for seat in i["seats"] if seat["node_id"] == agent.node_id]
    return Reading(
        node=agent.node_id,
        members=frozenset(state["topology"]["nodes"]),
        instances=placed,
        requests=_gauge(agent, "meshinfer_sessions"),
        sessions=sum(runner["sessions"] for runner in state["runners"]),
        runners=len(state["runners"]),
        seats=sum(seat["state"] in {"loading", "linking", "ready", "cut"} for seat in seats),
        files=_files(agent.process.pid),
        runner_files=tuple(_files(runner["pid"]) for runner in state["runners"]),
        cache_bytes=sum(runner["cache_bytes"] for runner in state["runners"]),
        kept_bytes=sum(runner["kept_bytes"] for runner in state["runners"]),
    )


@dataclass
class Witness:
    """Looks at every live agent until its context is left."""

    room: AgentRoom[OneMachine]
    violations: set[str] = field(default_factory=set[str])
    peak_bytes: int = 0
    """Of the runners of one node."""
    _first: dict[int, int] = field(default_factory=dict[int, int])
    """pid → tokens that it had recomputed when it was first seen."""
    _last: dict[int, int] = field(default_factory=dict[int, int])
    _stale: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict[tuple[int, int], tuple[int, int]])
    """(pid, epoch) → how often it was seen under that epoch while there was a newer one, and its steps."""
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._look_at_all(is_first=True)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look_at_all()

    @property
    def recomputed_tokens(self) -> int:
        return sum(count - self._first.get(pid, 0) for pid, count in self._last.items())

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._look_at_all()

    def _look_at_all(self, *, is_first: bool = False) -> None:
        for name, agent in self.room.live().items():
            if name in self.room.stopped:
                continue
            try:
                self.look(agent.node_id, get(agent, "/state"), is_first=is_first)
            except httpx.HTTPError:
                continue  # killed or stopped a moment ago
            self._weigh(agent)

    def look(self, node: str, state: Mapping[str, Any], *, is_first: bool = False) -> None:
        """Take in one answer of `/state`."""
        newest = {instance["instance_id"]: instance for instance in state["instances"]}
        for runner in state["runners"]:
            pid, epoch, steps = runner["pid"], runner["epoch"], runner["steps"]
            if is_first:
                self._first[pid] = runner["recomputed_tokens"]
            self._last[pid] = max(self._last.get(pid, 0), runner["recomputed_tokens"])
            instance = newest.get(runner["instance_id"])
            if instance is None or epoch >= instance["epoch"]:
                continue
            if {"epoch": epoch, "placement_id": runner["placement_id"]} not in instance["outlived"]:
                looks, before = self._stale.get((pid, epoch), (0, steps))
                # Until its next reports, what it did before the news is still coming in.
                if looks >= NEWS_LOOKS and steps > before:
                    what = f"{steps - before} steps of epoch {epoch}, while it holds {instance['epoch']}"
                    self.violations.add(f"6: node {node} ran {what}")
                self._stale[pid, epoch] = looks + 1, steps

    def _weigh(self, agent: RunningAgent) -> None:
        held = 0
        for process in agent.runners():
            try:
                held += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak_bytes = max(self.peak_bytes, held)
        offered = self.room.memory_bytes
        if held > offered * (1 + KERNEL_SLACK):
            self.violations.add(f"7: the runners of node {agent.node_id} take {held} bytes of {offered}")


def idle_cpu(room: AgentRoom[OneMachine], seconds: float) -> dict[str, float]:
    """What each node's agent and runners together take of one core while nothing is asked of them."""
    before = {name: _cpu_seconds(agent) for name, agent in room.live().items()}
    time.sleep(seconds)
    shares: dict[str, float] = {}
    for name, agent in room.live().items():
        # A process that ended meanwhile tells nothing any more, and one that began has used all of its time here.
        used = sum(now - before[name].get(pid, 0.0) for pid, now in _cpu_seconds(agent).items())
        shares[name] = used / seconds
    return shares


def _cpu_seconds(agent: RunningAgent) -> dict[int, float]:
    """Of each of its processes, since that began."""
    found: dict[int, float] = {}
    for process in [psutil.Process(agent.process.pid), *agent.runners()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def _files(pid: int) -> int:
    """That a process has open; 0 once it is gone."""
    try:
        return psutil.Process(pid).num_fds()
    except psutil.Error:
        return 0


def _gauge(agent: RunningAgent, name: str) -> int:
    text = HTTP.get(f"{agent.url}/metrics").text
    return int(float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1]))
