"""What churn costs, on simulated agents: two figures that a reader can compare with others'.

    goodput   tokens of good answers a second, while nodes die and come back by a Poisson process
    gaps      between the tokens of an answer on other nodes, with and without a failure beside it

A third, one answer while its stages fail, is `failing_stages`.

Virtual time: what is measured is what the protocol waits for, and what a step, a load and a prompt are said to
take (`chaos_room.SPEED`). What a real machine adds is in the table of real processes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import trio
import trio.testing

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import ModelId
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints
from meshinfer.testing.cards import model_card
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED, replays
from meshinfer.testing.cluster import WORKLOAD, Cluster, SimNode
from meshinfer.testing.engine import exact_answer
from meshinfer.wire.messages import Place

STAGES = 3
"""As many nodes as the model needs, at `NODE_BYTES` each."""


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

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def goodput(
    mean_life_seconds: float, seed: int, *, seconds: float = 300.0, nodes: int = 8, clients: int = 4
) -> Goodput:
    """`clients` ask for 60 tokens each, again and again, of whichever node lives, while nodes die and restart after 10 s.

    Args:
        mean_life_seconds: of every node; infinite for none.
        seed: of the deaths.
        seconds: of virtual time.
        nodes: of which the model needs STAGES.
        clients: at once.
    """
    rng = random.Random(f"{mean_life_seconds} {seed}")  # noqa: S311 - it replays
    found = Goodput(seconds)
    scopes: dict[SimNode, set[trio.CancelScope]] = {}

    async def client(cluster: Cluster, number: int) -> None:
        count = 0
        while True:
            count += 1
            origin = rng.choice(cluster.live())
            prompt, key = (number, count % 200), number * 1000 + count
            times = [trio.current_time()]

            def on_token(_index: int, times: list[float] = times) -> None:
                times.append(trio.current_time())

            with trio.CancelScope() as connection:
                scopes.setdefault(origin, set()).add(connection)
                try:
                    got = await cluster.ask(origin, cluster.request(prompt, 60, key), on_token)
                except MeshinferError as error:
                    found.errors[error.code] = found.errors.get(error.code, 0) + 1
                    await trio.sleep(1)
                else:
                    found.answers += 1
                    found.pauses.append(max(after - before for before, after in pairwise(times)))
                    found.tokens += len(got)
                    found.wrong += got != exact_answer(prompt, key, 60)
            scopes.get(origin, set[trio.CancelScope]()).discard(connection)
            if connection.cancelled_caught:
                found.with_their_origin += 1

    async def die_and_rise(cluster: Cluster, name: int) -> None:
        while True:
            await trio.sleep(rng.expovariate(1 / mean_life_seconds))
            node = [node for node in cluster.nodes if node.name == f"node{name}"][-1]
            found.deaths += 1
            for connection in scopes.pop(node, set()):
                connection.cancel()
            cluster.kill(node)
            await trio.sleep(10)
            await cluster.restart(node)

    async def main() -> None:
        cluster = Cluster(rng, memory_bytes=NODE_BYTES, speed=SPEED)
        async with cluster.running(nodes):
            await cluster.ask(cluster.nodes[0], cluster.request((1, 2), 1))
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    for number in range(clients):
                        nursery.start_soon(client, cluster, number)
                    if math.isfinite(mean_life_seconds):
                        for name in range(nodes):
                            nursery.start_soon(die_and_rise, cluster, name)

    replays(seed)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return found


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
