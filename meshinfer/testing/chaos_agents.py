"""Chaos on real agents: processes of this machine, real runners, a small real model.

    with agent_room(OneMachine, store, 5) as room:
        outcome = AgentChaos(room).play(scenario, seed)

The same scenarios and the same checks as in the simulation (`testing.chaos`); what is read comes from the
agents' API and from the kernel (`testing.agent_witness`). How faults are made is in `testing.agent_faults`, and what the
agents' logs say of it in `testing.repair_story`.

Who expects what: each client's answer is compared, character by character, to the one that the same room gave
to the same question before anything was done to it; one asks greedily, one samples with a seed, one does not stream.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import httpx

from meshinfer.api.placements import placement_from_json
from meshinfer.testing.agent_faults import AgentFaults, deeds_on
from meshinfer.testing.agent_process import RunningAgent
from meshinfer.testing.agent_room import MODEL, AgentRoom, RoomError, instances
from meshinfer.testing.agent_witness import Witness, read_agent
from meshinfer.testing.cast import Cast
from meshinfer.testing.chaos import (
    HOUR_SECONDS,
    Answer,
    Deed,
    Fault,
    Outcome,
    Part,
    Reading,
    Scenario,
    answer_violations,
    faults_not_made,
    kept_violations,
    rest_violations,
    trace_violations,
)
from meshinfer.testing.machines import OneMachine, SkewedClocks
from meshinfer.testing.repair_story import came_too_late, phases_of
from meshinfer.testing.stream_client import Question, ask
from meshinfer.topology.placement import Placement

log = logging.getLogger(__name__)

TOKENS = 24
"""Some four seconds of an answer on two cores; what comes before a fault is read again after it."""
DEADLINE_SECONDS = 120.0
HOLDERS = 2
"""So many agents can hold the model between them; of those with little memory one cannot."""
REST_SECONDS = 5.0
KEPT_SECONDS = 20.0
"""What stages keep in case a session is opened again they keep so long (`engine.keeping`; naming it there loads MLX)."""
REPORT_SECONDS = 2.0
"""One more period of the counters on cards than the promises have."""
TRIES = 5
"""Of a run whose fault comes too late: a reading of who has which runner took longer than the rest of the answer, or
a repair was over before it was to be hit."""
REPAIR_SECONDS, PLACED_SECONDS = 0.5, 0.2
"""Within these of the origin's notice, or of the placing, a second fault strikes. From them to the open session two cores
take 0.7 to 4 s, and 0.4 to 2."""
LOOK_SECONDS = 0.1
REPAIR_LOOK_SECONDS = 0.02

QUESTIONS = {
    "first": Question("Write a story about a laptop.", TOKENS),
    "second": Question("What is a bicycle?", TOKENS, temperature=0.8, seed=11),
    "third": Question("What is the capital of France?", 8, streams=False),
}
WARM_UP = Question("What is the capital of France?", 1)
_TAKES_AWAY: frozenset[Deed] = frozenset(("kill", "leave", "stop", "cut off", "deafen", "mute"))
"""An agent, for as long as it lasts."""


def can_play(scenario: Scenario, machines: type[OneMachine], agents: int) -> bool:
    """Whether its faults can be made there, and so many agents can bear them.

    As long as a fault lasts, enough agents for the model must be left; or too few, where the answer is to end in an error.
    """
    deeds = {fault.deed for fault in scenario.faults} - deeds_on(machines)
    if scenario.clients > len(QUESTIONS):
        return False
    if scenario.outlasts:  # it would take a minute a run to write what the simulation writes in a moment
        return False
    if scenario.skew_seconds and not issubclass(machines, SkewedClocks):
        return False
    away = sum(fault.deed in _TAKES_AWAY for fault in scenario.faults)
    is_split = any(fault.deed == "split" for fault in scenario.faults)
    if any(fault.moment == "placing" for fault in scenario.faults):
        return False  # it takes milliseconds: nobody hits it from outside
    if any((fault.deed, fault.moment) == ("hang runner", "repair") for fault in scenario.faults):
        return False  # which thread will compute cannot be told from outside before it does
    if scenario.ends == "error":
        return agents == scenario.nodes and away > agents - HOLDERS and not deeds
    fits = away <= agents - HOLDERS and not (is_split and agents <= scenario.stages)
    return fits and not deeds


class AgentChaos:
    """Plays in one room, again and again; what its clients expect is asked once, and what agents have at rest read once."""

    def __init__(self, room: AgentRoom[OneMachine]) -> None:
        self._room = room
        self._expected: dict[str, str] = {}
        self._first: dict[int, Reading] = {}

    def play(self, scenario: Scenario, seed: int) -> Outcome:
        """One run; afterwards the room is about to be whole again.

        Again, if a fault came too late; but a promise that was broken is broken, whenever the fault came.
        """
        late: list[str] = []
        while True:
            run = _Run(self._room, scenario, seed, self._expected, self._first, len(late))
            try:
                outcome = run.play()
            finally:
                run.restore()
            if outcome.violations or not run.late:
                return outcome
            log.info("%r, seed %d, was for nothing: %s", scenario.name, seed, run.late)
            late.append(run.late)
            if len(late) == TRIES:
                return replace(outcome, violations=(f"fault not made, {TRIES} times: {'; '.join(late)}",))


@dataclass
class _Run:
    room: AgentRoom[OneMachine]
    scenario: Scenario
    seed: int
    expected: dict[str, str]
    first: dict[int, Reading]
    """Of each agent's process, by pid, as it was before the first run that it was in: what a run leaves behind adds up."""
    tries_before: int
    faulted_at: float = 0.0
    """The first time, by the wall clock."""
    struck: list[tuple[Fault, float]] = field(default_factory=list[tuple[Fault, float]])
    """All and only the faults that were made, and when by the wall clock; two of them may be equal."""
    late: str = ""
    """Which fault came too late to show anything, and for what."""
    noticed: threading.Event = field(default_factory=threading.Event)
    """The first client was told of a repair."""
    went_on: threading.Event = field(default_factory=threading.Event)
    """Its answer did after that, or had its end."""
    workers: list[threading.Thread] = field(default_factory=list[threading.Thread])
    to_undo: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """What the machines have been made to suffer and still do."""
    failures: list[str] = field(default_factory=list[str])
    """Why faults could not be made, or not be undone."""

    def play(self) -> Outcome:
        room = self.room
        self.rng = random.Random(f"{self.scenario.name} {self.seed}")  # noqa: S311 - it replays
        self.faults = AgentFaults(room, self.rng)
        if len(room.settled()) < self.scenario.stages:
            room.wait_settled()
        everyone = [agent.node_id for agent in room.settled().values()]
        self.seats = self.rng.sample(everyone, min(self.scenario.stages, len(everyone)))
        room.place(self.seats)
        room.wait_settled()
        room.wait_for_spares()
        self._learn_what_to_expect()
        if self.scenario.fresh:
            room.place(self.seats)
            room.wait_settled()
            room.wait_for_spares()
        (instance,) = instances(next(iter(room.live().values())))
        self.cast = Cast(
            self.scenario,
            placement_from_json(instance["placement"]),
            instance["epoch"],
            live=lambda: [agent.node_id for agent in room.live().values()],
            placements=self._placements,
            runs=lambda node: bool(self.faults.runners(room.name_of(node))),
        )
        self.k = self.rng.randrange(2, TOKENS // 2)  # the rest must take longer than making the fault
        self._choose_origins()
        self._set_clocks()
        for name in (
            set[str]() if self.scenario.fresh else {self.origin, self.other}
        ):  # links and caches that stay belong to the state before
            ask(room.agents[name].url, WARM_UP.body(MODEL), Answer("warm-up", "", DEADLINE_SECONDS, 0.0))
        before = [self._before(one) for one in room.live().values()]
        answers = [Answer(client, self.expected[client], DEADLINE_SECONDS, 0.0) for client in QUESTIONS]
        with Witness(room) as witness:
            clients = [threading.Thread(target=self._client, args=(answer,), daemon=True) for answer in answers]
            for client in clients:
                client.start()
            self._later(self._prelude)
            for client in clients:
                client.join(DEADLINE_SECONDS + 10)
            while self.workers:
                self.workers.pop().join(DEADLINE_SECONDS)
        settled, rest = self._come_to_rest(before)
        story = room.story(self.faulted_at)
        phases = phases_of(story, answers[0], self.faulted_at)
        told = [
            (at, line.removeprefix(f"{self.origin}: ")) for at, line in story if line.startswith(f"{self.origin}: ")
        ]
        self.late = came_too_late(told, answers[0], self.faulted_at, self.struck) or self.late
        log.info("%s\n%s", phases, "\n".join(f"{at:8.3f}  {line}" for at, line in story))
        violations = [v for answer in answers for v in answer_violations(answer, self.cast.ends(answer.client))] + rest
        violations += self._serves_again() if self.scenario.ends == "error" else []
        violations += [f"a fault could not be made or undone: {why}" for why in self.failures]
        violations += [] if self.late else faults_not_made(self.scenario.faults, [fault for fault, _ in self.struck])
        violations += [
            f"agent {name} ended by itself ({room.agents[name].process.poll()})" for name in room.ended_by_themselves()
        ]
        return Outcome(
            self.scenario.name,
            self.seed,
            tuple(answers),
            (*violations, *sorted(witness.violations)),
            recomputed_tokens=witness.recomputed_tokens,
            # Of the last client whose session came back before that token: they share the stages.
            recompute_seconds=dict(phases)["token"] - dict(phases).get("opened", math.nan) if phases else math.nan,
            settled_seconds=settled,
            phases=phases,
        )

    def restore(self) -> None:
        for name in list(self.room.stopped):
            self.room.wake(name)
        while self.to_undo:
            self.to_undo.pop()()
        self.room.restart()

    def _learn_what_to_expect(self) -> None:
        through = next(iter(self.room.live().values()))
        for client, question in QUESTIONS.items():
            if client not in self.expected:
                answer = Answer(client, "", DEADLINE_SECONDS, 0.0)
                ask(through.url, question.body(MODEL), answer)
                if answer.error:
                    raise RoomError(f"without any fault: {answer.error}: {answer.said}")
                self.expected[client] = "".join(str(piece) for piece in answer.got)

    def _before(self, agent: RunningAgent) -> Reading:
        """Now; but its open files as they were at first. Runners are new in each run."""
        now = read_agent(agent)
        return replace(now, files=self.first.setdefault(agent.process.pid, now).files)

    # --- the cast -------------------------------------------------------------------------------

    def _choose_origins(self) -> None:
        """Who asks: somebody whom the faults are not aimed at, unless one is."""
        agents = self.room.live()
        harmless: set[Deed] = {"fill disk"}
        hit = self.cast.hit_by(fault for fault in self.scenario.faults if fault.deed not in harmless)
        free = [name for name, agent in agents.items() if agent.node_id not in hit]
        self.origin = self.rng.choice(free or list(agents))
        self.other = self.rng.choice([name for name in free if name != self.origin] or [self.origin])
        if any(fault.part == "origin" and fault.deed not in harmless for fault in self.scenario.faults):
            self.other = self.rng.choice([name for name in agents if name != self.origin])
        self.cast.origin = agents[self.origin].node_id

    def _set_clocks(self) -> None:
        """On machines that can: one agent's wall clock is wrong from now on. Another part's with each seed."""
        machines = self.room.machines
        if isinstance(machines, SkewedClocks):
            parts: tuple[Part, ...] = ("origin", "head", "planner", self.scenario.faults[0].part)
            part = parts[self.seed % len(parts)]
            name = self.room.name_of(self.rng.choice(self.cast.players(part)))
            ahead = self.scenario.skew_seconds or HOUR_SECONDS
            log.info("the wall clock of %s (%s) is %+.0f s off", name, part, ahead)
            machines.set_wall_clock(name, ahead)
            self.to_undo.append(lambda: machines.set_wall_clock(name, 0.0))

    def _placements(self) -> list[tuple[int, Placement]]:
        origin = self.room.agents[self.origin]
        return [(one["epoch"], placement_from_json(one["placement"])) for one in instances(origin)]

    def _targets(self, fault: Fault) -> list[str]:
        return [self.room.name_of(node) for node in self.cast.targets(fault)]

    # --- clients and faults ---------------------------------------------------------------------

    def _client(self, answer: Answer) -> None:
        origin = self.origin if answer.client == "first" else self.other
        if answer.client != "first":
            time.sleep(random.Random(f"{self.seed} {answer.client}").uniform(0, 0.5))  # noqa: S311 - it replays
        url, body = self.room.agents[origin].url, QUESTIONS[answer.client].body(MODEL)
        if answer.client == "first":
            ask(url, body, answer, self._reached, self._told)
            self.went_on.set()
        else:
            ask(url, body, answer)
        answer.origin_was_lost = origin in self.room.killed

    def _told(self, sign: str) -> None:
        if sign.startswith("repairing"):
            self.noticed.set()

    def _reached(self, chunks: int) -> None:
        if self.noticed.is_set():
            self.went_on.set()
        for fault in self.scenario.faults:
            if (fault.moment, chunks) in {("first token", 1), ("token k", self.k)}:
                self._later(lambda fault=fault: self._do(fault))

    def _prelude(self) -> None:
        for fault in self.scenario.faults:
            if fault.moment == "prefill":
                time.sleep(self.rng.uniform(0.02, 0.2))
                self._do(fault)
            elif fault.moment == "repair":
                self._wait_for_repair(fault)
                if self.went_on.is_set():
                    self.late = f"{fault.deed} {fault.part}: the repair was over"
                else:
                    self._do(fault)

    def _wait_for_repair(self, fault: Fault) -> None:
        """Until the origin noticed, there is somebody to hit, and some of the time is over that it takes at least."""
        while not (self.noticed.is_set() and self._targets(fault)):
            if self.went_on.wait(REPAIR_LOOK_SECONDS):
                return
        seconds = PLACED_SECONDS if fault.part == "replacement" else REPAIR_SECONDS
        time.sleep(self.rng.uniform(0, seconds / (1 + self.tries_before)))

    def _do(self, fault: Fault) -> None:
        """Make the fault, and undo it when its time is over."""
        targets = self._targets(fault)
        if not targets:
            return
        name = self.rng.choice(targets)
        log.info("%s %s (%s)", fault.deed, fault.part, name)
        began = time.time()
        self.faulted_at = self.faulted_at or began
        node = self.room.agents[name].node_id
        self.cast.strike(node)
        undo = self.faults.make(fault.deed, name, self.cast)
        self.struck.append((fault, began))
        if math.isinf(fault.seconds):
            if undo is not None and name not in self.room.killed:  # `restore` starts them all at once
                self.to_undo.append(undo)
            return
        time.sleep(fault.seconds)
        if undo is not None:
            undo()

    def _later(self, work: Callable[[], None]) -> None:
        def noted() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a fault that was not made is no promise kept
                self.failures.append(repr(error))

        thread = threading.Thread(target=noted, daemon=True)
        self.workers.append(thread)
        thread.start()

    def _come_to_rest(self, before: list[Reading]) -> tuple[float, list[str]]:
        """(seconds until all is as before, what is not in time)."""
        began = time.monotonic()
        found = self._until_none(lambda after: trace_violations(before, after), REST_SECONDS + REPORT_SECONDS)
        with contextlib.suppress(RoomError):
            self.room.wait_settled()
        found += self._until_none(lambda after: rest_violations(before, after), REST_SECONDS + REPORT_SECONDS)
        found = list(dict.fromkeys(found))
        settled = time.monotonic() - began
        # That origins died is no reason to forget their sessions at once: stages keep them until they lapse.
        return settled, found + self._until_none(kept_violations, KEPT_SECONDS + REPORT_SECONDS)

    def _serves_again(self) -> list[str]:
        """Once the lost are back: what is not as promised of an answer from who told its client that there is no room."""
        self.restore()
        self.room.wait_settled()
        answer = Answer("again", self.expected["first"], DEADLINE_SECONDS, 0.0)
        ask(self.room.agents[self.origin].url, QUESTIONS["first"].body(MODEL), answer)
        return answer_violations(answer, "success")

    def _until_none(self, violations: Callable[[Sequence[Reading]], list[str]], seconds: float) -> list[str]:
        """What is left of them after so long."""
        until = time.monotonic() + seconds
        while True:
            try:
                found = violations([read_agent(agent) for agent in self.room.live().values()])
            except httpx.HTTPError as error:
                found = [f"4: an agent does not answer: {error!r}"]
            if not found or time.monotonic() > until:
                return found
            time.sleep(LOOK_SECONDS)
