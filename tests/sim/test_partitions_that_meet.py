"""Both sides of a partition serve; when they meet, one instance goes on, and no answer of the other feels it."""

from __future__ import annotations

from itertools import pairwise

import trio
from whole_agents import three_of

from meshinfer.planning.workload import Workload
from meshinfer.testing.exact_answers import exact_answer

WORKLOAD = Workload(context_tokens=1024, concurrency=1)
TOKENS = 600
"""Some twenty seconds of an answer: ten of it while the mesh is split, and some after that."""
SPLIT_SECONDS = 10.0
FEELS_SECONDS = 0.5
"""Any repair is longer."""


async def test_two_instances_live_on_until_their_answers_have_come_to_an_end(autojump_clock) -> None:
    async with three_of(6) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1, 2), 1, workload=WORKLOAD))
        (instance,) = cluster.nodes[0].instances()
        seats = instance.placement.node_ids
        others = [node.node_id for node in cluster.nodes if node.node_id not in seats]
        sides = [*seats[:1], *others[:2]], [*seats[1:], *others[2:]]
        times: dict[int, list[float]] = {3: [], 4: []}

        async def ask(side: list[str], seed: int) -> None:
            origin = next(node for node in cluster.nodes if node.node_id == side[-1])
            request = cluster.request((seed,), TOKENS, seed, workload=WORKLOAD)
            answer = await cluster.ask(origin, request, lambda _: times[seed].append(trio.current_time()))
            assert answer == exact_answer((seed,), seed, TOKENS)

        async with trio.open_nursery() as nursery:
            for side, seed in zip(sides, times, strict=True):
                nursery.start_soon(ask, side, seed)
            await trio.sleep(2.0)
            cluster.network.cut(*sides)
            await trio.sleep(SPLIT_SECONDS)
            assert len(cluster.fabric.runners) == 6, "each side has its own"
            cluster.network.heal()
            healed = trio.current_time()
            await cluster.until(
                lambda: len({(i.epoch, i.placement) for node in cluster.nodes for i in node.instances()}) == 1
            )
            assert len(cluster.fabric.runners) == 6, "and they live on"
        for came in times.values():
            after = [at for at in came if at > healed]
            assert len(after) > 100, "it lasts for longer than the split"
            assert max(late - early for early, late in pairwise(after)) < FEELS_SECONDS
        await cluster.until(lambda: len(cluster.fabric.runners) == 3)
        (winner,) = cluster.nodes[0].instances()
        assert {runner.node_id for runner in cluster.fabric.runners} == set(winner.placement.node_ids)
