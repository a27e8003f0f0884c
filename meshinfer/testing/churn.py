"""What churn costs, on simulated agents: two figures that a reader can compare with others'.

    goodput   tokens of good answers a second, while nodes die and come back by a Poisson process
    gaps      between the tokens of an answer on other nodes, with and without a failure beside it

A third, one answer while its stages fail, is `failing_stages`.

Virtual time: what is measured is what the protocol waits for, and what a step, a load and a prompt are said to
take (`chaos_room.SPEED`). What a real machine adds is in the table of real processes.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import trio
import trio.testing

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import ModelId
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.requests import Generated, GenerateRequest
from meshinfer.testing.cards import model_card
from meshinfer.testing.chaos import Answer, answer_violations
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED, Witness, come_to_rest, read_node, replays
from meshinfer.testing.cluster import Cluster, SimNode
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.wire.messages import Place

STAGES = 3
"""As many nodes as the model needs, at `NODE_BYTES` each."""
CLIENTS = 4
WORKLOAD = Workload(context_tokens=256, concurrency=CLIENTS)
"""Nobody waits for a place: what goodput loses, it loses to churn."""
TOKENS = 60
DEADLINE_SECONDS = 60.0
DEAD_SECONDS = 10.0


@dataclass(slots=True)
class Goodput:
    """Some clients that ask again and again."""

    seconds: float
    answers: int = 0
    errors: dict[str, int] = field(default_factory=dict[str, int])
    """By code; a request that ended with its origin counts as none."""
    with_their_origin: int = 0
    tokens: int = 0
    """Of good answers."""
    wrong: int = 0
    deaths: int = 0
    pauses: list[float] = field(default_factory=list[float])
    """Of each good answer: the longest wait for its next token, the first included."""
    violations: list[str] = field(default_factory=list[str])
    """Of the promises of `testing.chaos`: to each client, and by all nodes once clients have gone and the dead are back.
    An error is none while too few nodes live, or the one that was asked, just back, has met too few."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def goodput(
    mean_life_seconds: float, seed: int, *, seconds: float = 300.0, nodes: int = 8, clients: int = CLIENTS
) -> Goodput:
    """`clients` ask for TOKENS each, again and again, of whichever node lives, while nodes die and restart DEAD_SECONDS later.

    Args:
        mean_life_seconds: of every node; infinite for none.
        seed: of the deaths.
        seconds: of virtual time.
        nodes: of which the model needs STAGES.
        clients: at once.
    """
    rng = random.Random(f"{mean_life_seconds} {seed}")  # noqa: S311 - it replays
    found = Goodput(seconds)

    async def main() -> None:
        cluster = Cluster(rng, memory_bytes=NODE_BYTES, speed=SPEED)
        async with cluster.running(nodes):
            await _Churn(cluster, rng, mean_life_seconds, found).play(clients)

    replays(seed)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return found


class _Churn:
    def __init__(self, cluster: Cluster, rng: random.Random, mean_life_seconds: float, found: Goodput) -> None:
        self._cluster, self._rng, self._mean_life_seconds, self._found = cluster, rng, mean_life_seconds, found
        self._connections: dict[SimNode, set[trio.CancelScope]] = defaultdict(set)
        """By origin; a client's end of its connection."""
        self._few_until = -math.inf
        """When fewer than STAGES nodes lived last; infinite while they do."""

    async def play(self, clients: int) -> None:
        cluster, found = self._cluster, self._found
        witness = Witness(cluster)
        cluster.fabric.witness = witness
        names = [node.name for node in cluster.nodes]
        for node in cluster.nodes:  # links that stay for the next request belong to the state before
            await cluster.ask(node, cluster.request((1, 2), 1, workload=WORKLOAD))
        before = [read_node(cluster, node) for node in cluster.nodes]
        async with trio.open_nursery() as watching:
            watching.start_soon(witness.watch_memory)
            with trio.move_on_after(found.seconds):
                async with trio.open_nursery() as nursery:
                    for number in range(clients):
                        nursery.start_soon(self._client, number)
                    if math.isfinite(self._mean_life_seconds):
                        for name in names:
                            nursery.start_soon(self._die_and_rise, name)
            for node in [self._last(name) for name in names]:
                if node not in cluster.live():
                    await cluster.restart(node)
            _, rest = await come_to_rest(cluster, before, cluster.live)
            found.violations += [*rest, *witness.violations]
            watching.cancel_scope.cancel()

    async def _client(self, number: int) -> None:
        for count in itertools.count(1):
            origin = self._rng.choice(self._cluster.live())
            prompt, seed = (number, count % 200), number * 1000 + count
            expected = exact_answer(prompt, seed, TOKENS)
            answer = Answer(f"{number} ({count})", expected, DEADLINE_SECONDS, trio.current_time())
            has_met_few = len(origin.sees()) < STAGES
            with trio.CancelScope() as connection:
                self._connections[origin].add(connection)
                request = self._cluster.request(prompt, TOKENS, seed, DEADLINE_SECONDS, workload=WORKLOAD)
                await self._ask(origin, request, answer)
            self._connections[origin].discard(connection)
            answer.origin_was_lost = connection.cancelled_caught
            self._count(answer, may_fail=has_met_few or self._few_until >= answer.asked_at)
            if answer.error and not answer.origin_was_lost:
                await trio.sleep(1)

    async def _ask(self, origin: SimNode, request: GenerateRequest, answer: Answer) -> None:
        answer.error = "connection"  # as long as it did not end
        try:
            async with origin.serving.sessions.generate(request) as events:
                async for event in events:
                    if isinstance(event, Generated):
                        answer.got.append(event.token_id)
                        answer.times.append(trio.current_time())
            answer.error = ""
        except MeshinferError as error:
            answer.error, answer.said = error.code, str(error)
        finally:
            answer.ended_at = trio.current_time()

    def _count(self, answer: Answer, *, may_fail: bool) -> None:
        found = self._found
        violations = answer_violations(answer, "either" if may_fail else "success")
        found.violations += violations
        if answer.origin_was_lost:
            found.with_their_origin += 1
        elif answer.error:
            found.errors[answer.error] = found.errors.get(answer.error, 0) + 1
        else:
            found.answers += 1
            found.wrong += bool(violations)
            found.tokens += 0 if violations else len(answer.got)
            found.pauses.append(answer.pause_seconds)

    async def _die_and_rise(self, name: str) -> None:
        cluster = self._cluster
        while True:
            await trio.sleep(self._rng.expovariate(1 / self._mean_life_seconds))
            node = self._last(name)
            self._found.deaths += 1
            for connection in self._connections.pop(node, set()):
                connection.cancel()
            cluster.kill(node)
            if len(cluster.live()) < STAGES:
                self._few_until = math.inf
            await trio.sleep(DEAD_SECONDS)
            await cluster.restart(node)
            if math.isinf(self._few_until) and len(cluster.live()) >= STAGES:
                self._few_until = trio.current_time()

    def _last(self, name: str) -> SimNode:
        """Of that name, the one that was started last."""
        return [node for node in self._cluster.nodes if node.name == name][-1]


def gaps(seed: int, *, failure: bool) -> list[float]:
    """Seconds between the tokens of an answer of one model, while (or not) a node of another model's instance dies."""
    rng = random.Random(seed)  # noqa: S311 - it replays
    other = model_card(layer_bytes=(8 * MIB,) * 8, model_id=ModelId("phantom/other"))
    times: list[float] = []

    async def main() -> None:
        cluster = Cluster(rng, memory_bytes=NODE_BYTES, others=(other,), speed=SPEED)
        async with cluster.running(2 * STAGES + 1):
            nodes = [node.node_id for node in cluster.nodes]
            halves = {cluster.model.model_id: nodes[:STAGES], other.model_id: nodes[STAGES : 2 * STAGES]}
            for model_id, half in halves.items():
                constraints = Constraints(nodes=tuple(half))
                await cluster.nodes[0].serving.placer.place(Place(model_id, WORKLOAD, constraints))
            await cluster.until(lambda: [i.state for i in cluster.nodes[0].instances()] == ["ready", "ready"])
            here, there = cluster.nodes[0], cluster.nodes[STAGES]
            victim = cluster.nodes[STAGES + 1]

            async def beside() -> None:
                await cluster.ask(there, cluster.request((5,), 80, 5, model_id=other.model_id))

            def on_token(index: int) -> None:
                times.append(trio.current_time())
                if failure and index == 20:
                    cluster.kill(victim)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(beside)
                await cluster.ask(here, cluster.request((1,), 120, 3), on_token)

    replays(seed)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return [after - before for before, after in pairwise(times)]
