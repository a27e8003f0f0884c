"""Chaos on simulated agents: a scenario, a seed, and virtual time.

    outcome = play(scenario, seed)

Agents, planner, membership, sessions are the product's own (`testing.cluster`); runners are the exact
engine (`testing.engine`), so every answer is known to the letter. Three clients or more ask at once: the
first is the one whose progress times the faults, the others may have other origins, and stay away from everything
that is hit. When all have their answers and the faults are over, the nodes are read.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import trio

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import InstanceId, NodeId, SessionId
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.requests import Finished, Generated, Waiting
from meshinfer.testing.cast import Cast
from meshinfer.testing.chaos import (
    FREED_SECONDS,
    HOUR_SECONDS,
    Answer,
    Fault,
    Outcome,
    Reading,
    Scenario,
    answer_violations,
    faults_not_made,
    kept_violations,
    rest_violations,
    trace_violations,
)
from meshinfer.testing.clocks import (
    NodeClocks,
    later_clock,
    separate_clocks,
    shared_time,
    sleep_until_shared,
)
from meshinfer.testing.cluster import Cluster, SimNode
from meshinfer.testing.engine import KEPT_SECONDS, FakeSpeed, Step
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.wire.messages import LEASE, Place

log = logging.getLogger(__name__)

CLIENTS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
TOKENS = 60
LONG_TOKENS = 600
"""Some twenty seconds: whoever computes them for nobody still does so when everything must be at rest."""
PROMPT_TOKENS = 8
WORKLOAD = Workload(context_tokens=PROMPT_TOKENS + LONG_TOKENS, concurrency=3)
"""A place for each client of most scenarios. With four, no plan has three stages."""
DEADLINE_SECONDS = 120.0
REST_SECONDS = 5.0
"""How long after the last answer and the last fault everything may take to be as before."""
PLACING_SECONDS = 10.0
"""How long a fault may take to be noticed, and to have anything placed anew."""
MEET_SECONDS = 30.0
"""For nodes that were apart to find each other again first: re-dials back off."""
NODE_BYTES = 30 * MIB
"""Three layers of 8 MiB and some: the model of eight needs three nodes."""
SPEED = FakeSpeed(start_seconds=0.5, load_seconds=0.3, step_seconds=0.01, prefill_seconds_per_token=0.002)
"""A small model on laptops, with a spare process and the weights on disk; 32 ms a token over three stages."""


def replays(seed: int) -> None:
    """Let trio schedule by `seed` from now on: without it, the same run differs each time."""
    # trio has no public door to it; Hypothesis does the same.
    scheduler: Any = import_module("trio._core._run")
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # noqa: SLF001
    scheduler._r.seed(seed)  # noqa: SLF001


async def at_once(work: Callable[..., Any], *arguments: object, **_: object) -> object:
    """Instead of in a thread: virtual time goes on without threads, and how far is never twice the same."""
    await trio.lowlevel.checkpoint()
    return work(*arguments)


def play(
    scenario: Scenario,
    seed: int,
    clocks: Mapping[str, NodeClocks] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """One run, on a clock that jumps.

    Args:
        scenario: what to play.
        seed: of everything that chance decides.
        clocks: of nodes, by name; those that `scenario` wants by default.
        tell: is given all that happens, as it happens: each message that arrives and each step of a stage.
    """
    if clocks is None and scenario.skew_seconds:
        skewed = random.Random(f"clocks {seed}").randrange(scenario.nodes)  # noqa: S311 - it replays
        clocks = {f"node{skewed}": NodeClocks(scenario.skew_seconds, scenario.skew_seconds)}

    async def main() -> Outcome:
        rng = random.Random(f"{scenario.name} {seed}")  # noqa: S311 - it replays
        cluster = Cluster(rng, memory_bytes=NODE_BYTES, speed=SPEED, clocks=clocks)
        cluster.network.tell = tell
        async with cluster.running(scenario.nodes):
            return await _Run(scenario, seed, cluster, rng).play()
        raise AssertionError

    replays(seed)
    with separate_clocks(), mock.patch.object(trio.to_thread, "run_sync", at_once):
        return trio.run(main, clock=later_clock())


@dataclass
class Witness:
    """What the runners did, as the fabric shows it."""

    cluster: Cluster
    stale: Counter[str] = field(default_factory=Counter[str])
    over_budget: set[str] = field(default_factory=set[str])
    recomputed: Counter[SessionId] = field(default_factory=Counter[SessionId])
    recompute_seconds: Counter[SessionId] = field(default_factory=Counter[SessionId])
    _read: dict[tuple[SessionId, int], int] = field(default_factory=dict[tuple[SessionId, int], int])
    """(session, seat) → positions that were read before."""

    def __call__(self, step: Step) -> None:
        self.cluster.network.tell(f"{shared_time()!r} {step}")
        node = self.cluster.node_of(step.node_id)
        if node is None:
            self.stale[f"{step.node_id} ran a step after its death"] += 1
            return
        if (step.instance_id, step.epoch, step.seat_index) not in _held(node):
            self.stale[f"{step.node_id} ran seat {step.seat_index} of epoch {step.epoch}, which it does not hold"] += 1
        before = self._read.get((step.session_id, step.seat_index), 0)
        again = max(0, min(before, step.start + step.tokens) - step.start)
        self._read[step.session_id, step.seat_index] = max(before, step.start + step.tokens)
        self.recomputed[step.session_id] += again
        self.recompute_seconds[step.session_id] += again * self.cluster.fabric.speed.prefill_seconds_per_token  # type: ignore[assignment]

    @property
    def violations(self) -> list[str]:
        """Of promises 6 and 7; and what failed where no client looks."""
        return [
            *(f"6: {what} ({times} times)" for what, times in self.stale.items()),
            *(f"7: {what}" for what in self.over_budget),
            *(f"a handler failed: {bug!r}" for bug in self.cluster.network.failures),
        ]

    async def watch_memory(self) -> None:
        """Compare what runners hold with what their nodes offer, until cancelled."""
        layers = self.cluster.model.layers
        while True:
            held: Counter[NodeId] = Counter()
            for runner in self.cluster.fabric.runners:
                if runner.seat is not None:
                    seat = runner.seat.placement.seats[runner.seat.seat_index]
                    held[runner.node_id] += sum(layer.weights.packed_bytes for layer in layers[seat.start : seat.end])
            self.over_budget |= {f"{node} held {size} bytes" for node, size in held.items() if size > NODE_BYTES}
            await trio.sleep(0.05)


class _Run:
    def __init__(self, scenario: Scenario, seed: int, cluster: Cluster, rng: random.Random) -> None:
        self.scenario, self.seed, self.cluster, self.rng = scenario, seed, cluster, rng
        self.witness = Witness(cluster)
        self.dead: set[NodeId] = set()
        """Killed, and not restarted."""
        self.cast: Cast
        self.origin: SimNode
        self.answers: list[Answer] = []
        self.noticed = trio.Event()
        """The first client's origin has seen that something is wrong."""
        self._is_repaired = False
        """And its answer went on after that."""
        self.over_at = 0.0
        """When the last fault was undone, or done for good."""
        self.made: list[Fault] = []
        """In their order; also those that are undone."""
        self._k = rng.randrange(1, TOKENS * 3 // 4)
        self._session: SessionId
        """The first client's."""
        self._in_vain: set[str] = set()
        """Who computed for an origin that had vanished."""
        self._connections: dict[NodeId, list[tuple[trio.CancelScope, Answer]]] = defaultdict(list)
        """By origin; a client's end of its connection."""

    async def play(self) -> Outcome:
        cluster, rng = self.cluster, self.rng
        cluster.fabric.witness = self.witness
        serving = cluster.nodes[0].serving
        with cluster.nodes[0].clocks.worn():
            preview = await serving.planner.preview(cluster.model.model_id, WORKLOAD, Constraints())
            wanted = rng.choice([plan for plan in preview.plans if len(plan.placement.seats) == self.scenario.stages])
            ask = Place(cluster.model.model_id, WORKLOAD, Constraints(), wanted.placement)
            placed = await serving.placer.place(ask)
        await cluster.until(lambda: all([i.state for i in n.instances()] == ["ready"] for n in cluster.nodes))
        self.cast = Cast(
            self.scenario,
            placed.placement,
            placed.epoch,
            live=lambda: [node.node_id for node in self._live()],
            placements=lambda: [(instance.epoch, instance.placement) for instance in self.origin.instances()],
            runs=lambda node: bool(cluster.fabric.runners_of(node)),
        )
        self._choose_origin()
        before: list[Reading] = []
        async with trio.open_nursery() as watching:
            watching.start_soon(self.witness.watch_memory)
            # Links and caches that stay for the next request belong to the state before. Of a fresh instance there is none.
            for node in [] if self.scenario.fresh else self._live():
                warm_up = Answer(f"of {node.name}", exact_answer((1,), 1, 2), DEADLINE_SECONDS, shared_time())
                await self._ask(warm_up, node, (1,), 1)
                before.append(read_node(cluster, node))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for index, (origin, count) in enumerate(self._clients()):
                    nursery.start_soon(self._client, index, origin, count)
                nursery.start_soon(self._prelude)
            await sleep_until_shared(self.over_at)
            settled, rest = await come_to_rest(cluster, before, self._live)
            rest += await self._serves_again() if self.scenario.ends == "error" else []
            watching.cancel_scope.cancel()
        violations = [
            v for answer in self.answers for v in answer_violations(answer, self.cast.ends(answer.client))
        ] + rest
        violations += faults_not_made(self.scenario.faults, self.made) + self.witness.violations + list(self._in_vain)
        return Outcome(
            self.scenario.name,
            self.seed,
            tuple(sorted(self.answers, key=lambda answer: CLIENTS.index(answer.client))),
            tuple(violations),
            sum(self.witness.recomputed.values()),
            float(self.witness.recompute_seconds[self._session]),
            settled,
        )

    # --- the cast -------------------------------------------------------------------------------

    def _choose_origin(self) -> None:
        """Who asks: somebody whom the faults are not aimed at, unless one is. A bystander is chosen later."""
        hit = self.cast.hit_by(fault for fault in self.scenario.faults if fault.part != "bystander")
        free = [node for node in self.cluster.nodes if node.node_id not in hit]
        self.origin = self.rng.choice(free or self.cluster.nodes)
        self.cast.origin = self.origin.node_id

    def _clients(self) -> Sequence[tuple[SimNode, int]]:
        """(origin, tokens) of each: the first, another of the same origin or not, one that asks for little, and the rest.

        An answer that its origin is to leave behind is long.
        """
        hit = self.cast.hit_by(self.scenario.faults) | {self.origin.node_id}
        others = [node for node in self.cluster.nodes if node.node_id not in hit] or [self.origin]
        is_left = any((fault.deed, fault.part) == ("kill", "origin") for fault in self.scenario.faults)
        first = LONG_TOKENS if is_left or self.scenario.outlasts else TOKENS
        second = LONG_TOKENS if self.scenario.outlasts else TOKENS
        counts = (second, 5, *(TOKENS,) * (self.scenario.clients - 3))
        return (self.origin, first), *((self.rng.choice(others), count) for count in counts)

    def _live(self) -> list[SimNode]:
        return [node for node in self.cluster.live() if node.node_id not in self.dead]

    # --- the clients ----------------------------------------------------------------------------

    async def _client(self, index: int, origin: SimNode, count: int) -> None:
        prompt = tuple(range(index, index + PROMPT_TOKENS))
        seed = self.seed + index
        name = CLIENTS[index]
        if index:
            await trio.sleep(random.Random(seed).uniform(0, 0.5))  # noqa: S311 - it replays
        answer = Answer(name, exact_answer(prompt, seed, count), DEADLINE_SECONDS, shared_time())
        self.answers.append(answer)
        if origin.node_id in self.dead:  # nobody is there to connect to
            answer.origin_was_lost, answer.error, answer.ended_at = True, "connection", shared_time()
            return
        await self._ask(answer, origin, prompt, seed)

    async def _ask(self, answer: Answer, origin: SimNode, prompt: tuple[int, ...], seed: int) -> None:
        """Ask and write down what comes; as the HTTP side does, it knows nothing but the events."""
        request = self.cluster.request(prompt, len(answer.expected), seed, DEADLINE_SECONDS, workload=WORKLOAD)
        if answer.client == "first":
            self._session = request.session_id
        with origin.clocks.worn(), trio.CancelScope() as connection:
            self._connections[origin.node_id].append((connection, answer))
            try:
                async with origin.serving.sessions.generate(request) as events:
                    async for event in events:
                        self._take(answer, event)
            except MeshinferError as error:
                answer.error, answer.said = error.code, str(error)
            if not answer.error and math.isnan(answer.ended_at):
                answer.error, answer.said = "internal", "the stream ended without an end"
            answer.ended_at = shared_time()
        if connection.cancelled_caught:
            answer.error, answer.ended_at = "connection", shared_time()

    def _take(self, answer: Answer, event: object) -> None:
        match event:
            case Generated():
                if event.index != len(answer.got):
                    answer.ids.add(f"token {event.index} came as number {len(answer.got)}")
                answer.got.append(event.token_id)
                answer.times.append(shared_time())
                if answer.client == "first":
                    self._is_repaired = self.noticed.is_set()
                    self._reached(event.index)
            case Finished():
                answer.ended_at = shared_time()
            case Waiting(phase="repairing") if answer.client == "first":
                self.noticed.set()
            case _:
                pass

    # --- the faults -----------------------------------------------------------------------------

    def _reached(self, index: int) -> None:
        for fault in self.scenario.faults:
            if fault.moment == "first token" and index == 0:
                self._nursery.start_soon(self._do, fault)
            if fault.moment == "token k" and index == self._k:
                self._nursery.start_soon(self._do, fault)

    async def _prelude(self) -> None:
        """The faults that no token times."""
        for fault in self.scenario.faults:
            if fault.moment in {"first token", "token k"}:
                continue
            with trio.move_on_after(PLACING_SECONDS) as waiting:
                await self._moment_of(fault)
            if not waiting.cancelled_caught:
                await self._do(fault)

    async def _moment_of(self, fault: Fault) -> None:
        match fault.moment:
            case "repair":
                await self.noticed.wait()
                while not self.cast.targets(fault):  # noqa: ASYNC110 - virtual time is free
                    await trio.sleep(self.cluster.network.latency_seconds)
                # What is lost is loaded only after both of them, and takes that long: it is under repair until then.
                await trio.sleep(self.rng.uniform(0, SPEED.load_seconds))
            case "placing":
                await self._next_lease()
                # Three ways of the network: a lease's answer, a commit, and its.
                await trio.sleep(self.rng.uniform(0, 3 * self.cluster.network.latency_seconds))
            case _:
                prefill = SPEED.prefill_seconds_per_token * PROMPT_TOKENS * self.scenario.stages
                await trio.sleep(self.rng.uniform(0, prefill))

    async def _next_lease(self) -> None:
        def leases() -> int:
            return sum(count for (_, kind), count in self.cluster.network.received_messages.items() if kind == LEASE)

        before = leases()
        while leases() == before:  # noqa: ASYNC110 - virtual time is free
            await trio.sleep(self.cluster.network.latency_seconds / 2)

    async def _do(self, fault: Fault) -> None:
        """Make the fault, if it can be made, and undo it when its time is over."""
        targets = self.cast.targets(fault)
        if not targets or (fault.moment == "repair" and self._is_repaired):
            return
        self.made.append(fault)
        node = self.cluster.node_of(self.rng.choice(targets))
        assert node is not None
        self.cast.strike(node.node_id)
        log.info("%.3f: %s %s (%s)", shared_time(), fault.deed, fault.part, node.node_id)
        network = self.cluster.network
        everyone = [other.node_id for other in self._live() if other is not node]
        self.over_at = max(self.over_at, shared_time())
        if math.isfinite(fault.seconds):
            self.over_at = max(self.over_at, shared_time() + fault.seconds)
        match fault.deed:
            case "kill":
                self._kill(node)
            case "leave":
                await self._leave(node)
            case "stop":
                self.cluster.stop(node)
            case "kill runner":
                for runner in self.cluster.fabric.runners_of(node.node_id):
                    runner.die("killed by SIGKILL")
            case "hang runner" | "freeze runner":
                for runner in self.cluster.fabric.runners_of(node.node_id):
                    runner.hang(frozen=fault.deed == "freeze runner")
            case "step clocks":
                node.clocks.wall_ahead_seconds += self.rng.choice((HOUR_SECONDS, -HOUR_SECONDS))
            case "cut off":
                network.cut([node.node_id], everyone)
            case "deafen":
                network.cut(everyone, [node.node_id], one_way=True)
            case "mute":
                network.cut([node.node_id], everyone, one_way=True)
            case "cut from origin":
                network.cut([node.node_id], [self.origin.node_id])
            case "cut from next":
                network.cut([node.node_id], [self.cast.after(node.node_id)])
            case "mute to next":
                network.cut([node.node_id], [self.cast.after(node.node_id)], one_way=True)
            case "deafen to next":
                network.cut([self.cast.after(node.node_id)], [node.node_id], one_way=True)
            case "stall channels":
                network.block_channels([node.node_id], everyone)
            case "split":
                rest = self.rng.sample(everyone, len(everyone) + 1 - self.scenario.stages)
                network.cut(rest, [other for other in (*everyone, node.node_id) if other not in rest])
            case _:
                raise ValueError(f"{fault.deed}: a simulated machine has no such thing")
        if not math.isfinite(fault.seconds):
            return
        if fault.deed in {"stop", "cut off"}:
            self._nursery.start_soon(self._see_it_forgotten, node, fault.seconds)
        await trio.sleep(fault.seconds)
        if fault.deed == "kill":
            await self.cluster.restart(node)
            self.dead.discard(node.node_id)
        elif fault.deed == "stop":
            self.cluster.resume(node)
        else:
            network.heal()
        log.info("%.3f: %s %s is over", shared_time(), fault.deed, fault.part)

    async def _see_it_forgotten(self, vanished: SimNode, seconds: float) -> None:
        """Once it has been away for FREED_SECONDS, nobody computes for it."""
        if seconds <= FREED_SECONDS:
            return
        await trio.sleep(FREED_SECONDS)
        for runner in self.cluster.fabric.runners:
            for channel, _ in runner.sessions.values():
                if channel.origin == vanished.node_id != runner.node_id:
                    self._in_vain.add(f"4: {runner.node_id} computes for {vanished.node_id}, which has vanished")

    async def _leave(self, node: SimNode) -> None:
        """As the agent does it; then its process ends."""
        with node.clocks.worn():
            await node.serving.leave("node left")
            await node.mesh.leave()
        for connection, _ in self._connections.pop(node.node_id, ()):
            connection.cancel()  # of those whose answers came to their end, nobody notices
        self.dead.add(node.node_id)
        self.cluster.kill(node)
        self.over_at = max(self.over_at, shared_time())

    def _kill(self, node: SimNode) -> None:
        self.dead.add(node.node_id)
        for connection, answer in self._connections.pop(node.node_id, ()):
            if math.isnan(answer.ended_at):
                answer.origin_was_lost = True
                connection.cancel()
        self.cluster.kill(node)

    # --- afterwards -----------------------------------------------------------------------------

    async def _serves_again(self) -> list[str]:
        """Once the lost are back: what is not as promised of an answer from who told its client that there is no room."""
        for node in [node for node in self.cluster.nodes if node.node_id in self.dead]:
            await self.cluster.restart(node)
        self.dead.clear()
        await meet(self._live)
        prompt = tuple(range(PROMPT_TOKENS))
        answer = Answer("again", exact_answer(prompt, self.seed, TOKENS), DEADLINE_SECONDS, shared_time())
        await self._ask(answer, self.origin, prompt, self.seed)
        return answer_violations(answer, "success")


async def come_to_rest(
    cluster: Cluster, before: Sequence[Reading], live: Callable[[], Sequence[SimNode]]
) -> tuple[float, list[str]]:
    """(seconds until all is as before, what is not in time), of a cluster of which nobody wants anything any more."""

    async def left(violations: Callable[[Sequence[Reading]], list[str]], seconds: float) -> list[str]:
        """Of them, after so long."""
        found: list[str] = []
        with trio.move_on_after(seconds):
            while found := violations([read_node(cluster, node) for node in live()]):  # noqa: ASYNC110 - as `meet`
                await trio.sleep(0.05)
        return found

    start = shared_time()
    found = await left(lambda after: trace_violations(before, after), REST_SECONDS)
    await meet(live)
    found += await left(lambda after: rest_violations(before, after), REST_SECONDS)
    settled = shared_time() - start
    return settled, [*dict.fromkeys(found), *await left(kept_violations, KEPT_SECONDS)]


async def meet(live: Callable[[], Sequence[SimNode]]) -> None:
    """Until all live nodes see each other, or they had time enough."""
    everyone = frozenset(node.node_id for node in live())
    with trio.move_on_after(MEET_SECONDS):
        while any(node.sees() != everyone for node in live()):  # noqa: ASYNC110 - virtual time is free
            await trio.sleep(0.05)


def _held(node: SimNode) -> frozenset[tuple[InstanceId, int, int]]:
    """(instance, epoch, seat) of the seats that should have a runner now, by the node's own card."""
    with node.clocks.worn():
        seats = node.serving.ports.own_card().seats
    return frozenset(
        (seat.instance_id, seat.epoch, seat.seat_index) for seat in seats if seat.state not in {"leased", "failed"}
    )


def read_node(cluster: Cluster, node: SimNode) -> Reading:
    """What the node says of itself."""
    serving = node.serving
    runners = cluster.fabric.runners_of(node.node_id)
    return Reading(
        node=node.node_id,
        members=node.sees(),
        instances=tuple(sorted((i.instance_id, i.epoch, i.placement.placement_id, i.state) for i in node.instances())),
        requests=serving.sessions.count,
        sessions=sum(len(runner.sessions) for runner in runners),
        runners=len(runners),
        seats=len(_held(node)),
        tasks=node.tasks("Sessions._run", "OriginLinks._keep"),
        cache_bytes=sum(sum(runner.held.values()) for runner in runners),
        kept_bytes=sum(runner.kept for runner in runners),
    )
