"""A lid opens: everyone seems silent to whoever slept, and it takes nothing for itself."""

from __future__ import annotations

import math

import trio
from whole_agents import cluster_of_small_model, simulate

from meshinfer.mesh import membership_driver
from meshinfer.mesh.mesh import Mesh
from meshinfer.mesh.waking import ALONE_SECONDS, WAKING_SECONDS
from meshinfer.planning.workload import Constraints
from meshinfer.serving.election import elect
from meshinfer.testing.cluster import WORKLOAD, Cluster
from meshinfer.wire.messages import Place

SLEEPS_SECONDS = 4.0
"""The others have made the instance whole after three."""


def test_a_node_that_has_just_come_to_leaves_its_instance_to_those_who_have_made_it_whole(monkeypatch) -> None:
    """Simulated nodes share one clock, so when it comes to is told to its mesh; that it hears nobody till then is played."""
    wakes: dict[str, float] = {}

    def is_waking(mesh: Mesh) -> bool:
        return trio.current_time() < wakes.get(mesh.node_id, -math.inf) + WAKING_SECONDS

    monkeypatch.setattr(Mesh, "is_waking", is_waking)

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


def test_a_machine_that_was_suspended_is_waking_until_it_has_heard_somebody(monkeypatch) -> None:
    """The clock of all timers does not count that sleep."""
    slept = 0.0
    monkeypatch.setattr(membership_driver, "suspended_seconds", lambda: slept)

    async def scenario(cluster: Cluster) -> None:
        nonlocal slept
        sleeper, *others = cluster.nodes
        assert not sleeper.mesh.is_waking()
        cluster.network.cut([sleeper.node_id], [node.node_id for node in others])
        slept = 3600.0  # of the machine, so of each node: this one alone finds its network gone
        assert sleeper.mesh.is_waking()
        await trio.sleep(WAKING_SECONDS + 1.0)
        assert (sleeper.mesh.is_waking(), others[0].mesh.is_waking()) == (True, False)
        cluster.network.heal()
        assert await cluster.until(lambda: not sleeper.mesh.is_waking()) < ALONE_SECONDS - WAKING_SECONDS - 1.0

    simulate(cluster_of_small_model(), scenario, 3)
