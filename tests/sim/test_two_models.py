"""Two models that are asked for at once: each planner learns of the other's leases a moment too late."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import trio
from whole_agents import simulate

from meshinfer.base.ids import ModelId
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.election import elect
from meshinfer.testing.cards import model_card
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED, replays
from meshinfer.testing.cluster import WORKLOAD, Cluster
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.wire.messages import Place

SMALL = replace(model_card(layer_bytes=(2 * MIB,) * 6), model_id=ModelId("phantom/small"), digest="5a" * 24)


@pytest.mark.parametrize("seed", [1, 5, 7, 11])
def test_both_are_placed_where_both_fit(seed: int) -> None:
    """Seeds at which a seat was refused to one planner, since the other had just leased the memory that its card showed free."""

    async def scenario(cluster: Cluster) -> None:
        async def client(model_id: ModelId, at: float) -> None:
            await trio.sleep(at)
            origin = rng.choice(cluster.nodes[:2])
            request = cluster.request((1, 2), tokens=5, model_id=model_id, workload=Workload(256, 4))
            assert await cluster.ask(origin, request) == exact_answer((1, 2), 7, 5)

        async with trio.open_nursery() as nursery:
            for k in range(8):
                model_id = cluster.model.model_id if k % 3 else SMALL.model_id
                nursery.start_soon(client, model_id, rng.uniform(0, 0.2))

    replays(seed)
    rng = random.Random(seed)
    simulate(Cluster(rng, memory_bytes=NODE_BYTES, others=(SMALL,), speed=SPEED), scenario, 7)


def test_many_requests_that_wait_for_one_model_to_be_placed_hold_up_no_other() -> None:
    """One node plans both. It waits for two nodes whose lids were closed, and all its calls from that origin would."""

    async def scenario(cluster: Cluster) -> None:
        ids = [node.node_id for node in cluster.nodes]
        planner = next(node for node in cluster.nodes if node.node_id == elect(cluster.model.model_id, ids)[0])
        origin, *others = (node for node in cluster.nodes if node is not planner)
        on_planner = Constraints(nodes=(planner.node_id,))
        await origin.serving.placer.place(Place(SMALL.model_id, WORKLOAD, on_planner))
        await cluster.until(lambda: [i.state for i in origin.instances()] == ["ready"])
        for node in others[:2]:
            cluster.stop(node)
        asked_at = trio.current_time() + 0.2

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(cluster.ask, origin, cluster.request((1, 2), tokens=5))
            await trio.sleep_until(asked_at)
            request = cluster.request((1, 2), tokens=1, model_id=SMALL.model_id)
            assert await cluster.ask(origin, request) == exact_answer((1, 2), 7, 1)
            assert trio.current_time() < asked_at + 0.5

    simulate(Cluster(random.Random(1), others=(SMALL,), speed=SPEED), scenario, 5)
