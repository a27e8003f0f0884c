"""What a runner sees of its frames is told of the link that they came over, and of no other."""

from __future__ import annotations

import random

import pytest
import trio
from whole_agents import simulate

from meshinfer.base.ids import NodeId
from meshinfer.mesh.link_probe import ARRIVALS_APART_SECONDS
from meshinfer.planning.workload import Constraints
from meshinfer.testing.cluster import WORKLOAD, Cluster
from meshinfer.topology.speed import LinkSpeed
from meshinfer.wire.messages import Place

QUICK, SLOW = 100e6, 4e6


def test_frames_tell_of_the_link_from_the_seat_that_sent_them() -> None:
    async def scenario(cluster: Cluster) -> None:
        origin, everyone = cluster.nodes[0], [node.node_id for node in cluster.nodes]
        pairs = [(one, other) for one in everyone for other in everyone if one != other]

        def rates() -> dict[tuple[NodeId, NodeId], float]:
            known = origin.mesh.topology().link_between
            return {pair: known[pair].bandwidth_bytes_per_second for pair in pairs if pair in known}

        await cluster.until(lambda: len(rates()) == len(pairs) and all(rates().values()), 60)
        placed = await origin.serving.planner.place(Place(cluster.model.model_id, WORKLOAD, Constraints()))
        await cluster.until(lambda: [each.state for each in origin.instances()] == ["ready"])
        first, second = placed.placement.node_ids
        (receiver,) = cluster.fabric.runners_of(second)
        for _ in range(4):
            receiver.large_frame_came(0, int(SLOW), 1.0)
            await trio.sleep(ARRIVALS_APART_SECONDS + 1)
        receiver.large_frame_came(7, int(SLOW), 1.0)  # a seat that there is not
        await trio.sleep(2)
        now = rates()
        assert now.pop((first, second)) == pytest.approx(SLOW, rel=0.2)
        assert all(rate == pytest.approx(QUICK, rel=0.3) for rate in now.values()), now

    simulate(Cluster(random.Random(3), truth=lambda _source, _target, _host: LinkSpeed(1e-4, QUICK, 4e-5)), scenario, 3)
