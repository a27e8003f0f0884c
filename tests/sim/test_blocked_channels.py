"""Where agents get through and runners' channels do not: others take the seats, and what cannot be avoided is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from whole_agents import three_of

from meshinfer.base.errors import NoRoom
from meshinfer.base.ids import NodeId
from meshinfer.serving.blocked_ways import FIRST_SECONDS
from meshinfer.serving.elected_planner import NEWS_SECONDS
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
        assert set(holders(origin)) != set(before)

        def blocked() -> frozenset[tuple[NodeId, NodeId]]:
            with origin.clocks.worn():
                return origin.mesh.topology().blocked

        assert before[:2] in blocked()
        cluster.network.heal()
        await trio.sleep(FIRST_SECONDS + 5)
        assert not blocked()


async def test_what_others_use_is_not_moved_for_one_dial_in_vain(autojump_clock: trio.testing.MockClock) -> None:
    async with three_of(6) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        before = holders(cluster.nodes[0])
        one, other = [node for node in cluster.nodes if node.node_id not in before][:2]
        begun = trio.Event()

        async def hiccup() -> None:
            await begun.wait()
            cluster.network.block_channels([other.node_id], [before[0]])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, cluster, other)
                await trio.sleep(DIAL_SECONDS + 0.1)
                cluster.network.heal()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hiccup)
            await cluster.ask(one, cluster.request(PROMPT, 250), lambda index: begun.set() if index == 20 else None)
        assert holders(one) == before


async def test_many_requests_of_one_origin_dial_in_vain_together(autojump_clock: trio.testing.MockClock) -> None:
    async with three_of(6) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        before = holders(cluster.nodes[0])
        origin = next(node for node in cluster.nodes if node.node_id not in before)
        cluster.network.block_channels([origin.node_id], [before[0]])
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(cluster.ask, origin, cluster.request((1,), 3))
        assert trio.current_time() - begun < 3 * DIAL_SECONDS, "and not one after the other"


async def test_a_node_is_never_in_its_own_way(autojump_clock: trio.testing.MockClock) -> None:
    async with three_of(5) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        before = holders(cluster.nodes[0])
        head = cluster.node_of(before[0])
        assert head is not None
        cluster.network.block_channels([head.node_id], [head.node_id])

        async def over() -> None:
            await trio.sleep(2 * DIAL_SECONDS + 1)
            cluster.network.heal()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(over)
            await ask(cluster, head)
        assert holders(head) == before


async def test_nothing_is_handed_over_to_whom_channels_do_not_get(autojump_clock: trio.testing.MockClock) -> None:
    async with three_of(5) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        before = holders(cluster.nodes[0])
        first, leaver, last = map(cluster.node_of, before)
        assert first is not None
        assert leaver is not None
        assert last is not None
        bad = next(node for node in cluster.nodes if node.node_id not in before)
        for node in (first, last):
            with node.clocks.worn():
                node.serving.ports.blocked_ways.unanswered(bad.node_id, trio.current_time())
        await trio.sleep(3)  # until it is on their cards
        await leaver.serving.leave("its user wants to go")
        assert not {bad.node_id, leaver.node_id} & set(holders(first))


async def test_requests_that_find_no_room_do_not_wait_for_each_other(autojump_clock: trio.testing.MockClock) -> None:
    """Each waits for news of the way that is blocked, and not in turn."""
    async with three_of(3) as cluster:
        await cluster.ask(cluster.nodes[0], cluster.request((1,), 2))
        first, second, lost = map(cluster.node_of, holders(cluster.nodes[0]))
        assert first is not None
        assert second is not None
        assert lost is not None
        cluster.kill(lost)
        with first.clocks.worn():
            first.serving.ports.blocked_ways.unanswered(second.node_id, trio.current_time())
        await trio.sleep(5)
        begun = trio.current_time()

        async def in_vain() -> None:
            with pytest.raises(NoRoom):
                await cluster.ask(first, cluster.request((2,), 3))

        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(in_vain)
        assert trio.current_time() - begun < 30 * NEWS_SECONDS / 3
