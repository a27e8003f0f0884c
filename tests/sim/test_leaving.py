"""A node leaves politely: its own clients get their answers whole, and from the start it takes nothing new.

Whole agents, exact engine, virtual time. What the process around them does with signals is end-to-end's.
"""

import math
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
import trio.testing
from whole_agents import three_of

from meshinfer.base.errors import NodeLeaving, NoRoom, PeerLost
from meshinfer.base.ids import NodeId
from meshinfer.planning.workload import Constraints
from meshinfer.serving.election import elect
from meshinfer.serving.view import AHEAD
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED
from meshinfer.testing.cluster import WORKLOAD, Cluster, SimNode
from meshinfer.testing.exact_answers import exact_answer
from meshinfer.wire.codec import encode
from meshinfer.wire.messages import LEASE, PLACE, Lease, LeaseAnswer, Place, Placed

Clock = trio.testing.MockClock
SLOW = replace(SPEED, load_seconds=2.0)
"""To tell a load from all else that a pause is made of."""
TOKENS = 100
"""Of the leaving node's own client: some seconds."""


async def place_on(cluster: Cluster, through: SimNode, holders: Sequence[SimNode]) -> Placed:
    only = Constraints(nodes=tuple(node.node_id for node in holders))
    return await through.serving.placer.place(Place(cluster.model.model_id, WORKLOAD, only))


async def leave(node: SimNode) -> None:
    """As its agent does, up to the end of its process."""
    await node.serving.leave("node left")
    await node.mesh.leave()


async def leave_for_good(cluster: Cluster, node: SimNode, begun: trio.Event, after_seconds: float) -> None:
    """So long after something has begun."""
    await begun.wait()
    await trio.sleep(after_seconds)
    await leave(node)
    cluster.kill(node)


@asynccontextmanager
async def leaving(cluster: Cluster, leaver: SimNode, holders: Sequence[SimNode]) -> AsyncGenerator[SimNode]:
    """A node that drains, since a client of its own is in the middle of an answer; that ends whole, and the node has left."""
    others = [node for node in cluster.nodes if node is not leaver]
    begun, answers = trio.Event(), list[tuple[int, ...]]()
    placed = await place_on(cluster, leaver, holders)
    assert set(placed.placement.node_ids) == {node.node_id for node in holders}

    async def own_client() -> None:
        request = cluster.request((5,), TOKENS)
        answers.append(await cluster.ask(leaver, request, lambda _: begun.set()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(own_client)
        await begun.wait()
        nursery.start_soon(leave, leaver)
        await cluster.until(lambda: all(leaver.node_id not in node.serving.ports.staying() for node in cluster.nodes))
        assert all(leaver.node_id in node.sees() for node in others), "it is still here, and works"
        yield leaver
        assert not answers, "what was to be seen while it drains was seen then"
    assert answers == [exact_answer((5,), 7, TOKENS)]
    await cluster.until(lambda: all(leaver.node_id not in node.sees() for node in cluster.live() if node is not leaver))
    assert cluster.fabric.runners_of(leaver.node_id) == []


async def test_it_takes_no_request_no_seat_and_no_planning(autojump_clock: Clock) -> None:
    async with three_of(5) as cluster:
        other = cluster.nodes[0]
        async with leaving(cluster, cluster.nodes[3], cluster.nodes[:3]) as leaver:
            assert (await leaver.serving.sessions.ready())[0] is False
            with pytest.raises(NodeLeaving, match="Ask again at another node"):
                await cluster.ask(leaver, cluster.request((1,), 2))
            place = Place(cluster.model.model_id, WORKLOAD, Constraints(nodes=(leaver.node_id,)))
            with pytest.raises(NoRoom, match="leaving the mesh"):
                await other.serving.placer.place(place)
            # Who has not heard of it yet is told by itself.
            with pytest.raises(PeerLost, match="about to leave"):
                await other.serving.ports.call(leaver.node_id, PLACE, encode(place), 5.0)
            (instance,) = other.instances()
            lease = Lease(instance.instance_id, 9, instance.placement, 0, 1)
            with pytest.raises(PeerLost, match="about to leave"):
                await other.serving.ports.call(leaver.node_id, LEASE, encode(lease), 5.0)


async def test_an_answer_that_is_not_complete_in_time_ends_with_an_error_that_says_so(autojump_clock: Clock) -> None:
    async with three_of(5, replace(SPEED, step_seconds=0.1)) as cluster:
        leaver = cluster.nodes[0]
        await place_on(cluster, leaver, cluster.nodes[:3])
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_for_good, cluster, leaver, begun, 0.0)
            with pytest.raises(NodeLeaving, match=r"not complete .* Ask again at another node"):
                await cluster.ask(leaver, cluster.request((5,), TOKENS), lambda _: begun.set())


async def test_an_answer_that_its_hand_over_held_up_has_time_to_end_after_it(autojump_clock: Clock) -> None:
    """So slow a load that the layers are cut over before they are there: the answer stands still until they are."""
    async with three_of(5, replace(SPEED, load_seconds=18.0, step_seconds=0.06)) as cluster:
        origin = cluster.nodes[0]
        await place_on(cluster, origin, cluster.nodes[:3])
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_for_good, cluster, origin, begun, 0.0)
            answer = await cluster.ask(origin, cluster.request((5,), TOKENS), lambda _: begun.set())
        assert answer == exact_answer((5,), 7, TOKENS)


@pytest.mark.parametrize("seat", [0, 1, 2])
async def test_where_nobody_can_take_its_seat_the_answers_through_it_end_first(
    seat: int, autojump_clock: Clock
) -> None:
    async with three_of(3) as cluster:
        placed = await place_on(cluster, cluster.nodes[0], cluster.nodes)
        leaver = next(node for node in cluster.nodes if node.node_id == placed.placement.node_ids[seat])
        origin = next(node for node in cluster.nodes if node is not leaver)
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_for_good, cluster, leaver, begun, 0.0)
            answer = await cluster.ask(origin, cluster.request((5,), TOKENS), lambda _: begun.set())
        assert answer == exact_answer((5,), 7, TOKENS)


async def test_for_an_answer_that_goes_on_and_on_a_node_whose_seat_nobody_can_take_does_not_stay(
    autojump_clock: Clock,
) -> None:
    async with three_of(3, replace(SPEED, step_seconds=0.1)) as cluster:
        origin, leaver, _ = cluster.nodes
        await place_on(cluster, origin, cluster.nodes)
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave_for_good, cluster, leaver, begun, 0.0)
            with pytest.raises(NoRoom):  # at another node it would go on
                await cluster.ask(origin, cluster.request((5,), TOKENS), lambda _: begun.set())
        assert cluster.live() == [node for node in cluster.nodes if node is not leaver]


async def test_why_nobody_takes_its_seats_is_told_with_the_numbers(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with three_of(3) as cluster:
        await place_on(cluster, cluster.nodes[0], cluster.nodes)
        await leave(cluster.nodes[1])
    (told,) = [record.getMessage() for record in caplog.records if "is not handed over" in record.getMessage()]
    assert cluster.model.model_id in told
    assert re.search(r"needs [\d.]+ MiB in all .*; the mesh has 60.0 MiB free: node0 30.0 MiB, node2 30.0 MiB", told)


async def test_who_leaves_alone_is_not_told_that_nobody_lives(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(random.Random(1), memory_bytes=3 * NODE_BYTES).running(1) as cluster:
        (alone,) = cluster.nodes
        await place_on(cluster, alone, [alone])
        await leave(alone)
    assert "is not handed over: there is no other node" in caplog.text


async def test_it_plans_for_nobody_though_it_is_first_in_order(autojump_clock: Clock) -> None:
    async with three_of(5) as cluster:
        ids = [node.node_id for node in cluster.nodes]
        first = ids.index(elect(cluster.model.model_id, ids)[0])
        victim, *others = [node for node in cluster.nodes if node is not cluster.nodes[first]]
        async with leaving(cluster, cluster.nodes[first], [victim, *others[:2]]):
            cluster.kill(victim)
            await cluster.until(lambda: is_whole_again(others[-1]))


async def test_a_repair_meanwhile_takes_its_seat_away_and_gives_it_none(autojump_clock: Clock) -> None:
    async with three_of(6) as cluster:
        origin, leaver, victim, *_ = cluster.nodes
        async with leaving(cluster, leaver, [origin, leaver, victim]):
            cluster.kill(victim)
            await cluster.until(lambda: is_whole_again(origin))
            assert leaver.node_id not in origin.instances()[0].placement.node_ids


async def test_what_it_held_is_loaded_elsewhere_before_the_answer_is_cut_over(autojump_clock: Clock) -> None:
    pause = await longest_pause("leaves")
    assert pause < 1.0 < SLOW.load_seconds, "no load is in it: what was read is read again by one stage"


async def test_killed_while_it_is_loaded_elsewhere_it_costs_no_more_than_a_kill(autojump_clock: Clock) -> None:
    killed = await longest_pause("is killed")
    both = await longest_pause("leaves and is killed")
    assert both < killed, "the repair goes on with what has been loaded by then"


async def test_what_a_second_try_loads_ahead_is_of_the_hand_over_that_a_deletion_ends(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Lease] = []

    def refuses_the_first(node: SimNode) -> Callable[[Lease, NodeId], Awaitable[LeaseAnswer]]:
        lease = node.serving.seats.lease

        async def ahead(ask: Lease, planner: NodeId) -> LeaseAnswer:
            if ask.epoch == AHEAD:
                asked.append(ask)
                if len(asked) == 1:
                    return LeaseAnswer(granted=False, why="there is no room any more")
            return await lease(ask, planner)

        return ahead

    async with three_of(6) as cluster:
        origin, *holders = cluster.nodes[:4]
        placed = await place_on(cluster, origin, holders)
        await cluster.until(lambda: [instance.state for instance in origin.instances()] == ["ready"])
        for node in cluster.nodes:
            monkeypatch.setattr(node.serving.seats, "lease", refuses_the_first(node))
        with holders[1].clocks.worn():
            await holders[1].serving.leave("node left")
        assert len(asked) > 1
        assert {ask.begun_epoch for ask in asked} == {placed.epoch + 1}


async def test_all_holders_leave_one_after_the_other_and_what_is_loaded_ahead_goes_on(autojump_clock: Clock) -> None:
    """Each is gone before the layers it hands over are loaded: in the end they are all that there is of the instance."""
    async with three_of(7, SLOW) as cluster:
        origin, *holders = cluster.nodes[:4]
        await place_on(cluster, origin, holders)
        begun = trio.Event()

        async with trio.open_nursery() as nursery:
            for index, node in enumerate(holders):
                nursery.start_soon(leave_for_good, cluster, node, begun, SLOW.load_seconds / 2 * index)
            answer = await cluster.ask(origin, cluster.request((5,), TOKENS), lambda _: begun.set())
        assert answer == exact_answer((5,), 7, TOKENS)
        assert await cluster.ask(origin, cluster.request((1,), 3)) == exact_answer((1,), 7, 3)


@pytest.mark.parametrize(("apart_seconds", "hand_overs"), [(0.0, 1), (0.4, 2)])
async def test_holders_that_leave_together_do_not_undo_each_others_hand_over(
    apart_seconds: float, hand_overs: int, autojump_clock: Clock
) -> None:
    """At the same moment; and the third while the layers of the others are loaded elsewhere already."""
    async with three_of(7, SLOW) as cluster:
        origin, *holders = cluster.nodes[:4]
        await place_on(cluster, origin, holders)
        times: list[float] = []
        token = trio.Event()

        def came(index: int) -> None:
            times.append(trio.current_time())
            if index == 5:
                token.set()

        async with trio.open_nursery() as nursery:
            for index, node in enumerate(holders):
                nursery.start_soon(leave_for_good, cluster, node, token, apart_seconds * index)
            answer = await cluster.ask(origin, cluster.request((1, 2), 2 * TOKENS), came)
        assert answer == exact_answer((1, 2), 7, 2 * TOKENS)
        pauses = [after - before for before, after in pairwise(times)]
        assert max(pauses) < SLOW.load_seconds, "no load is in it: all that left was loaded ahead"
        assert len([pause for pause in pauses if pause > 0.2]) == hand_overs


async def longest_pause(how: str) -> float:
    """What a client of another node waits for a token at most, while the holder of the middle goes."""
    times: list[float] = []
    async with three_of(6, SLOW) as cluster:
        origin, head, leaver, last, *_ = cluster.nodes
        await place_on(cluster, origin, (head, leaver, last))
        await cluster.ask(origin, cluster.request((1,), 2))
        token = trio.Event()

        def came(index: int) -> None:
            times.append(trio.current_time())
            if index == 20:
                token.set()

        async def go() -> None:
            await token.wait()
            with trio.move_on_after(SLOW.load_seconds / 2 if how == "leaves and is killed" else math.inf):
                if how != "is killed":
                    await leave(leaver)
            cluster.kill(leaver)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go)
            answer = await cluster.ask(origin, cluster.request((1, 2), TOKENS), came)
        assert answer == exact_answer((1, 2), 7, TOKENS)
    return max(after - before for before, after in pairwise(times))


def is_whole_again(node: SimNode) -> bool:
    """As that node sees it, the instance is ready in a later epoch."""
    return [(instance.state, instance.epoch > 1) for instance in node.instances()] == [("ready", True)]


@pytest.mark.parametrize("loading", [False, True], ids=["ready", "loading"])
async def test_an_agent_that_is_cancelled_ends_its_runners(autojump_clock: Clock, loading: bool) -> None:
    """It did not leave: something in it has failed, say."""
    async with three_of(3, replace(SPEED, load_seconds=30.0) if loading else SPEED) as cluster:
        if loading:
            with trio.move_on_after(3.0):
                await cluster.ask(cluster.nodes[0], cluster.request((1,), 3))
        else:
            await cluster.ask(cluster.nodes[0], cluster.request((1,), 3))
            await trio.sleep(10.0)  # for spares
        runners = [one for node in cluster.nodes for one in cluster.fabric.processes_of(node.node_id)]
        assert len(runners) == (3 if loading else 6)
    assert [runner.dead for runner in runners] == ["stopped"] * len(runners)
