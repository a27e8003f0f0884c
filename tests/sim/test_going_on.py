"""Of several instances of a model not each will do for an answer that has begun: where it goes on."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
from whole_agents import SMALL_MODEL, cluster_of_small_model, place, simulate

from meshinfer.base.ids import NodeId
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.placing import Begun, Placer
from meshinfer.serving.sessions import LESS_ROOM_SECONDS, NO_ROOM_SECONDS
from meshinfer.testing.cards import model_card
from meshinfer.testing.chaos_room import SPEED
from meshinfer.testing.cluster import Cluster
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import Place


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
                SMALL_MODEL.model_id, workload, lambda _: None, tokens=60, begun=Begun(digest, 60)
            )
            return found.placement.node_ids

        assert await nodes_for("another") == (its_node,)
        assert {*await nodes_for(SMALL_MODEL.digest), its_node} == {one.node_id, other.node_id}

    simulate(cluster_of_small_model(), scenario, 3)


HEAVY = model_card(layer_bytes=(8 * MIB,) * 8, kv_elements_per_token=2048)
"""Two nodes hold it for one session of 256 tokens, three for four."""


@pytest.mark.parametrize(("concurrency", "at_most_seconds"), [(1, LESS_ROOM_SECONDS), (4, NO_ROOM_SECONDS)])
def test_an_answer_goes_on_for_as_many_sessions_at_once_as_there_is_room_for(
    concurrency: int, at_most_seconds: float
) -> None:
    """Its origin would reserve four. Where one sufficed, one is asked for soon; where four were there, they may come back."""

    async def scenario(cluster: Cluster) -> None:
        first = cluster.nodes[0]
        await first.serving.placer.place(Place(HEAVY.model_id, Workload(256, concurrency), Constraints()))
        await cluster.until(lambda: [i.state for i in first.instances()] == ["ready"])
        seats = first.instances()[0].placement.node_ids
        origin = next(node for node in cluster.nodes if node.node_id not in seats)
        holders = [node for node in cluster.nodes if node.node_id in seats]
        times: list[float] = []

        def on_token(index: int) -> None:
            times.append(trio.current_time())
            if index == 5:
                for node in holders[:2]:
                    cluster.kill(node)

        request = cluster.request((9, 8), tokens=40, workload=Workload(256, 4))
        assert await cluster.ask(origin, request, on_token) == exact_answer((9, 8), 7, 40)
        assert [i.placement.concurrency for i in origin.instances()] == [1]
        assert max(late - early for early, late in pairwise(times)) < at_most_seconds

    simulate(Cluster(random.Random(1), model=HEAVY, speed=SPEED), scenario, 4)


def test_a_second_fault_before_the_next_token_has_time_of_its_own() -> None:
    """There was room again, and the prompt was read once more, when the node that made it was lost as well."""

    async def scenario(cluster: Cluster) -> None:
        origin, other = cluster.nodes

        async def come_and_go() -> None:
            back = other
            for _ in range(2):
                cluster.kill(back)
                await trio.sleep(5.0)
                back = await cluster.restart(back)
                await cluster.until(lambda: [i.state for i in origin.instances()] == ["ready"])
                await trio.sleep(0.2)

        async with trio.open_nursery() as nursery:

            def on_token(index: int) -> None:
                if index == 5:
                    nursery.start_soon(come_and_go)

            request = cluster.request(tuple(range(150)), tokens=20)
            assert await cluster.ask(origin, request, on_token) == exact_answer(tuple(range(150)), 7, 20)

    slow = replace(SPEED, prefill_seconds_per_token=0.02)
    simulate(Cluster(random.Random(1), speed=slow), scenario, 2)


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
