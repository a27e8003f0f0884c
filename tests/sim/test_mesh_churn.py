"""Who is lost, who only seems to be, and how soon all know: membership in whole meshes, on virtual time."""

from __future__ import annotations

import datetime as dt
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from mesh_room import Room, play, room, simulation

from meshinfer.base.ids import NodeId
from meshinfer.mesh.pace import PERIOD_SECONDS
from meshinfer.testing.network import SimNetwork

STOPPED_SECONDS = 2.6
KILLED_SECONDS = 0.5
IN_DOUBT_SECONDS = 1.1
"""One second, and the 50 ms at which the room looks."""


async def watch_all_see(stage: Room, nodes: set[NodeId], seconds: float, apart: Iterable[NodeId] = ()) -> None:
    """For so long nobody of `nodes` (but `apart`) misses any of them, not for a moment."""
    until = trio.current_time() + seconds
    while trio.current_time() < until:
        assert stage.all_see(nodes, by=nodes - {*apart}), (trio.current_time(), stage.sees())
        await trio.sleep(0.02)


@simulation(8)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from([3, 4, 6]),
    breaks=st.booleans(),
    one_way=st.booleans(),
)
def test_when_only_the_link_between_two_breaks_neither_is_lost(
    seed: int, count: int, breaks: bool, one_way: bool
) -> None:
    async def tale(stage: Room) -> None:
        everyone = await stage.gather(count)
        await trio.sleep(random.Random(seed).uniform(0, 3))
        one, other, *_ = sorted(everyone)
        stage.network.cut([one], [other], one_way=one_way)
        if breaks:
            stage.network.disconnect(one, other)
        await watch_all_see(stage, everyone, 15)
        assert (one, other) not in stage.meshes[one].topology().link_between, "and no plan counts on the link"
        assert one not in stage.meshes[other].doubtful()
        incarnations = [stage.cards[node].card.incarnation for node in (one, other)]
        assert max(incarnations) <= 4, "a refutation or two, and peace"
        stage.network.heal()
        await stage.wait(lambda: (one, other) in stage.meshes[one].topology().link_between, 2 * PERIOD_SECONDS)

    play(SimNetwork(random.Random(seed), 0.002), tale)


@simulation(8)
@given(seed=st.integers(0, 2**32), count=st.sampled_from([2, 3, 5]), how=st.sampled_from(["kill", "stop"]))
def test_all_know_in_time_who_is_gone_and_doubt_whoever_is_silent(seed: int, count: int, how: str) -> None:
    async def tale(stage: Room) -> None:
        everyone = await stage.gather(count)
        await trio.sleep(random.Random(seed).uniform(0, 3))
        victim = sorted(everyone)[seed % count]
        rest = everyone - {victim}
        getattr(stage.network, how)(victim)
        if how == "stop":
            await stage.wait(lambda: all(victim in stage.meshes[node].doubtful() for node in rest), IN_DOUBT_SECONDS)
            await stage.wait(lambda: stage.all_see(rest, by=rest), STOPPED_SECONDS - 1)
        else:
            await stage.wait(lambda: stage.all_see(rest, by=rest), KILLED_SECONDS)
        assert all(stage.meshes[node].doubtful() == frozenset() for node in rest)

    play(SimNetwork(random.Random(seed), 0.002), tale)


async def test_thirty_notice_a_stop_and_a_kill_alike(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path, SimNetwork(latency_seconds=0.002)) as stage:
        everyone = await stage.gather(30)
        await trio.sleep(2)
        stopped, killed, *_ = sorted(everyone)[3:]
        stage.network.stop(stopped)
        rest = everyone - {stopped}
        await stage.wait(lambda: stage.all_see(rest, by=rest), STOPPED_SECONDS)
        stage.network.kill(killed)
        rest -= {killed}
        await stage.wait(lambda: stage.all_see(rest, by=rest), KILLED_SECONDS)


async def test_half_of_the_mesh_stops_at_once(autojump_clock, tmp_path: Path) -> None:
    """Nobody's doubt of himself may break the promise."""
    async with room(tmp_path) as stage:
        everyone = await stage.gather(6)
        await trio.sleep(2)
        gone = set(sorted(everyone)[:4])
        for node in gone:
            stage.network.stop(node)
        rest = everyone - gone
        await stage.wait(lambda: stage.all_see(rest, by=rest), 3)


async def test_a_node_that_gets_slower_and_slower_is_not_buried_while_it_answers(
    autojump_clock, tmp_path: Path
) -> None:
    """More processes than cores: it comes to itself only now and then, and answers all that has come in meanwhile."""
    async with room(tmp_path, SimNetwork(latency_seconds=0.002)) as stage:
        everyone = await stage.gather(4)
        await trio.sleep(3)
        slow = sorted(everyone)[1]
        for stall in (0.8, 1.2, 1.6, *[1.9] * 3, *[3.0] * 6):
            stage.network.stop(slow)
            await watch_all_see(stage, everyone, stall, apart=[slow])
            stage.network.resume(slow)
            await watch_all_see(stage, everyone, 0.3, apart=[slow])
        await trio.sleep(15)  # quick again, it is held to what the mesh promises
        stage.network.stop(slow)
        rest = everyone - {slow}
        await stage.wait(lambda: stage.all_see(rest, by=rest), STOPPED_SECONDS)


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_link_that_flaps_every_second_loses_nobody(autojump_clock, tmp_path: Path, breaks: bool) -> None:
    network = SimNetwork(latency_seconds=0.002)
    async with room(tmp_path, network) as stage:
        everyone = await stage.gather(3)
        await trio.sleep(3)
        one, other, _ = sorted(everyone)
        before = {node: mesh.statistics().topology_changes for node, mesh in stage.meshes.items()}
        for _ in range(20):
            network.cut([one], [other])
            if breaks:
                network.disconnect(one, other)
            await watch_all_see(stage, everyone, 0.5)
            network.heal()
            await watch_all_see(stage, everyone, 0.5)
        for node, mesh in stage.meshes.items():
            assert mesh.statistics().topology_changes - before[node] <= 60, "about a change of the link per flap"
        assert max(stage.cards[node].card.incarnation for node in everyone) <= 25, "at most one refutation per flap"
        await trio.sleep(PERIOD_SECONDS)
        assert (one, other) in stage.meshes[one].topology().link_between


async def test_a_bridge_that_dies_parts_its_two_sides_in_time(autojump_clock, tmp_path: Path) -> None:
    network = SimNetwork()
    async with room(tmp_path, network) as stage:
        everyone = await stage.gather(3)
        bridge, one, other = sorted(everyone)
        network.cut([one], [other])
        await watch_all_see(stage, everyone, 20)
        network.stop(bridge)
        await stage.wait(lambda: stage.sees()[one] == {one} and stage.sees()[other] == {other}, 3)
        network.resume(bridge)
        await stage.wait(lambda: stage.all_see(everyone), 2 * PERIOD_SECONDS)


@simulation(4)
@given(seed=st.integers(0, 2**32), cut_seconds=st.floats(5, 60))
def test_two_halves_merge_within_two_gossip_periods(seed: int, cut_seconds: float) -> None:
    async def tale(stage: Room) -> None:
        everyone = await stage.gather(8)
        nodes = sorted(everyone)
        left, right = set(nodes[:4]), set(nodes[4:])
        stage.network.cut(left, right)
        await trio.sleep(cut_seconds)
        assert stage.all_see(left, by=left)
        assert stage.all_see(right, by=right)
        stage.network.heal()
        await stage.wait(lambda: stage.all_see(everyone), 2 * PERIOD_SECONDS)
        await watch_all_see(stage, everyone, 10)

    play(SimNetwork(random.Random(seed), 0.002), tale)


async def test_what_the_data_path_loses_is_in_doubt_at_once(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        first, second, third = sorted(await stage.gather(3))
        await trio.sleep(3)
        stage.network.stop(third)
        stage.meshes[first].blame(third)
        await stage.wait(lambda: third in stage.meshes[first].doubtful(), 0.35)
        # Blame of one who lives harms nobody.
        stage.meshes[first].blame(second)
        await trio.sleep(1)
        assert second not in stage.meshes[first].doubtful()


async def test_no_wall_clock_is_read(autojump_clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So one that is an hour off, or jumps, changes nothing."""
    asked: list[str] = []

    def forbidden(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def read(*arguments: object) -> object:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("meshinfer"):
                asked.append(f"{name} in {caller}")
            return real(*arguments)

        return read

    for name in ("time", "time_ns", "localtime", "gmtime"):
        monkeypatch.setattr(time, name, forbidden(name, getattr(time, name)))

    class NoDate(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
            asked.append("datetime.now")
            return super().now(tz)

    monkeypatch.setattr(dt, "datetime", NoDate)
    async with room(tmp_path) as stage:
        everyone = await stage.gather(4)
        victim = max(everyone)
        stage.network.stop(victim)
        await stage.wait(lambda: stage.all_see(everyone - {victim}, by=everyone - {victim}), STOPPED_SECONDS)
        stage.network.resume(victim)
        await stage.wait(lambda: stage.all_see(everyone), 2 * PERIOD_SECONDS)
    assert asked == []


async def test_an_idle_hour_is_flat(autojump_clock, tmp_path: Path) -> None:
    """Gossip and calls in five minutes (some 74 of each node: one more or less is no news), what is held and what waits."""
    async with room(tmp_path) as stage:
        await stage.gather(3)
        spans: list[dict[str, int]] = []
        for _ in range(12):
            before = {node: transport.statistics() for node, transport in stage.transports.items()}
            await trio.sleep(300)
            after = {node: transport.statistics() for node, transport in stage.transports.items()}
            statistics = [mesh.statistics() for mesh in stage.meshes.values()]
            spans.append(
                {
                    "gossip bytes": sum(after[n].gossip_bytes_sent - before[n].gossip_bytes_sent for n in after),
                    "gossip": sum(after[n].gossip_sent - before[n].gossip_sent for n in after),
                    "calls": sum(after[n].calls_sent - before[n].calls_sent for n in after),
                    "view bytes": sum(s.view.size_bytes for s in statistics),
                    "view nodes": sum(s.view.nodes + s.view.expired for s in statistics),
                    "events waiting": sum(t.events.statistics().current_buffer_used for t in stage.transports.values()),
                    "tasks": len(trio.lowlevel.current_root_task().child_nurseries[0].child_tasks),  # type: ignore[union-attr]
                    "dialling": sum(s.connector.dialling for s in statistics),
                    "topology changes": sum(s.topology_changes for s in statistics),
                }
            )
        second, last = spans[1], spans[-1]
        for name in ("view nodes", "events waiting", "tasks", "dialling", "topology changes"):
            assert last[name] == second[name], (name, spans)
        for name in ("gossip bytes", "gossip", "calls", "view bytes"):
            for span in spans[1:]:
                assert abs(span[name] - second[name]) <= 0.05 * second[name], (name, spans)
        assert second["gossip bytes"] < 3 * 300 * 512, "under half a kilobyte a second and node"
