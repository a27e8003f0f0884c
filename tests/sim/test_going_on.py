"""Of several instances of a model not each will do for an answer that has begun: where it goes on."""

from __future__ import annotations

from dataclasses import replace

from whole_agents import SMALL_MODEL, cluster_of_small_model, place, simulate

from meshinfer.base.ids import NodeId
from meshinfer.planning.workload import Workload
from meshinfer.serving.placing import Begun, Placer
from meshinfer.testing.cluster import Cluster
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement


def test_an_answer_goes_on_where_there_is_context_for_it_or_is_placed_anew() -> None:
    """Its instance is lost, and the other one of its model is too small."""

    async def scenario(cluster: Cluster) -> None:
        small, large, _, origin = cluster.nodes
        await place(cluster, origin, small, Workload(64, 1))
        await place(cluster, origin, large, Workload(256, 1))

        def on_token(index: int) -> None:
            if index == 20:
                cluster.kill(large)

        # The operator reserved more than its origin would.
        request = cluster.request((1, 2), tokens=150, workload=Workload(128, 1))
        assert await cluster.ask(origin, request, on_token) == exact_answer((1, 2), 7, 150)
        await cluster.until(lambda: sorted(i.placement.context_tokens for i in origin.instances()) == [64, 152])

    simulate(cluster_of_small_model(), scenario, 4)


def test_an_answer_goes_on_with_the_weights_that_it_began_with_where_some_are() -> None:
    async def scenario(cluster: Cluster) -> None:
        one, other, origin = cluster.nodes
        workload = Workload(64, 1)
        placed = [await place(cluster, origin, node, workload) for node in (one, other)]
        preferred = min(placed)
        (its_node,) = next(i.placement.node_ids for i in origin.instances() if i.instance_id == preferred)

        def of_another_version(card: NodeCard) -> NodeCard:
            def version(placement: Placement) -> Placement:
                return replace(placement, model_digest="another")

            ids = {each.placement_id: version(each).placement_id for each in card.placements}
            seats = tuple(replace(seat, placement_id=ids[seat.placement_id]) for seat in card.seats)
            return replace(card, placements=tuple(map(version, card.placements)), seats=seats)

        def topology() -> Topology:
            now = origin.serving.ports.topology()
            return Topology.of(
                (of_another_version(card) if card.node_id == its_node else card for card in now.nodes), now.links
            )

        placer = Placer(replace(origin.serving.ports, topology=topology), origin.serving.planner)

        async def nodes_for(digest: str) -> tuple[NodeId, ...]:
            found = await placer.ready_instance(
                SMALL_MODEL.model_id, workload, lambda _: None, tokens=60, begun=Begun(digest, 60, workload)
            )
            return found.placement.node_ids

        assert await nodes_for("another") == (its_node,)
        assert {*await nodes_for(SMALL_MODEL.digest), its_node} == {one.node_id, other.node_id}

    simulate(cluster_of_small_model(), scenario, 3)


def test_an_answer_that_goes_on_asks_for_no_more_than_sufficed_where_it_began() -> None:
    """An operator placed it for one session; its origin would reserve four, which may fit nowhere."""

    async def scenario(cluster: Cluster) -> None:
        begun = Begun(SMALL_MODEL.digest, 60, Workload(64, 1))
        placer = cluster.nodes[0].serving.placer
        found = await placer.ready_instance(SMALL_MODEL.model_id, Workload(128, 4), lambda _: None, begun=begun)
        assert (found.placement.context_tokens, found.placement.concurrency) == (64, 1)

    simulate(cluster_of_small_model(), scenario, 2)


def test_who_finds_an_instance_broken_asks_for_no_more_sessions_at_once_than_it_was_placed_for() -> None:
    async def scenario(cluster: Cluster) -> None:
        holder, origin = cluster.nodes
        await place(cluster, origin, holder, Workload(64, 1))
        for runner in cluster.fabric.runners_of(holder.node_id):
            runner.die("killed by SIGKILL")
        await cluster.until(lambda: [i.state for i in origin.instances()] == ["broken"])
        found = await origin.serving.placer.ready_instance(SMALL_MODEL.model_id, Workload(128, 4), lambda _: None)
        assert (found.placement.context_tokens, found.placement.concurrency) == (128, 1)

    simulate(cluster_of_small_model(), scenario, 2)
