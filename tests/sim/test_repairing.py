"""Repairs that cannot be made, or not yet: who waits how long, and who does not wait at all."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
import trio
from whole_agents import simulate

from meshinfer.base.errors import NoRoom, Refused, UnknownModel
from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints
from meshinfer.serving.election import elect
from meshinfer.serving.failures import LONGEST_REST_SECONDS
from meshinfer.serving.seats import WARM_SECONDS
from meshinfer.serving.view import Instance
from meshinfer.testing.cards import model_card
from meshinfer.testing.chaos_room import NODE_BYTES
from meshinfer.testing.cluster import WORKLOAD, Cluster, SimNode
from meshinfer.testing.engine import FakeSpeed, Step
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.wire.messages import Deletion, Done, Lease, LeaseAnswer, Place, SeatRef

MOST_EPOCHS = 6
"""Within an answer that never comes on: it outlives rests of two, four, and perhaps eight seconds."""


async def placed_beside_its_planner(cluster: Cluster) -> tuple[dict[NodeId, SimNode], SimNode, list[SimNode]]:
    """All by their ids, the planner of the cluster's model, and the others, of whom three hold and have served it."""
    members = {node.node_id: node for node in cluster.nodes}
    planner = members[elect(cluster.model.model_id, members)[0]]
    others = [node for node in cluster.nodes if node is not planner]
    among = Constraints(nodes=tuple(node.node_id for node in others[:3]))
    await planner.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, among))
    await cluster.ask(others[0], cluster.request((1, 2), 2))
    return members, planner, others


def test_a_runner_that_dies_again_and_again_rests_longer_and_longer_where_nobody_else_can_take_its_seat() -> None:
    async def scenario(cluster: Cluster) -> None:
        origin = cluster.nodes[0]
        await cluster.ask(origin, cluster.request((1, 2), 2))
        bad = origin.instances()[0].placement.node_ids[0]
        deaths: list[float] = []

        def witness(step: Step) -> None:
            if step.node_id == bad:
                deaths.append(trio.current_time())
                for runner in cluster.fabric.runners_of(bad):
                    runner.die("killed by SIGKILL")

        cluster.fabric.witness = witness
        with pytest.raises(NoRoom, match=r"its runner failed \d times .*killed by SIGKILL"):
            await cluster.ask(origin, cluster.request((5,), 20, deadline_seconds=100))
        assert len(deaths) <= MOST_EPOCHS
        cluster.fabric.witness = lambda step: None
        await trio.sleep(LONGEST_REST_SECONDS)
        assert await cluster.ask(origin, cluster.request((5,), 3)) == exact_answer((5,), 7, 3), (
            "it was mended meanwhile"
        )

    simulate(Cluster(random.Random(1)), scenario, 2)


def test_a_runner_that_dies_again_and_again_goes_elsewhere_though_nobody_asks_for_it() -> None:
    """Nobody plans while its failed seat is announced: that takes seconds, and there are ten from repair to repair."""

    async def scenario(cluster: Cluster) -> None:
        origin = cluster.nodes[0]
        await cluster.ask(origin, cluster.request((1, 2), 2))
        bad = origin.instances()[0].placement.node_ids[1]

        def has_moved() -> bool:
            (instance,) = origin.instances()
            if instance.state == "ready":
                for runner in cluster.fabric.runners_of(bad):
                    runner.die("killed by SIGKILL")
            return instance.state == "ready" and bad not in instance.placement.node_ids

        await cluster.until(has_moved, 60.0)

    simulate(Cluster(random.Random(1), memory_bytes=NODE_BYTES), scenario, 5)


def test_what_is_placed_anew_for_many_is_placed_once() -> None:
    """Whoever waits for his turn meanwhile would end what has just begun to load, though the news of it is still on its way."""

    async def scenario(cluster: Cluster) -> None:
        members, planner, others = await placed_beside_its_planner(cluster)
        (before,) = others[0].instances()
        # It takes no seat, so it hears of the new ones from others; and late.
        planner.mesh._own_card.update(memory_usable_bytes=0)
        really = planner.transport.expect_gossip
        planner.transport.expect_gossip = lambda author, payload, delay: really(author, payload, delay + 0.3)  # type: ignore[method-assign]
        holder = members[before.placement.node_ids[0]].serving.seats
        really_lease = holder.lease

        async def lease(ask: Lease, asker: NodeId) -> LeaseAnswer:
            if ask.epoch == before.epoch + 1:
                raise Refused("not at once")  # as where the first plan still counts on the node that is lost
            return await really_lease(ask, asker)

        holder.lease = lease  # type: ignore[method-assign]

        cluster.kill(members[before.placement.node_ids[1]])
        await cluster.until(lambda: [now.state for now in planner.instances()] == ["broken"])
        placed: list[tuple[InstanceId, int]] = []

        async def place() -> None:
            answer = await planner.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, Constraints()))
            placed.append((answer.instance_id, answer.epoch))

        async with trio.open_nursery() as askers:
            for _ in range(3):
                askers.start_soon(place)
        assert placed == [(before.instance_id, before.epoch + 2)] * 3
        await cluster.until(lambda: [now.state for now in planner.instances()] == ["ready"])
        (now,) = planner.instances()
        assert now.epoch == before.epoch + 2, "nor did the planner repair it by itself"
        assert planner.node_id not in now.placement.node_ids

    simulate(Cluster(random.Random(1), memory_bytes=NODE_BYTES), scenario, 6)


@pytest.mark.parametrize("seat", [0, 2])
def test_a_planner_that_is_lost_after_one_commit_costs_no_layers_that_are_warm(seat: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        members = {node.node_id: node for node in cluster.nodes}
        first = elect(cluster.model.model_id, members)[0]
        planner, others = members[first], [node for node in cluster.nodes if node.node_id != first]
        origin = others[0]
        among = Constraints(nodes=tuple(node.node_id for node in others[1:4]))
        await origin.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, among))
        await cluster.ask(origin, cluster.request((1, 2), 2))
        before = origin.instances()[0]
        nodes = before.placement.node_ids

        def half_made(node: SimNode) -> None:
            really = node.serving.seats.commit

            async def commit(ref: SeatRef) -> Done:
                if ref.epoch != before.epoch + 1:
                    return await really(ref)
                if node.node_id == nodes[seat]:
                    await really(ref)
                    cluster.kill(planner)
                await trio.sleep_forever()  # nobody else hears of this one
                raise AssertionError

            node.serving.seats.commit = commit  # type: ignore[method-assign]

        for node in others:
            half_made(node)
        cluster.kill(members[nodes[1]])
        assert await cluster.ask(origin, cluster.request((3,), 5)) == exact_answer((3,), 7, 5)
        (now,) = origin.instances()
        assert now.epoch == before.epoch + 2
        assert (now.placement.node_ids[0], now.placement.node_ids[2]) == (nodes[0], nodes[2])

    simulate(Cluster(random.Random(1), memory_bytes=NODE_BYTES), scenario, 8)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_repair_that_one_seat_refuses_after_the_others_have_begun_costs_no_layers_that_are_wanted(
    is_deleted: bool,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        members, planner, _ = await placed_beside_its_planner(cluster)
        (before,) = planner.instances()
        first, middle, last = before.placement.node_ids
        warm = [runner for node in (first, last) for runner in cluster.fabric.runners_of(node)]
        really_release = members[first].serving.seats.release
        really_commit = members[last].serving.seats.commit

        async def release(ref: SeatRef) -> Done:
            if is_deleted:  # and only the planner has heard of it
                await planner.serving.seats.delete(Deletion(before.instance_id, before.epoch))
            return await really_release(ref)

        async def commit(ref: SeatRef) -> Done:
            if ref.epoch == before.epoch + 1:
                raise Refused("not at once")
            return await really_commit(ref)

        members[first].serving.seats.release = release  # type: ignore[method-assign]
        members[last].serving.seats.commit = commit  # type: ignore[method-assign]
        cluster.kill(members[middle])
        await cluster.until(lambda: [now.state for now in planner.instances()] == ["broken"])
        if is_deleted:
            await cluster.until(lambda: not warm[0].is_alive, WARM_SECONDS / 2)
        else:
            await cluster.until(lambda: [now.state for now in planner.instances()] == ["ready"])
            assert planner.instances()[0].epoch == before.epoch + 2
            assert [runner for node in (first, last) for runner in cluster.fabric.runners_of(node)] == warm

    simulate(Cluster(random.Random(1), memory_bytes=NODE_BYTES), scenario, 7)


def test_an_answer_that_has_begun_outlives_a_while_in_which_nobody_holds_the_files() -> None:
    """The only node that lists them is the one that was lost, and is about to come back."""

    async def scenario(cluster: Cluster) -> None:
        origin = cluster.nodes[0]
        await cluster.ask(origin, cluster.request((1, 2), 2))
        placer, back_at = origin.serving.placer, 0.0
        really = placer.ready_instance

        async def ready_instance(*arguments: object) -> Instance:
            if trio.current_time() < back_at:
                raise UnknownModel("no live node holds it")
            return await really(*arguments)  # type: ignore[arg-type]

        def on_token(index: int) -> None:
            nonlocal back_at
            if index == 5:
                back_at = trio.current_time() + 5.0
                for node in origin.instances()[0].placement.node_ids:
                    for runner in cluster.fabric.runners_of(node):
                        runner.die("killed by SIGKILL")

        placer.ready_instance = ready_instance  # type: ignore[method-assign]
        assert await cluster.ask(origin, cluster.request((3,), 20), on_token) == exact_answer((3,), 7, 20)
        back_at = trio.current_time() + 5.0
        with pytest.raises(UnknownModel):  # who has no word yet is told at once
            await cluster.ask(origin, cluster.request((4,), 2))

    simulate(Cluster(random.Random(1)), scenario, 3)


def test_a_repair_that_waits_for_silent_nodes_holds_up_no_other_model() -> None:
    names = [ModelId(f"tiny/{index}") for index in range(8)]
    models = [model_card((MIB,), model_id=name) for name in names]

    async def scenario(cluster: Cluster) -> None:
        members = {node.node_id: node for node in cluster.nodes}
        both, planner = next(
            (pair, members[elect(pair[0], members)[0]])
            for pair in combinations(names, 2)
            if elect(pair[0], members)[0] == elect(pair[1], members)[0]
        )
        host = next(node for node in cluster.nodes if node is not planner)
        for name in both:
            await planner.serving.planner.place(Place(name, WORKLOAD, Constraints(nodes=(host.node_id,))))
        await cluster.until(lambda: [each.state for each in host.instances()] == ["ready", "ready"])
        begun: set[ModelId] = set()

        async def repair(instance: Instance) -> None:
            begun.add(instance.placement.model_id)
            await trio.sleep_forever()

        planner.serving.planner.repair = repair  # type: ignore[method-assign]
        for runner in cluster.fabric.runners_of(host.node_id):
            runner.die("killed by SIGKILL")
        await cluster.until(lambda: begun == set(both))

    simulate(Cluster(random.Random(1), others=models), scenario, 3)


def test_a_link_that_passes_nothing_before_its_head_knows_how_long_steps_take_costs_no_half_minute() -> None:
    """The head is patient with the first steps, and no socket breaks; but its agent's pings go that way, too."""

    async def scenario(cluster: Cluster) -> None:
        origin, *holders = cluster.nodes[:4]
        among = Constraints(nodes=tuple(node.node_id for node in holders))
        await origin.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, among))
        times: list[float] = []

        def came(index: int) -> None:
            times.append(trio.current_time())
            if index == 0:
                head, middle, _ = origin.instances()[0].placement.node_ids
                cluster.network.cut([head], [middle])

        assert await cluster.ask(origin, cluster.request((1, 2), 9), came) == exact_answer((1, 2), 7, 9)
        assert max(after - before for before, after in pairwise(times)) < 5.0

    simulate(Cluster(random.Random(1), memory_bytes=NODE_BYTES), scenario, 6)


def test_a_spare_process_waits_for_the_seat_whose_runner_failed_also_while_that_rests() -> None:
    async def scenario(cluster: Cluster) -> None:
        origin = cluster.nodes[0]
        await cluster.ask(origin, cluster.request((1, 2), 2))
        middle = origin.instances()[0].placement.node_ids[1]
        for _ in range(2):  # the second time its next life begins after two seconds only
            await cluster.until(lambda: len(cluster.fabric.processes_of(middle)) == 2, 30.0)
            (runner,) = cluster.fabric.runners_of(middle)
            (spare,) = [each for each in cluster.fabric.processes_of(middle) if each is not runner]
            runner.die("killed by SIGKILL")
            await cluster.until(lambda: bool(cluster.fabric.runners_of(middle)), 30.0)
            assert cluster.fabric.runners_of(middle) == [spare]

    simulate(Cluster(random.Random(1), memory_bytes=NODE_BYTES), scenario, 3)


@pytest.mark.parametrize("lost", ["node", "runner"])
def test_what_loads_when_the_seat_beside_is_lost_is_loaded_once(lost: str) -> None:
    async def scenario(cluster: Cluster) -> None:
        members = {node.node_id: node for node in cluster.nodes}
        planner = members[elect(cluster.model.model_id, members)[0]]
        others = [node for node in cluster.nodes if node is not planner]
        among = Constraints(nodes=tuple(node.node_id for node in others[:3]))
        placed = await planner.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, among))
        await cluster.until(lambda: [now.progress > 0.3 for now in planner.instances()] == [True])
        first, middle, last = placed.placement.node_ids
        seated = [runner for node in (first, last) for runner in cluster.fabric.runners_of(node)]
        if lost == "node":
            cluster.kill(members[middle])
        else:
            cluster.fabric.runners_of(middle)[0].die("killed by SIGKILL")
        await cluster.until(lambda: [(now.epoch, now.state) for now in planner.instances()] == [(2, "ready")])
        after = planner.instances()[0].placement.node_ids
        assert (after[0], after[2]) == (first, last)
        assert [runner for node in (first, last) for runner in cluster.fabric.runners_of(node)] == seated

    cluster = Cluster(random.Random(1), memory_bytes=NODE_BYTES, speed=FakeSpeed(load_seconds=5.0))
    simulate(cluster, scenario, 6)
