"""Agents find each other, notice who goes, and agree again after a cut. On virtual time.

The tests that replay a schedule are Hypothesis tests: it registers trio's dice, so a failure prints
what reproduces it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from mesh_room import Room, play, room, simulation

from meshinfer.base.errors import BadInput, PeerLost
from meshinfer.base.ids import InstanceId, NodeId, PlacementId
from meshinfer.mesh.announcement import sign
from meshinfer.mesh.mesh import Mesh
from meshinfer.mesh.pace import SETTLE_SECONDS
from meshinfer.testing.cards import node_card
from meshinfer.testing.network import SimNetwork
from meshinfer.topology.card import SeatReport
from meshinfer.wire.codec import encode

NOTICE_SECONDS = 3.0
"""Promised of whoever answered quickly until then: after this, the dead are in no topology."""
TWO_PERIODS_SECONDS = 4.0


@pytest.mark.parametrize("count", [3, 8, 30])
def test_all_find_each_other_through_one_contact(count: int) -> None:
    async def tale(stage: Room) -> None:
        everyone = await stage.gather(count)
        digests = set()
        await trio.sleep(3)
        for mesh in stage.meshes.values():
            digests.add(mesh.topology().digest)
            assert len(mesh.members()) == count - 1
        assert stage.all_see(everyone)
        assert len(digests) == 1, "an idle mesh agrees on its topology to the digit"

    play(SimNetwork(latency_seconds=0.002), tale)


@simulation(12)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from([3, 5, 8]),
    loss=st.sampled_from([0.0, 0.1]),
    latency=st.floats(0.0001, 0.05),
    how=st.sampled_from(["kill", "stop"]),
)
def test_who_goes_is_gone_from_every_topology_and_may_come_back(
    seed: int, count: int, loss: float, latency: float, how: str
) -> None:
    async def tale(stage: Room) -> None:
        everyone = await stage.gather(count)
        # Not at the same moment of everyone's ping each time.
        await trio.sleep(random.Random(seed).uniform(0, 3))
        victim = sorted(everyone)[seed % count]
        before = stage.cards[victim].card.incarnation
        address = stage.transports[victim].addresses()[0]
        getattr(stage.network, how)(victim)
        rest = everyone - {victim}
        await stage.wait(lambda: stage.all_see(rest, by=rest), NOTICE_SECONDS)
        if how == "stop":
            stage.network.resume(victim)
        else:
            await stage.start(victim, seeds=(), address=address)  # its address book knows the others
            assert stage.cards[victim].card.incarnation > before
        await stage.wait(lambda: stage.all_see(everyone), 2 * TWO_PERIODS_SECONDS)

    play(SimNetwork(random.Random(seed), latency, loss), tale)


@simulation(2)
@given(seed=st.integers(0, 2**32), how=st.sampled_from(["kill", "stop"]))
def test_in_a_large_mesh_too(seed: int, how: str) -> None:
    async def tale(stage: Room) -> None:
        everyone = await stage.gather(20, apart_seconds=0.2)
        victim = sorted(everyone)[seed % 20]
        getattr(stage.network, how)(victim)
        rest = everyone - {victim}
        await stage.wait(lambda: stage.all_see(rest, by=rest), NOTICE_SECONDS)

    play(SimNetwork(random.Random(seed), 0.002), tale)


@simulation(8)
@given(seed=st.integers(0, 2**32), cut_at=st.integers(1, 5), cut_seconds=st.floats(1, 40), breaks=st.booleans())
def test_a_cut_heals_and_views_converge_within_two_periods(
    seed: int, cut_at: int, cut_seconds: float, breaks: bool
) -> None:
    async def tale(stage: Room) -> None:
        everyone = await stage.gather(6)
        nodes = sorted(everyone)
        left, right = set(nodes[:cut_at]), set(nodes[cut_at:])
        stage.network.cut(left, right)
        if breaks:  # the transport gave up on the silent connections
            for one in left:
                for other in right:
                    stage.network.disconnect(one, other)
        await trio.sleep(cut_seconds)
        if cut_seconds > NOTICE_SECONDS:
            assert stage.all_see(left, by=left)
            assert stage.all_see(right, by=right)
        for node in nodes:
            stage.cards[node].update(name=f"{node} after")
        stage.network.heal()

        def converged() -> bool:
            return stage.all_see(everyone) and all(
                card.name.endswith("after") for mesh in stage.meshes.values() for card in mesh.topology().nodes
            )

        await stage.wait(converged, TWO_PERIODS_SECONDS)

    play(SimNetwork(random.Random(seed), 0.002), tale)


async def test_a_replaced_connection_is_no_news(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        everyone = await stage.gather(3)
        one, other, _ = sorted(everyone)
        await trio.sleep(3)
        watches = {node: stage.meshes[node].changes() for node in everyone}
        for _ in range(5):
            stage.network.disconnect(one, other)
            for _ in range(50):
                await trio.sleep(0.02)
                assert stage.all_see(everyone)
        for watch in watches.values():
            with trio.move_on_after(0) as scope:
                await watch.changed()
            assert scope.cancelled_caught, "nobody was woken"


async def test_a_bridge_joins_two_that_cannot_reach_each_other(autojump_clock, tmp_path: Path) -> None:
    network = SimNetwork()
    async with room(tmp_path, network) as stage:
        everyone = await stage.gather(3)
        bridge, one, other = sorted(everyone)
        network.cut([one], [other])
        await trio.sleep(20)
        assert stage.all_see(everyone)
        assert {link.target for link in stage.meshes[one].topology().links if link.source == one} == {bridge}


async def test_a_one_way_cut_settles_without_flapping(autojump_clock, tmp_path: Path) -> None:
    network = SimNetwork()
    async with room(tmp_path, network) as stage:
        everyone = await stage.gather(4)
        one, other, *_ = sorted(everyone)
        network.cut([one], [other], one_way=True)
        await trio.sleep(10)
        assert stage.all_see(everyone), "the others reach both"
        counts = {node: mesh.statistics().topology_changes for node, mesh in stage.meshes.items()}
        await trio.sleep(60)
        assert counts == {node: mesh.statistics().topology_changes for node, mesh in stage.meshes.items()}
        network.heal()
        await trio.sleep(5)
        assert (one, other) in stage.meshes[one].topology().link_between


async def test_a_seed_that_is_no_address_is_told_at_once(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        with pytest.raises(BadInput, match="host:port"):
            await stage.start("n0", seeds=("laptop",))


async def test_a_seed_that_nobody_answers_at_is_told_once(
    autojump_clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with room(tmp_path) as stage:
        await stage.start("n0", seeds=("203.0.113.9:52416",))
        await trio.sleep(60)
    told = [record.getMessage() for record in caplog.records if "--peer" in record.getMessage()]
    assert len(told) == 1
    assert "203.0.113.9:52416" in told[0]


async def test_one_who_leaves_is_gone_at_once_and_listed_as_left(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        everyone = await stage.gather(3)
        first, second, third = sorted(everyone)
        await stage.meshes[second].leave()
        await stage.wait(lambda: stage.all_see({first, third}, by={first, third}), 0.1)
        stage.network.kill(second)
        await trio.sleep(1)
        (report,) = [report for report in stage.meshes[first].members() if report.node_id == second]
        assert report.state == "left"
        await stage.start(second)
        await stage.wait(lambda: stage.all_see(everyone), 2)


async def test_a_change_of_a_card_wakes_every_reader_once(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        first, _, third = sorted(await stage.gather(3))
        await trio.sleep(3)
        fast, slow = stage.meshes[third].changes(), stage.meshes[third].changes()
        for count in range(10):
            stage.cards[first].update(memory_promised_bytes=count + 1)
        with trio.fail_after(0.2):
            await fast.changed()
        await trio.sleep(1)
        with trio.fail_after(0.2):
            await slow.changed()
        for watch in (fast, slow):
            with trio.move_on_after(1) as scope:
                await watch.changed()
            assert scope.cancelled_caught
        card = stage.meshes[third].topology().by_id[first]
        assert card.memory_promised_bytes == 10


async def test_gossip_of_an_idle_node_is_flat(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        await stage.gather(8)
        await trio.sleep(2 * SETTLE_SECONDS)
        before = {node: transport.statistics() for node, transport in stage.transports.items()}
        await trio.sleep(100)
        for node, transport in stage.transports.items():
            sent = transport.statistics().gossip_sent - before[node].gossip_sent
            assert 23 <= sent <= 27, "one in four seconds"
            assert transport.statistics().gossip_bytes_sent - before[node].gossip_bytes_sent < sent * 4096


async def test_after_news_of_one_all_say_what_they_know_in_each_period_for_a_while(
    autojump_clock, tmp_path: Path
) -> None:
    """Whoever the news concerns decides by what others say after it."""
    async with room(tmp_path) as stage:
        first, *others = sorted(await stage.gather(5))
        await trio.sleep(2 * SETTLE_SECONDS)
        stage.network.kill(first)
        await stage.wait(lambda: stage.all_see({*others}), 3)
        before = {node: stage.transports[node].statistics().gossip_sent for node in others}
        await trio.sleep(SETTLE_SECONDS - 1)
        for node in others:
            assert stage.transports[node].statistics().gossip_sent - before[node] >= 5


async def test_a_node_that_changes_all_the_time_is_held_to_two_a_second(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        first, second = sorted(await stage.gather(2))
        await trio.sleep(10)
        before = stage.transports[first].statistics().gossip_sent
        for count in range(1000):
            stage.cards[first].update(memory_promised_bytes=count)
            await trio.sleep(0.01)
        assert stage.transports[first].statistics().gossip_sent - before < 35
        await trio.sleep(1)
        card = stage.meshes[second].topology().by_id[first]
        assert card.memory_promised_bytes == 999


async def test_a_seat_that_fails_is_told_at_once_in_a_large_mesh_however_long_it_served(
    autojump_clock, tmp_path: Path
) -> None:
    async with room(tmp_path) as stage:
        first, second = sorted(await stage.gather(2))
        for index in range(160):
            far = NodeId(f"far{index:03}")
            heard = sign(node_card(far), (), lambda payload, far=far: stage.network.seal(far, payload))
            stage.transports[first].expect_gossip(far, encode(heard.signed), 0)
        await trio.sleep(1)
        assert stage.meshes[first].statistics().view.nodes == 162

        seat = SeatReport(InstanceId("1"), 1, PlacementId("p"), 0, "ready")
        card, transport = stage.cards[first], stage.transports[first]
        card.update(seats=(seat,))
        await trio.sleep(1)
        before = transport.statistics().gossip_sent
        for beat in range(30):  # the runner's counters, a minute long
            card.update(seats=(replace(seat, sessions=beat % 7, step_seconds=0.01 * (beat + 1)),))
            await trio.sleep(2)
        assert transport.statistics().gossip_sent - before < 10, "counters wait for the next announcement"
        for beat in range(10):  # news that nobody waits for, until no more of it is told at once
            card.update(memory_usable_bytes=beat + 1)
            await trio.sleep(1)
        card.update(seats=(replace(seat, state="failed"),))

        def is_known() -> bool:
            return [s.state for s in stage.meshes[second].topology().by_id[first].seats] == ["failed"]

        await stage.wait(is_known, 1.0)


async def test_a_mesh_lives_on_without_gossip(autojump_clock, tmp_path: Path) -> None:
    network = SimNetwork(gossip_loss=1.0)
    async with room(tmp_path, network) as stage:
        for index in range(4):
            await stage.start(f"n{index}")
        everyone = set(stage.meshes)
        await stage.wait(lambda: stage.all_see(everyone), 40)
        await trio.sleep(60)
        assert stage.all_see(everyone)


async def test_forged_and_garbled_announcements_change_nothing(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        everyone = await stage.gather(3)
        first, second, third = sorted(everyone)
        liar = stage.transports[third]
        await trio.sleep(3)
        honest = stage.meshes[first].topology().by_id[second]
        # A card of another, signed by the liar, in its own name and in the other's.
        stolen = replace(honest, version=honest.version + 100, name="stolen")
        forged = sign(stolen, (), liar.sign)
        await liar.publish(encode(forged.signed))
        await liar.publish(encode(replace(forged.signed, author=third)))
        rng = random.Random(7)
        for _ in range(200):
            await liar.publish(rng.randbytes(rng.randrange(1, 400)))
        # Its own card, with a number that is not finite.
        own = stage.cards[third].card
        await liar.publish(
            encode(sign(replace(own, version=own.version + 50, load=float("inf")), (), liar.sign).signed)
        )
        await trio.sleep(5)
        assert stage.all_see(everyone)
        assert stage.meshes[first].topology().by_id[second].name != "stolen"
        assert stage.meshes[first].statistics().gossip.refused >= 203


async def test_a_pull_that_brings_garbage_harms_nothing(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        first = await stage.start("n0")
        liar = stage.network.add("liar")

        async def garbage(caller: NodeId, payload: bytes) -> bytes:
            return b"\xff" * 1000

        liar.serve("view/1", garbage)
        liar.serve("ping/1", garbage)
        async with trio.open_nursery() as nursery:
            await nursery.start(liar.run)
            await liar.dial(stage.transports[NodeId("n0")].addresses()[0], NodeId("n0"), 1)
            await trio.sleep(10)
            assert {card.node_id for card in first.topology().nodes} == {"n0"}
            assert first.statistics().gossip.pulls_failed >= 1
            nursery.cancel_scope.cancel()


async def test_a_home_restored_from_a_backup_outbids_its_own_past(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        first, second, third = sorted(await stage.gather(3))
        for _ in range(3):  # several starts, each with a higher incarnation
            stage.network.kill(second)
            await trio.sleep(1)
            await stage.start(second)
            await trio.sleep(3)
        seen = stage.cards[second].card.incarnation
        assert seen == 4
        stage.network.kill(second)
        await trio.sleep(1)
        (tmp_path / second / "incarnation").write_text("1\n")
        await stage.start(second)
        await stage.wait(lambda: stage.all_see({first, second, third}), 5)
        assert stage.cards[second].card.incarnation == seen + 1


async def test_neighbours_are_bounded_in_a_large_mesh(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        await stage.gather(16)
        late = [await stage.start(f"late{index}") for index in range(8)]
        everyone = set(stage.meshes)
        await stage.wait(lambda: stage.all_see(everyone), 10)
        await trio.sleep(1)
        assert isinstance(late[-1], Mesh)
        degree = {node: len(transport.peers()) for node, transport in stage.transports.items()}
        assert min(degree.values()) >= 8
        assert degree[late[-1].node_id] < 20, degree


async def test_whoever_is_called_in_a_large_mesh_is_connected_to_first(autojump_clock, tmp_path: Path) -> None:
    async def echo(_caller: NodeId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return payload

    network = SimNetwork()
    async with room(tmp_path, network) as stage:
        await stage.gather(16)
        late = [await stage.start(f"late{index}") for index in range(4)][-1]
        everyone = set(stage.meshes)
        await stage.wait(lambda: stage.all_see(everyone), 10)
        await trio.sleep(1)
        transport = stage.transports[late.node_id]
        far, gone, *_ = sorted(everyone - transport.peers() - {late.node_id})
        stage.transports[far].serve("echo/1", echo)
        answers: list[bytes] = []

        async def call() -> None:
            answers.append(await late.call(far, "echo/1", b"hello", 1.0))

        async with trio.open_nursery() as nursery:  # whoever comes while another dials waits for that
            nursery.start_soon(call)
            nursery.start_soon(call)
        assert answers == [b"hello"] * 2
        network.kill(gone)
        assert gone in late.topology().by_id
        with pytest.raises(PeerLost, match="not connected"):
            await late.call(gone, "echo/1", b"hello", 1.0)


async def test_cancelling_leaves_nothing_behind(autojump_clock, tmp_path: Path) -> None:
    network = SimNetwork()
    async with room(tmp_path, network) as stage:
        everyone = await stage.gather(3)
        for node in sorted(everyone):
            network.kill(node)
        await stage.wait(lambda: not stage.meshes, 1)
        assert all(not transport.peers() for transport in stage.transports.values())


def test_a_card_of_the_helper_is_valid() -> None:
    assert node_card("n0").node_id == "n0"
