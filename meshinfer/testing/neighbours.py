"""What an answer feels of a failure on other nodes: real agents, two instances side by side, one of them hit.

    with agent_room(OneMachine, two_models(store), AGENTS) as room:
        pairs = [neighbours.play(room, fails=fails) for _ in range(5) for fails in (False, True)]

Each round streams an answer of one model from two agents and, at the same time, one of another model from two
others. In every second round an agent of that other pair is killed in mid-answer; a fifth agent, which holds nothing,
is there to take its seat. Both kinds of rounds take turns, so that
whatever else the machine does meets both.

What limits what: no message of the failure has business on the first pair, but all agents share this machine's
cores. A runner that loads layers takes CPU time from those that step; laptops of their own would not feel it. So
each round says how busy the cores were.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Self

import psutil

from meshinfer.base.ids import ModelId
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
from meshinfer.testing.agent_room import AgentRoom, RoomError
from meshinfer.testing.chaos import Answer, percentile
from meshinfer.testing.machines import OneMachine
from meshinfer.testing.stream_client import Question, ask

AGENTS = 5
HERE, THERE = ModelId("local/here"), ModelId("local/there")
FAULT_AT = 16
"""Tokens of the first pair's answer when the other pair is hit; gaps are counted from there on."""
TOKENS = 112
"""Some seconds: longer than a repair takes, where nothing else is done on the machine."""
DEADLINE_SECONDS = 120.0
LOOK_SECONDS = 0.1
BUSY_PERCENT = 95.0
STORY = Question("Write a long story about a laptop, with many chapters.", TOKENS)


@dataclass(frozen=True, slots=True)
class Round:
    """How the first pair's answer went."""

    fails: bool
    gaps: tuple[float, ...]
    """Seconds between its tokens, after the moment of the fault."""
    cpu_percent: float
    """Of all cores together, meanwhile."""
    busy_share: float
    """Of the time: no core had anything to spare."""
    pause_seconds: float
    """The other pair's longest."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the rounds of one kind."""

    p50: float
    p99: float
    longest: float
    cpu_percent: float
    busy_share: float
    pause_seconds: float


def two_models(small: Path, store: Path) -> Path:
    """`store`, with the model in directory `small` under two names, to two planners two models."""
    for model_id in (HERE, THERE):
        pull(str(small), ModelStore(store), lambda _: None, model_id)
    return store


def play(room: AgentRoom[OneMachine], *, fails: bool) -> Round:
    """One round; afterwards the room is whole again.

    Raises:
        RoomError: an answer did not come to its end, so there is nothing to compare.
    """
    names = list(room.agents)
    ids = [room.agents[name].node_id for name in names]
    room.free()
    room.add(ids[:2], HERE)
    room.add(ids[2:4], THERE)
    for name, model in ((names[0], HERE), (names[2], THERE)):
        ask(room.agents[name].url, Question("Hello.", 2).body(model), Answer("warm-up", "", DEADLINE_SECONDS, 0.0))
    here = Answer("here", "", DEADLINE_SECONDS, 0.0)
    there = Answer("there", "", DEADLINE_SECONDS, 0.0)
    beside = threading.Thread(target=ask, args=(room.agents[names[2]].url, STORY.body(THERE), there), daemon=True)

    def hit(tokens: int) -> None:
        if tokens == FAULT_AT and fails:
            room.kill(names[3])

    beside.start()
    try:
        with _Cores() as cores:
            ask(room.agents[names[0]].url, STORY.body(HERE), here, hit)
        beside.join(DEADLINE_SECONDS)
    finally:
        for name in sorted(room.killed):
            room.start(name)
        room.wait_settled()
    for answer in (here, there):
        if not answer.succeeded:
            raise RoomError(f"the answer {answer.client} ended with {answer.error}: {answer.said}")
    gaps = tuple(after - before for before, after in pairwise(here.times[FAULT_AT - 1 :]))
    return Round(fails, gaps, cores.percent, cores.busy_share, there.pause_seconds)


def summary(rounds: Sequence[Round]) -> Summary:
    def gap(share: float) -> float:
        return median(percentile(one.gaps, share) for one in rounds)

    return Summary(
        gap(0.5),
        gap(0.99),
        gap(1.0),
        median(one.cpu_percent for one in rounds),
        median(one.busy_share for one in rounds),
        median(one.pause_seconds for one in rounds),
    )


@dataclass
class _Cores:
    """Looks at how busy they are until its context is left."""

    looks: list[float] = field(default_factory=list[float])
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        psutil.cpu_percent()  # what follows is since then
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def percent(self) -> float:
        return sum(self.looks) / max(1, len(self.looks))

    @property
    def busy_share(self) -> float:
        return sum(look >= BUSY_PERCENT for look in self.looks) / max(1, len(self.looks))

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.looks.append(psutil.cpu_percent())
