"""Placing when something comes in between: deletions, nodes without a connection, commits that fail.

Whole agents, exact engine, virtual time (`test_serving` has the ordinary course of things).
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import trio
import trio.testing
import whole_agents

from meshinfer.base.errors import DeadlineExceeded, NoRoom, PeerLost, Refused
from meshinfer.base.ids import ModelId, NodeId, PlacementId, instance_id_for
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.elected_planner import PLANNINGS, ElectedPlanner
from meshinfer.serving.election import elect
from meshinfer.serving.placing import Begun, Placer
from meshinfer.serving.requests import Waiting
from meshinfer.serving.sessions import Sessions
from meshinfer.serving.view import Instance
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED
from meshinfer.testing.cluster import WORKLOAD, Cluster, SimNode
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.topology.card import LAST_EPOCH
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import COMMIT, LEASE, Deletion, Lease, LeaseAnswer, Place, SeatRef


def simulate(scenario: Callable[[Cluster], Awaitable[None]], count: int) -> None:
    whole_agents.simulate(Cluster(random.Random(1)), scenario, count)


async def one_ready(cluster: Cluster) -> Instance:
    """The instance that a request brings into being, as all see it."""
    await cluster.ask(cluster.nodes[0], cluster.request((1,), tokens=2))
    await cluster.until(lambda: all([i.state for i in node.instances()] == ["ready"] for node in cluster.nodes))
    return cluster.nodes[0].instances()[0]


def apart(cluster: Cluster, instance: Instance) -> tuple[list[SimNode], list[SimNode]]:
    """Nodes with a seat of it, in the order of seats, and nodes without."""
    by_id = {node.node_id: node for node in cluster.nodes}
    holders = [by_id[node_id] for node_id in instance.placement.node_ids]
    return holders, [node for node in cluster.nodes if node not in holders]


@pytest.mark.parametrize("after_seconds", [0.0005, 0.002])
def test_a_node_leaves_also_when_what_it_hands_over_is_deleted(after_seconds: float) -> None:
    async def scenario(cluster: Cluster) -> None:
        instance = await one_ready(cluster)
        (leaver, *_), (other, *_) = apart(cluster, instance)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaver.serving.leave, "node left")
            await trio.sleep(after_seconds)
            await other.serving.placer.delete(instance.instance_id)
        assert leaver.serving.ports.own_card().seats == ()
        assert cluster.fabric.runners_of(leaver.node_id) == []

    simulate(scenario, 4)


def test_who_asks_after_a_deletion_is_not_given_what_is_about_to_vanish() -> None:
    async def scenario(cluster: Cluster) -> None:
        instance = await one_ready(cluster)
        _, (planner, *_) = apart(cluster, instance)
        await planner.serving.seats.delete(Deletion(instance.instance_id, instance.epoch))
        assert planner.instances() == (instance,), "its holders have not heard of it"
        ask = Place(cluster.model.model_id, WORKLOAD, Constraints(), instance.placement)
        placed = await planner.serving.planner.place(ask)
        assert (placed.instance_id, placed.placement) == (instance.instance_id, instance.placement)
        assert placed.epoch > instance.epoch
        await cluster.until(lambda: [(i.epoch, i.state) for i in planner.instances()] == [(placed.epoch, "ready")])

    simulate(scenario, 4)


def test_a_request_takes_the_instance_that_has_context_for_it_and_goes_on_there_after_a_repair() -> None:
    async def scenario(cluster: Cluster) -> None:
        origin, small, large = cluster.nodes[0], Workload(64, 1), Workload(256, 1)
        for count, workload in enumerate((small, large), start=1):
            await origin.serving.placer.place(Place(cluster.model.model_id, workload, Constraints()))
            await cluster.until(lambda count=count: [i.state for i in origin.instances()] == ["ready"] * count)
        (fits,) = (i for i in origin.instances() if i.placement.context_tokens == 256)
        assert fits.instance_id > min(i.instance_id for i in origin.instances()), "else it would be taken anyway"

        def on_token(index: int) -> None:
            if index == 40:
                victim = next(node for node in fits.placement.node_ids if node != origin.node_id)
                cluster.kill(cluster.node_of(victim))

        request = cluster.request((1, 2), 150, workload=large)
        assert await cluster.ask(origin, request, on_token) == exact_answer((1, 2), 7, 150)

    whole_agents.simulate(Cluster(random.Random(1), memory_bytes=NODE_BYTES, speed=SPEED), scenario, 9)


def test_a_planner_that_missed_a_deletion_places_at_the_first_request_after_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        instance = await one_ready(cluster)
        await cluster.nodes[0].serving.placer.delete(instance.instance_id)
        await cluster.until(lambda: all(node.instances() == () for node in cluster.nodes))
        first = elect(cluster.model.model_id, [node.node_id for node in cluster.nodes])[0]
        planner = next(node for node in cluster.nodes if node.node_id == first)
        cluster.kill(planner)
        await cluster.restart(planner)  # it remembers no epoch, the others do
        await cluster.settle(cluster.live())
        other = next(node for node in cluster.live() if node.node_id != first)
        placed = await other.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, Constraints()))
        assert placed.epoch > instance.epoch + 1, "above the deletion"
        await cluster.until(lambda: [i.state for i in other.instances()] == ["ready"])

    simulate(scenario, 4)


def test_in_a_large_mesh_seats_and_origins_need_no_connection_beforehand() -> None:
    async def scenario(cluster: Cluster) -> None:
        node = min(cluster.nodes, key=lambda node: len(node.transport.peers()))
        near = node.transport.peers() | {node.node_id}
        assert len(near) < len(cluster.nodes) - 1, "nothing is shown if it is connected to all"
        far = Constraints(exclude=tuple(sorted(near)))
        placed = await node.serving.planner.place(Place(cluster.model.model_id, WORKLOAD, far))
        assert near.isdisjoint(placed.placement.node_ids)
        await cluster.until(lambda: [i.state for i in node.instances()] == ["ready"])
        assert len(await cluster.ask(node, cluster.request((1,), tokens=3))) == 3
        near = node.transport.peers()
        freed, unconfirmed = await node.serving.placer.delete(placed.instance_id)
        assert (set(freed), unconfirmed) == (set(placed.placement.node_ids), ())
        repairer = elect(cluster.model.model_id, [each.node_id for each in cluster.nodes])[0]
        assert node.transport.peers() <= near | {repairer}, "who has nothing of it is not connected to for that"

    simulate(scenario, 20)


def test_nodes_that_do_not_answer_are_planned_without_a_few_times_and_named_in_the_end() -> None:
    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        asked: list[NodeId] = []

        async def silent(peer: NodeId, *_: object) -> bytes:
            asked.append(peer)
            await trio.lowlevel.checkpoint()
            raise PeerLost(f"not connected to {peer}")

        # Two of them always are enough for the model, so there is always another plan.
        planner = ElectedPlanner(replace(node.serving.ports, call=silent), node.serving.seats)
        with pytest.raises(NoRoom, match=r"no candidate could be leased: .*not connected to"):
            await planner.place(Place(cluster.model.model_id, WORKLOAD, Constraints(exclude=(node.node_id,))))
        assert len(asked) <= PLANNINGS * 2
        few = Constraints(nodes=tuple(other.node_id for other in cluster.nodes[1:3]))
        with pytest.raises(NoRoom, match="do not answer: node1, node2"):
            await planner.place(Place(cluster.model.model_id, WORKLOAD, few))

    simulate(scenario, 12)


@pytest.mark.parametrize("planner_holds", [True, False])
def test_what_gave_way_to_a_commit_that_failed_is_not_said_to_be_there(planner_holds: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        instance = await one_ready(cluster)
        (head, far), (other,) = apart(cluster, instance)

        async def lapsed(_peer: NodeId, _payload: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            raise Refused("nothing is leased here")

        other.transport.serve(COMMIT, lapsed)
        planner = head if planner_holds else far
        ask = Place(cluster.model.model_id, WORKLOAD, Constraints(), None, (far.node_id,))
        with pytest.raises(NoRoom, match="nothing is leased here"):
            await planner.serving.planner.place(ask)

    simulate(scenario, 3)


def test_a_silent_seat_is_asked_once_though_another_says_that_the_epoch_is_stale() -> None:
    async def scenario(cluster: Cluster) -> None:
        node, silent, *_ = cluster.nodes
        epochs: list[tuple[NodeId, int]] = []

        async def call(peer: NodeId, method: str, payload: bytes, timeout_seconds: float) -> bytes:
            if method != LEASE:
                return await node.serving.ports.call(peer, method, payload, timeout_seconds)
            epochs.append((peer, decode(Lease, payload).epoch))
            await trio.lowlevel.checkpoint()
            if peer == silent.node_id:
                raise DeadlineExceeded("no answer")
            return encode(LeaseAnswer(granted=False, newest_epoch=9, why="stale"))

        planner = ElectedPlanner(replace(node.serving.ports, call=call), node.serving.seats)
        others = Constraints(exclude=(node.node_id,))
        with pytest.raises(NoRoom, match="do not answer: node1"):
            await planner.place(Place(cluster.model.model_id, WORKLOAD, others))
        assert sorted(epochs) == [("node1", 1), ("node2", 1)]

    simulate(scenario, 3)


def test_what_was_just_placed_and_is_deleted_is_placed_anew() -> None:
    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        instance_id = instance_id_for(cluster.model.model_id, 0)
        ask = Place(cluster.model.model_id, WORKLOAD, Constraints(exclude=(node.node_id,)))
        for other in cluster.nodes[1:]:  # they have seen epochs of which the planner knows nothing
            await other.serving.seats.release(SeatRef(instance_id, 5, PlacementId("c" * 16)))
        placed = await node.serving.planner.place(ask)
        assert placed.epoch == 6
        for each in cluster.nodes:  # by somebody whose view shows what was there before
            await each.serving.seats.delete(Deletion(instance_id, 3))
        again = await node.serving.planner.place(ask)
        assert again.epoch > placed.epoch
        await cluster.until(lambda: [i.state for i in node.instances()] == ["ready"])

    simulate(scenario, 3)


@pytest.mark.parametrize("is_shown", [True, False])
def test_an_instance_whose_epochs_are_used_up_is_given_up_for_another(is_shown: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        before = await one_ready(cluster)
        planner = elect(cluster.model.model_id, [node.node_id for node in cluster.nodes])[0]
        index, holder = next(
            (index, node) for index, node in enumerate(apart(cluster, before)[0]) if node.node_id != planner
        )
        seats = holder.serving.seats
        if is_shown:
            ask = Lease(before.instance_id, LAST_EPOCH, before.placement, index, 1, LAST_EPOCH)
            assert (await seats.lease(ask, holder.node_id)).granted
        else:  # nobody but that node has ever heard of it
            await seats.release(SeatRef(before.instance_id, LAST_EPOCH, before.placement.placement_id))
            for runner in cluster.fabric.runners_of(holder.node_id):
                runner.die("killed by SIGKILL")
        epochs: list[int] = []

        def notes(node: SimNode) -> None:
            really = node.serving.seats.lease

            async def lease(ask: Lease, planner: NodeId) -> LeaseAnswer:
                epochs.append(ask.epoch)
                return await really(ask, planner)

            node.serving.seats.lease = lease  # type: ignore[method-assign]

        for node in cluster.nodes:
            notes(node)
        await cluster.until(lambda: all(before not in node.instances() for node in cluster.nodes))
        for node in cluster.nodes:
            assert await cluster.ask(node, cluster.request((5,), 3)) == exact_answer((5,), 7, 3)
            ready = [now.instance_id for now in node.instances() if now.state == "ready"]
            assert ready == [instance_id_for(cluster.model.model_id, 1)]
        assert max(epochs) <= LAST_EPOCH, "nobody could be told of a seat of more"

    simulate(scenario, 3)


def test_a_deletion_that_only_the_planner_hears_of_ends_its_placing() -> None:
    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        instance_id = instance_id_for(cluster.model.model_id, 0)

        async def call(peer: NodeId, method: str, payload: bytes, timeout_seconds: float) -> bytes:
            if method == COMMIT:
                await node.serving.seats.delete(Deletion(instance_id, 1))
            return await node.serving.ports.call(peer, method, payload, timeout_seconds)

        planner = ElectedPlanner(replace(node.serving.ports, call=call), node.serving.seats)
        with pytest.raises(Refused, match="was deleted while"):
            await planner.place(Place(cluster.model.model_id, WORKLOAD, Constraints(exclude=(node.node_id,))))
        assert [each.serving.ports.own_card().seats for each in cluster.nodes] == [(), (), ()]

    simulate(scenario, 3)


def test_a_planner_that_this_origin_does_not_reach_is_passed_over_unasked() -> None:
    async def scenario(cluster: Cluster) -> None:
        order = elect(cluster.model.model_id, [each.node_id for each in cluster.nodes])
        node = next(each for each in cluster.nodes if each.node_id == order[2])
        asked: list[NodeId] = []

        async def call(peer: NodeId, method: str, payload: bytes, timeout_seconds: float) -> bytes:
            asked.append(peer)
            return await node.serving.ports.call(peer, method, payload, timeout_seconds)

        ports = replace(node.serving.ports, call=call, out_of_reach=lambda: frozenset({order[0]}))
        await Placer(ports, node.serving.planner).place(Place(cluster.model.model_id, WORKLOAD, Constraints()))
        assert asked == [order[1]]

    simulate(scenario, 3)


def test_an_answer_that_waits_for_room_takes_back_a_node_that_is_reached_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        node, far, _ = cluster.nodes
        out_of_reach = frozenset({far.node_id})
        avoided: list[frozenset[NodeId]] = []

        class Troubled(Placer):
            """A neighbour is lost, there is no room without it, and then it is back."""

            async def ready_instance(
                self,
                model_id: ModelId,
                workload: Workload,
                waiting: Callable[[Waiting], None],
                avoid: frozenset[NodeId] = frozenset(),
                tokens: int = 0,
                begun: Begun | None = None,
            ) -> Instance:
                nonlocal out_of_reach
                avoided.append(avoid)
                if len(avoided) == 1:
                    raise PeerLost("a channel broke")
                if len(avoided) == 2:
                    out_of_reach = frozenset[NodeId]()
                    raise NoRoom("without it")
                return await super().ready_instance(model_id, workload, waiting, avoid, tokens, begun)

        ports = replace(node.serving.ports, out_of_reach=lambda: out_of_reach)
        sessions = Sessions(ports, Troubled(ports, node.serving.planner), node.serving.links)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sessions.run)
            troubled = replace(node, serving=node.serving._replace(sessions=sessions))
            await trio.testing.wait_all_tasks_blocked()
            assert len(await cluster.ask(troubled, cluster.request((1,), tokens=3))) == 3
            nursery.cancel_scope.cancel()
        assert avoided == [frozenset(), frozenset({far.node_id}), frozenset()]

    simulate(scenario, 3)
