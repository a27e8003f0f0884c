"""Whole agents, exact engine, virtual time: a model id becomes an answer, also while machines go.

Written as Hypothesis tests: Hypothesis seeds trio's scheduler, so a failing run replays.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
import whole_agents
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from meshinfer.base.errors import BadInput, MeshinferError, NoRoom, Refused, UnknownModel
from meshinfer.base.ids import ModelId, instance_id_for
from meshinfer.base.units import MIB
from meshinfer.planning.workload import Constraints
from meshinfer.serving.election import elect
from meshinfer.serving.requests import Generated, GenerateRequest, Waiting
from meshinfer.serving.spares import LOOK_SECONDS, REFILL_SECONDS
from meshinfer.testing.cards import model_card
from meshinfer.testing.cluster import WORKLOAD, Cluster, SimNode
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.topology.placement import Seat
from meshinfer.wire.messages import Lease, OpenChannel, Place, Placed, SeatRef

seeds = st.integers(0, 2**32 - 1)
few = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a seed cannot be made simpler
)


def simulate(scenario: Callable[[Cluster], Awaitable[None]], seed: int, count: int = 3) -> None:
    whole_agents.simulate(Cluster(random.Random(seed)), scenario, count)


@given(seeds)
@few
def test_a_model_that_no_node_can_hold_alone_answers_through_any_node(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        for origin in cluster.nodes:
            request = cluster.request((1, 2, 3), tokens=12, seed=seed)
            assert await cluster.ask(origin, request) == exact_answer((1, 2, 3), seed, 12)
        for node in cluster.nodes:
            (instance,) = node.instances()
            assert instance.state == "ready"
            assert len(instance.placement.seats) == 2

    simulate(scenario, seed)


@given(seeds)
@few
def test_two_nodes_asked_at_once_end_with_one_instance(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        answers: list[tuple[int, ...]] = []

        async def ask(index: int) -> None:
            request = cluster.request((index,), tokens=5, seed=index)
            answers.append(await cluster.ask(cluster.nodes[index % 3], request))

        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(ask, index)
        assert sorted(answers) == sorted(exact_answer((index,), index, 5) for index in range(6))
        await trio.sleep(5)
        assert {len(node.instances()) for node in cluster.nodes} == {1}
        running = [runner for node in cluster.nodes for runner in cluster.fabric.runners_of(node.node_id)]
        assert len(running) == 2

    simulate(scenario, seed)


@given(seeds, st.booleans(), st.integers(2, 3))
@few
def test_a_node_is_lost_in_mid_answer_and_the_answer_goes_on(seed: int, stops: bool, stages: int) -> None:
    """The very text that would have come; the warm seats stay; the node that is lost is out of it."""

    async def scenario(cluster: Cluster) -> None:
        rng = random.Random(seed)
        preview = await cluster.nodes[0].serving.planner.preview(cluster.model.model_id, WORKLOAD, Constraints())
        count = len(cluster.model.layers)
        cuts = pairwise(count * index // stages for index in range(stages + 1))
        nodes = rng.sample(cluster.nodes, stages)
        # The planner itself takes no more nodes than it needs.
        seats = tuple(Seat(node.node_id, start, end) for node, (start, end) in zip(nodes, cuts, strict=True))
        placement = replace(preview.plans[0].placement, seats=seats)
        await cluster.nodes[0].serving.placer.place(Place(cluster.model.model_id, WORKLOAD, Constraints(), placement))
        await cluster.until(lambda: [i.state for i in cluster.nodes[0].instances()] == ["ready"])
        holders = [node for node in cluster.nodes if node.node_id in placement.node_ids]
        victim = rng.choice(holders)
        origin = rng.choice([node for node in cluster.nodes if node is not victim])
        at = rng.randrange(20)
        times: list[float] = []

        def on_token(index: int) -> None:
            times.append(trio.current_time())
            if index == at:
                (cluster.stop if stops else cluster.kill)(victim)

        request = cluster.request((9, 8), tokens=40, seed=seed)
        assert await cluster.ask(origin, request, on_token) == exact_answer((9, 8), seed, 40)
        (instance,) = origin.instances()
        assert victim.node_id not in instance.placement.node_ids
        assert instance.epoch > 1
        kept = {seat for seat in placement.seats if seat.node_id != victim.node_id}
        assert kept <= set(instance.placement.seats), "warm seats stay"
        pause = max(after - before for before, after in pairwise(times))
        assert pause < (8.0 if stops else 4.0)  # virtual: what timers and the fake load add up to

    simulate(scenario, seed, count=4)


@given(seeds)
@few
def test_what_no_longer_fits_ends_in_one_clear_error_and_is_served_again_when_it_does(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.ask(cluster.nodes[0], cluster.request((9,), tokens=4))
        (instance,) = cluster.nodes[0].instances()
        victim = next(n for n in cluster.nodes[1:] if n.node_id in instance.placement.node_ids)
        with pytest.raises(NoRoom, match="MiB"):
            await cluster.ask(
                cluster.nodes[0],
                cluster.request((9,), tokens=200),
                lambda index: cluster.kill(victim) if index == 3 else None,
            )
        survivor = cluster.nodes[0]
        await cluster.until(lambda: not cluster.fabric.runners_of(survivor.node_id), timeout_seconds=40.0)
        back = await cluster.restart(victim)
        await cluster.settle([survivor, back])
        assert await cluster.ask(survivor, cluster.request((9,), tokens=4, seed=3)) == exact_answer((9,), 3, 4)

    simulate(scenario, seed, count=2)


@pytest.mark.parametrize("is_open_ended", [False, True])
def test_an_answer_goes_on_with_the_context_that_it_needs_where_what_was_reserved_fits_nowhere_any_more(
    is_open_ended: bool,
) -> None:
    """One whose client named no limit ends where the smaller context does, as if it had been that small from the start."""

    async def scenario(cluster: Cluster) -> None:
        planner, model_id = cluster.nodes[0].serving.planner, cluster.model.model_id

        async def nodes_for(context_tokens: int) -> int:
            workload = replace(WORKLOAD, context_tokens=context_tokens)
            plans = (await planner.preview(model_id, workload, Constraints())).plans
            return len(plans[0].placement.node_ids) if plans else 0

        large = WORKLOAD.context_tokens
        while await nodes_for(large) != 3:
            large += 64
        ask = Place(model_id, replace(WORKLOAD, context_tokens=large), Constraints())
        await cluster.nodes[0].serving.placer.place(ask)
        await cluster.until(lambda: [i.state for i in cluster.nodes[0].instances()] == ["ready"])
        origin = cluster.nodes[0]
        victim = cluster.nodes[1]
        tokens = large - 2 if is_open_ended else 40
        request = replace(
            cluster.request((9, 8), tokens=tokens, workload=ask.workload),
            least_context_tokens=WORKLOAD.context_tokens,
            is_open_ended=is_open_ended,
        )
        answer = await cluster.ask(origin, request, lambda index: cluster.kill(victim) if index == 5 else None)
        assert answer == exact_answer((9, 8), 7, WORKLOAD.context_tokens - 2 if is_open_ended else 40)
        assert [i.placement.context_tokens for i in origin.instances()] == [WORKLOAD.context_tokens]

    model = model_card(layer_bytes=(8 * MIB,) * 8, kv_elements_per_token=4096)
    whole_agents.simulate(Cluster(random.Random(1), model=model), scenario, 3)


def test_who_could_make_do_with_less_context_leaves_a_lost_node_the_time_to_come_back_for_those_who_cannot() -> None:
    """What is reserved anew for a short answer would be too little for the long one beside it."""

    async def scenario(cluster: Cluster) -> None:
        planner, model_id = cluster.nodes[0].serving.planner, cluster.model.model_id
        large = replace(WORKLOAD, context_tokens=640, concurrency=2)
        assert len((await planner.preview(model_id, large, Constraints())).plans[0].placement.node_ids) == 3
        await cluster.nodes[0].serving.placer.place(Place(model_id, large, Constraints()))
        await cluster.until(lambda: [i.state for i in cluster.nodes[0].instances()] == ["ready"])
        origin, victim = cluster.nodes[:2]

        async def ask(tokens: int, on_token: Callable[[int], None] | None = None) -> None:
            request = replace(cluster.request((tokens,), tokens, workload=large), least_context_tokens=256)
            assert await cluster.ask(origin, request, on_token) == exact_answer((tokens,), 7, tokens)

        async def restart_agent() -> None:
            cluster.kill(victim)
            await trio.sleep(4.0)
            await cluster.restart(victim)

        async with trio.open_nursery() as nursery:

            def on_token(index: int) -> None:
                if index == 5:
                    nursery.start_soon(restart_agent)

            nursery.start_soon(ask, 600)
            nursery.start_soon(ask, 40, on_token)

    model = model_card(layer_bytes=(8 * MIB,) * 8, kv_elements_per_token=1024)
    whole_agents.simulate(Cluster(random.Random(1), model=model), scenario, 3)


@given(seeds)
@few
def test_a_killed_runner_is_made_again_and_nothing_else_is_touched(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), tokens=2))
        holder = next(node for node in cluster.nodes if cluster.fabric.runners_of(node.node_id))
        cluster.fabric.runners_of(holder.node_id)[0].die("killed by SIGSEGV")
        # Nobody asks, and still it is repaired, by the node that is elected for the model.
        await cluster.until(
            lambda: all([(i.state, i.epoch) for i in node.instances()] == [("ready", 2)] for node in cluster.nodes),
            timeout_seconds=10.0,
        )
        assert all(len(node.mesh.topology().nodes) == 3 for node in cluster.nodes)
        assert await cluster.ask(cluster.nodes[2], cluster.request((1,), tokens=3, seed=5)) == exact_answer((1,), 5, 3)

    simulate(scenario, seed)


@given(seeds)
@few
def test_a_planner_that_dies_leaves_nothing_behind(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        from meshinfer.serving.election import elect

        order = elect(cluster.model.model_id, [node.node_id for node in cluster.nodes])
        planner = next(node for node in cluster.nodes if node.node_id == order[0])
        others = [node for node in cluster.nodes if node is not planner]
        answers: list[tuple[int, ...]] = []

        async def ask() -> None:
            answers.append(await cluster.ask(others[0], cluster.request((4,), tokens=3, seed=1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(random.Random(seed).uniform(0, 0.02))  # somewhere between the call and the commits
            cluster.kill(planner)
        assert answers == [exact_answer((4,), 1, 3)]
        await trio.sleep(20)  # beyond every lease
        for node in others:
            promised = sum(seat.promised_bytes for seat in node.serving.ports.own_card().seats)
            assert node.serving.ports.own_card().memory_promised_bytes == promised
            assert all(instance.state == "ready" for instance in node.instances())

    simulate(scenario, seed, count=4)


async def lease_a_seat(cluster: Cluster, node: SimNode) -> SeatRef:
    preview = await node.serving.planner.preview(cluster.model.model_id, WORKLOAD, Constraints())
    plan = next(plan for plan in preview.plans if node.node_id in plan.placement.node_ids)
    index = plan.placement.node_ids.index(node.node_id)
    instance_id = instance_id_for(cluster.model.model_id, 0)
    asked = Lease(instance_id, 1, plan.placement, index, plan.memory[index].need_bytes)
    assert (await node.serving.seats.lease(asked, node.node_id)).granted
    return SeatRef(instance_id, 1, plan.placement.placement_id)


@given(seeds)
@few
def test_a_spare_process_waits_for_the_seat_that_is_leased(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        await cluster.until(lambda: len(cluster.fabric.processes_of(node.node_id)) == 1)
        (spare,) = cluster.fabric.processes_of(node.node_id)
        leased = await lease_a_seat(cluster, node)
        await trio.sleep(LOOK_SECONDS * 3)  # a planner may be slow with its commit
        await node.serving.seats.commit(leased)
        await cluster.until(lambda: spare.seat is not None)

    simulate(scenario, seed)


def test_no_spare_process_is_started_beside_a_seat_that_is_leased() -> None:
    """The lease may have promised all the memory that there is."""

    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        await cluster.until(lambda: len(cluster.fabric.processes_of(node.node_id)) == 1)
        cluster.fabric.processes_of(node.node_id)[0].die("killed by the kernel")
        await lease_a_seat(cluster, node)
        await trio.sleep(LOOK_SECONDS * 3)
        assert cluster.fabric.processes_of(node.node_id) == []

    simulate(scenario, seed=1)


def test_no_spare_process_is_started_beside_layers_that_nobody_is_promised_any_more() -> None:
    """They are in memory all the same."""

    async def scenario(cluster: Cluster) -> None:
        left, lost = cluster.nodes

        def is_cut() -> bool:
            return [seat.state for seat in left.mesh.topology().by_id[left.node_id].seats] == ["cut"]

        await cluster.ask(left, cluster.request((1, 2), tokens=2))
        await trio.sleep(REFILL_SECONDS)
        cluster.kill(lost)
        await cluster.until(is_cut)
        await trio.sleep(LOOK_SECONDS * 3)
        assert is_cut()
        assert cluster.fabric.processes_of(left.node_id) == cluster.fabric.runners_of(left.node_id)

    whole_agents.simulate(Cluster(random.Random(1), overhead_bytes=12 * MIB), scenario, count=2)


@given(seeds)
@few
def test_what_is_warm_stays_though_nobody_has_noticed_yet_who_is_gone(seed: int) -> None:
    """A card may outlive its node by seconds; a repair that is planned with it must not cost the other seats."""

    async def scenario(cluster: Cluster) -> None:
        rng = random.Random(seed)
        planner = cluster.nodes[0].serving.planner
        preview = await planner.preview(cluster.model.model_id, WORKLOAD, Constraints())
        seats = rng.choice([plan.placement for plan in preview.plans]).seats
        placement = replace(preview.plans[0].placement, seats=seats)
        await planner.place(Place(cluster.model.model_id, WORKLOAD, Constraints(), placement))
        await cluster.until(lambda: all([i.state for i in node.instances()] == ["ready"] for node in cluster.nodes))
        victim = rng.choice([node for node in cluster.nodes if node.node_id in placement.node_ids])
        others = [node for node in cluster.nodes if node is not victim]
        warm = {id(runner) for node in others for runner in cluster.fabric.runners_of(node.node_id) if runner.seat}
        # Its runners' channels break at once; its agent is only silent.
        cluster.fabric.kill(victim.node_id)
        cluster.network.stop(victim.node_id)
        await cluster.until(
            lambda: all([(i.state, i.epoch > 1) for i in node.instances()] == [("ready", True)] for node in others)
        )
        after = {id(runner) for node in others for runner in cluster.fabric.runners_of(node.node_id) if runner.seat}
        assert warm <= after, "the warm seat was given up"

    simulate(scenario, seed, count=4)


@given(seeds)
@few
def test_origins_whose_planner_has_just_died_meet_at_the_next_one(seed: int) -> None:
    """Nobody has noticed yet, so all still ask the dead one, and its memory is planned with; one instance comes of it."""

    async def scenario(cluster: Cluster) -> None:
        order = elect(cluster.model.model_id, [node.node_id for node in cluster.nodes])
        victim = next(node for node in cluster.nodes if node.node_id == order[0])
        survivors = [node for node in cluster.nodes if node is not victim]
        placed: list[Placed] = []

        async def place(node: SimNode) -> None:
            assert victim.node_id in node.mesh.topology().by_id
            placed.append(await node.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, Constraints())))

        cluster.kill(victim)
        async with trio.open_nursery() as nursery:
            for node in survivors:
                nursery.start_soon(place, node)
        assert {(one.instance_id, one.epoch, one.placement) for one in placed} == {
            (placed[0].instance_id, placed[0].epoch, placed[0].placement)
        }
        assert victim.node_id not in placed[0].placement.node_ids
        await cluster.until(lambda: all([i.state for i in node.instances()] == ["ready"] for node in survivors))
        started = sum(
            runner.seat is not None for node in survivors for runner in cluster.fabric.runners_of(node.node_id)
        )
        assert started == len(placed[0].placement.seats)

    simulate(scenario, seed)


@given(seeds)
@few
def test_deleting_frees_every_node_and_the_same_placement_can_be_posted_again(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        model_id = cluster.model.model_id
        preview = await node.serving.planner.preview(model_id, WORKLOAD, Constraints())
        ask = Place(model_id, WORKLOAD, Constraints(), preview.plans[-1].placement)
        for _ in range(2):
            placed = await node.serving.placer.place(ask)
            assert placed.placement == ask.placement
            await cluster.until(lambda: [i.state for i in node.instances()] == ["ready"])
            freed, unconfirmed = await cluster.nodes[1].serving.placer.delete(placed.instance_id)
            assert unconfirmed == ()
            assert set(freed) == set(placed.placement.node_ids)
            assert min(freed.values()) > 0
            assert all(not cluster.fabric.runners_of(n.node_id) for n in cluster.nodes)
            await cluster.until(lambda: all(n.instances() == () for n in cluster.nodes), timeout_seconds=3.0)
            assert all(n.serving.ports.own_card().memory_promised_bytes == 0 for n in cluster.nodes)

    simulate(scenario, seed)


@given(seeds)
@few
def test_what_cannot_be_is_refused_and_leaves_nothing(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]

        async def refused(request: GenerateRequest, error: type[MeshinferError], words: str) -> None:
            with pytest.raises(error, match=words):
                await cluster.ask(node, request)

        good = cluster.request((1,), tokens=2)
        await refused(cluster.request((1,), tokens=300), BadInput, "300 more")
        unknown = GenerateRequest(
            good.session_id, ModelId("no/such"), (1,), 2, (), good.sampling, good.workload, good.deadline_seconds
        )
        await refused(unknown, UnknownModel, "no live node holds")
        for key in range(2, len(cluster.nodes)):
            cluster.kill(cluster.nodes[key])
        cluster.kill(cluster.nodes[1])
        await cluster.until(lambda: len(node.mesh.topology().nodes) == 1)
        await refused(cluster.request((1,), tokens=2), NoRoom, "MiB")
        await cluster.until(lambda: node.serving.ports.own_card().memory_promised_bytes == 0, timeout_seconds=1.0)

    simulate(scenario, seed)


@given(seeds)
@few
def test_a_client_that_leaves_frees_its_session_on_the_runner(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        node = cluster.nodes[0]
        async with node.serving.sessions.generate(cluster.request((1,), tokens=200)) as events:
            async for event in events:
                if getattr(event, "index", -1) == 3:
                    break
        assert node.serving.sessions.count == 0
        await cluster.until(
            lambda: all(not r.sessions for n in cluster.nodes for r in cluster.fabric.runners_of(n.node_id)),
            timeout_seconds=1.0,
        )

    whole_agents.simulate(Cluster(random.Random(seed), memory_bytes=48 * MIB), scenario, 3)


@given(seeds)
@few
def test_what_is_deleted_during_its_repair_stays_deleted_until_somebody_asks_again(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        rng = random.Random(seed)
        for round_number in range(4):
            asked = cluster.request((1,), tokens=3, seed=round_number)
            assert await cluster.ask(rng.choice(cluster.nodes), asked) == exact_answer((1,), round_number, 3)
            await cluster.until(lambda: all([i.state for i in n.instances()] == ["ready"] for n in cluster.nodes))
            holder = next(node for node in cluster.nodes if cluster.fabric.runners_of(node.node_id))
            cluster.fabric.runners_of(holder.node_id)[0].die("killed by SIGSEGV")
            await cluster.until(lambda: any(i.state != "ready" for n in cluster.nodes for i in n.instances()))
            # Before the leases, between them, before and after the commits; by whoever knows of it or not yet.
            await trio.sleep(rng.choice([rng.uniform(0, 0.02), rng.uniform(0, 2.0)]))
            node = rng.choice(cluster.nodes)
            (instance,) = node.instances()
            await node.serving.placer.delete(instance.instance_id)
            await cluster.until(lambda: all(n.instances() == () for n in cluster.nodes), timeout_seconds=2.0)
            for _ in range(24):  # longer than a planner waits between two repairs
                await trio.sleep(0.5)
                assert all(n.instances() == () for n in cluster.nodes)
                assert all(not cluster.fabric.runners_of(n.node_id) for n in cluster.nodes)
            assert all(n.serving.ports.own_card().memory_promised_bytes == 0 for n in cluster.nodes)

    simulate(scenario, seed, count=4)


@given(seeds)
@few
def test_a_bridge_between_the_origin_and_an_end_of_the_pipeline_is_gone_round(seed: int) -> None:
    """All others reach both, so nobody is lost; the answer goes on without the one that its origin does not reach."""

    async def scenario(cluster: Cluster) -> None:
        rng = random.Random(seed)
        await cluster.ask(cluster.nodes[0], cluster.request((9,), tokens=2))
        (instance,) = cluster.nodes[0].instances()
        origin = next(node for node in cluster.nodes if node.node_id not in instance.placement.node_ids)
        far = instance.placement.seats[rng.choice([0, -1])].node_id
        at = rng.randrange(20)

        def on_token(index: int) -> None:
            if index == at:
                cluster.network.cut([origin.node_id], [far])

        request = cluster.request((9, 8), tokens=40, seed=seed)
        assert await cluster.ask(origin, request, on_token) == exact_answer((9, 8), seed, 40)
        # A request that begins now goes round it, too, and nobody has buried anybody.
        assert await cluster.ask(origin, cluster.request((7,), tokens=5, seed=1)) == exact_answer((7,), 1, 5)
        assert all(len(node.mesh.topology().nodes) == 4 for node in cluster.nodes)
        (now,) = origin.instances()
        assert instance.placement.seats[-1].node_id != far or far not in now.placement.node_ids

    simulate(scenario, seed, count=4)


@given(seeds)
@few
def test_an_answer_that_has_begun_waits_some_seconds_for_room_with_signs_of_life(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.ask(cluster.nodes[0], cluster.request((9,), tokens=4))
        survivor, victim = cluster.nodes
        waited: list[float] = []

        async def come_back() -> None:
            await trio.sleep(3.0)
            await cluster.restart(victim)

        async with trio.open_nursery() as nursery:
            tokens: list[int] = []
            async with survivor.serving.sessions.generate(cluster.request((9,), tokens=60, seed=seed)) as events:
                async for event in events:
                    if isinstance(event, Generated):
                        tokens.append(event.token_id)
                        if event.index == 3:
                            cluster.kill(victim)
                            nursery.start_soon(come_back)
                    elif isinstance(event, Waiting) and len(tokens) > 3:
                        waited.append(trio.current_time())
        assert tuple(tokens) == exact_answer((9,), seed, 60)
        assert max(after - before for before, after in pairwise(waited)) < 2.0, "the client hears that we live"
        cluster.kill(cluster.nodes[-1])
        await cluster.until(lambda: len(survivor.mesh.topology().nodes) == 1)
        start = trio.current_time()
        with pytest.raises(NoRoom):  # one that has not begun is told at once
            await cluster.ask(survivor, cluster.request((5,), tokens=4))
        assert trio.current_time() - start < 1.0

    simulate(scenario, seed, count=2)


@given(seeds)
@few
def test_a_channel_of_an_old_epoch_is_refused(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), tokens=2))
        holder = next(node for node in cluster.nodes if cluster.fabric.runners_of(node.node_id))
        cluster.fabric.runners_of(holder.node_id)[0].die("killed by SIGSEGV")
        await cluster.until(lambda: [(i.state, i.epoch) for i in holder.instances()] == [("ready", 2)])
        (instance,) = holder.instances()
        index = instance.placement.node_ids.index(holder.node_id)

        async def ask(epoch: int) -> None:
            stranger = OpenChannel(instance.instance_id, epoch, -1, index, "origin", b"certificate")
            await holder.serving.seats.runners.channels.offer(cluster.nodes[0].node_id, stranger)

        for epoch in (1, 3):
            with pytest.raises(Refused, match=f"epoch {epoch}"):
                await ask(epoch)
        await ask(2)

    simulate(scenario, seed)
