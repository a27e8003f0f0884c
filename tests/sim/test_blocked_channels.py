"""Where agents get through and runners' channels do not: others take the seats, and what cannot be avoided is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from whole_agents import three_of

from meshinfer.base.ids import NodeId
from meshinfer.serving.blocked_ways import FIRST_SECONDS
from meshinfer.testing.cluster import Cluster, SimNode
from meshinfer.testing.engine import DIAL_SECONDS
from meshinfer.testing.exact_answers import exact_answer

PROMPT, TOKENS = (1, 2, 3), 60


def holders(origin: SimNode) -> tuple[NodeId, ...]:
    (instance,) = origin.instances()
    return instance.placement.node_ids


async def ask(cluster: Cluster, origin: SimNode, on_token: Callable[[int], None] | None = None) -> float:
    """The longest pause of an answer that is as it should be."""
    last, longest = trio.current_time(), 0.0

    def token(index: int) -> None:
        nonlocal last, longest
        now = trio.current_time()
        longest = max(longest, now - last) if index else longest
        last = now
        if on_token:
            on_token(index)

    answer = await cluster.ask(origin, cluster.request(PROMPT, TOKENS), token)
    assert answer == exact_answer(PROMPT, 7, TOKENS)
    return longest


@pytest.mark.parametrize("seat", [0, 1, 2])
async def test_a_node_that_no_channel_gets_to_is_replaced_in_the_middle_of_an_answer(
    seat: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with three_of(6) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        before = holders(cluster.nodes[0])
        origin = next(node for node in cluster.nodes if node.node_id not in before)
        others = [node.node_id for node in cluster.nodes if node.node_id != before[seat]]

        def token(index: int) -> None:
            if index == 20:
                cluster.network.block_channels([before[seat]], others)

        pause = await ask(cluster, origin, token)
        assert before[seat] not in holders(origin), "nor is it over: the way was blocked to the end"
        assert sum(node not in before for node in holders(origin)) == 1, "the others stay warm"
        # The head's patience, dials that are unanswered, and one load.
        assert pause < 2 + DIAL_SECONDS + 2
        assert all(node.sees() >= {*others, before[seat]} for node in cluster.nodes), "the agents noticed nothing"


async def test_a_fresh_instance_is_made_where_channels_open(autojump_clock: trio.testing.MockClock) -> None:
    """As behind a firewall that has been there all the time; once it is known, nobody loses time by it."""
    async with three_of(5) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        bad = holders(cluster.nodes[0])[1]
        origin = next(node for node in cluster.nodes if node.node_id != bad)
        (instance,) = origin.instances()
        await origin.serving.planner.delete(instance)
        await cluster.until(lambda: not origin.instances())
        cluster.network.block_channels([bad], [node.node_id for node in cluster.nodes if node.node_id != bad])
        await ask(cluster, origin)
        assert bad not in holders(origin)
        (instance,) = origin.instances()
        await origin.serving.planner.delete(instance)
        await cluster.until(lambda: not origin.instances())
        await ask(cluster, origin)
        assert bad not in holders(origin)
        assert origin.instances()[0].epoch == instance.epoch + 2, "one was deleted with it, and the first try was right"


async def test_where_nobody_else_has_room_it_is_tried_until_it_is_over(autojump_clock: trio.testing.MockClock) -> None:
    async with three_of(3) as cluster:
        origin = cluster.nodes[0]
        await cluster.ask(origin, cluster.request((1,), 2))
        before = holders(origin)
        ended = trio.Event()

        async def heal() -> None:
            await ended.wait()
            await trio.sleep(9)
            cluster.network.heal()

        def token(index: int) -> None:
            if index == 20:
                cluster.network.block_channels([before[0]], [before[1]])
                ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(heal)
            pause = await ask(cluster, origin, token)
        assert 9 < pause < 9 + 2 * DIAL_SECONDS
        assert set(holders(origin)) == set(before)


async def test_an_origin_whose_channels_do_not_get_to_the_head_has_another_one_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with three_of(5) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        before = holders(cluster.nodes[0])
        origin = next(node for node in cluster.nodes if node.node_id not in before)
        cluster.network.block_channels([origin.node_id], [before[0]])
        await ask(cluster, origin)
        assert before[0] not in {holders(origin)[0], holders(origin)[-1]}


async def test_a_way_is_tried_again_after_a_while(autojump_clock: trio.testing.MockClock) -> None:
    async with three_of(6) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        before = holders(cluster.nodes[0])
        origin = next(node for node in cluster.nodes if node.node_id not in before)
        cluster.network.block_channels(before[1:2], [before[0]])
        await ask(cluster, origin)

        def blocked() -> frozenset[frozenset[NodeId]]:
            with origin.clocks.worn():
                return origin.mesh.topology().blocked

        assert frozenset(before[:2]) in blocked()
        cluster.network.heal()
        await trio.sleep(FIRST_SECONDS + 5)
        assert not blocked()
