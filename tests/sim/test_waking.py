"""A lid opens: everyone seems silent to whoever slept, and it takes nothing for itself."""

from __future__ import annotations

import math

import trio
from whole_agents import cluster_of_small_model, simulate

from meshinfer.mesh.mesh import Mesh
from meshinfer.planning.workload import Constraints
from meshinfer.serving.election import elect
from meshinfer.testing.cluster import WORKLOAD, Cluster
from meshinfer.wire.messages import Place

SLEEPS_SECONDS = 4.0
"""The others have made the instance whole after three."""


def test_a_node_that_has_just_come_to_leaves_its_instance_to_those_who_have_made_it_whole(monkeypatch) -> None:
    """Simulated nodes share one clock, so when it comes to is told to its mesh; that it hears nobody till then is played."""
    wakes: dict[str, float] = {}
    monkeypatch.setattr(Mesh, "woke_at", lambda self: wakes.get(self._own, -math.inf))

    async def scenario(cluster: Cluster) -> None:
        model_id = cluster.model.model_id
        ids = {node.node_id for node in cluster.nodes}
        sleeper = next(node for node in cluster.nodes if node.node_id == elect(model_id, ids)[0])
        others = [node for node in cluster.nodes if node is not sleeper]
        two_each = Constraints(layers=((sleeper.node_id, 2), (others[0].node_id, 2)))
        await sleeper.serving.placer.place(Place(model_id, WORKLOAD, two_each))
        await cluster.until(lambda: all([i.state for i in node.instances()] == ["ready"] for node in cluster.nodes))
        # It could: one node holds all of the model.
        wakes[sleeper.node_id] = trio.current_time() + SLEEPS_SECONDS
        cluster.network.cut({sleeper.node_id}, ids - {sleeper.node_id})
        for node in others:
            cluster.network.disconnect(sleeper.node_id, node.node_id)
        await trio.sleep(SLEEPS_SECONDS)
        (whole,) = others[0].instances()
        assert (whole.state, whole.epoch) == ("ready", 2)
        cluster.network.heal()
        await trio.sleep(20.0)
        for node in cluster.nodes:
            assert [(i.state, i.epoch, i.placement) for i in node.instances()] == [("ready", 2, whole.placement)]
        assert {runner.node_id for runner in cluster.fabric.runners} == set(whole.placement.node_ids)

    simulate(cluster_of_small_model(), scenario, 3)
