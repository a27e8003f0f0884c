"""Whole meshes measure their links: soon, in both directions, over the better address, on a budget. Virtual time."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mesh_room import Room
from mesh_room import play as play_in_room
from trio.testing import MockClock

from meshinfer.base.ids import NodeId
from meshinfer.config import PROBE_BYTES_PER_HOUR
from meshinfer.mesh.announcement import sign
from meshinfer.mesh.far_links import MAX_WANTED, FarLinks
from meshinfer.mesh.gossip import MAX_ANNOUNCED_LINKS, Gossip
from meshinfer.mesh.link_plan import BURSTS_SECONDS
from meshinfer.mesh.link_probe import LinkProber
from meshinfer.mesh.neighbours import most_wanted, wanted
from meshinfer.mesh.own_card import OwnCard
from meshinfer.mesh.view import View
from meshinfer.testing.cards import node_card
from meshinfer.testing.network import SimNetwork, SimTransport
from meshinfer.testing.phantoms import asymmetric_uplinks, forty_sites
from meshinfer.testing.probes import SimProbes, Truth
from meshinfer.topology.card import SeatReport
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.topology.speed import LinkSpeed
from meshinfer.transport.probe_channel import LATENCY_BYTES, MAX_BURST_BYTES

FAST = LinkSpeed(0.1e-3, 110e6, 40e-6)
SLOW = LinkSpeed(2e-3, 5e6, 40e-6)
A, B = NodeId("n00"), NodeId("n01")


def play(
    truth: Truth,
    tale: Callable[[Room, SimProbes], Awaitable[None]],
    network: SimNetwork | None = None,
    own_host: Callable[[NodeId, str], str] | None = None,
) -> None:
    """Run `tale` in a fresh room whose links are what `truth` says."""
    network = network or SimNetwork(random.Random(1))
    probes = SimProbes(truth, network.rng, own_host=own_host or (lambda node, _host: host_of(network, node)))
    play_in_room(network, lambda stage: tale(stage, probes), probes)


def host_of(network: SimNetwork, node: NodeId) -> str:
    running = network.running(node)
    return running.addresses()[0].rpartition(":")[0] if running else ""


def link(topology: Topology, source: NodeId, target: NodeId) -> Link | None:
    return topology.link_between.get((source, target))


def is_measured(stage: Room, *, bandwidth: bool) -> bool:
    """Every pair, each way, as every node sees it."""
    nodes = set(stage.meshes)
    return all(
        (found := link(mesh.topology(), one, other)) is not None
        and found.channel_rtt_seconds > 0
        and (not bandwidth or found.bandwidth_bytes_per_second > 0)
        for mesh in stage.meshes.values()
        for one in nodes
        for other in nodes - {one}
    )


def near(value: float, truth: float, share: float = 0.35) -> bool:
    """Within noise and steadiness."""
    return (1 - share) * truth <= value <= (1 + share) * truth


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a seed does not shrink
)
@given(st.integers(0, 2**32))
def test_each_direction_is_measured_soon_and_everybody_sees_it(seed: int) -> None:
    phantom = asymmetric_uplinks(random.Random(seed))
    names = dict(zip((f"n{index:02}" for index in range(6)), sorted(phantom.by_id), strict=True))

    def truth(source: NodeId, target: NodeId, host: str) -> LinkSpeed | None:
        del host
        return phantom.link(names[source], names[target])

    async def tale(stage: Room, _probes: SimProbes) -> None:
        nodes = await stage.gather(6)
        await stage.wait(lambda: is_measured(stage, bandwidth=False), 5)
        await stage.wait(lambda: is_measured(stage, bandwidth=True), 60)
        topology = stage.meshes[A].topology()
        for one in nodes:
            for other in nodes - {one}:
                found, real = link(topology, one, other), truth(one, other, "")
                assert found is not None
                assert real is not None
                assert near(found.bandwidth_bytes_per_second, real.bandwidth_bytes_per_second)
                assert near(found.message_seconds, real.message_seconds)
                assert found.speed is not None

    play(truth, tale, SimNetwork(random.Random(seed)))


# --- addresses ------------------------------------------------------------------------------------------

WIFI = {A: "10.9.0.1", B: "10.9.0.2"}
CABLE = {A: "10.8.0.1", B: "10.8.0.2"}


class Cabling:
    """Two nodes on one Wi-Fi; a cable between them may be plugged in."""

    def __init__(self) -> None:
        self.plugged = False
        self.wifi = SLOW

    def truth(self, source: NodeId, target: NodeId, host: str) -> LinkSpeed | None:
        del source, target
        if host in WIFI.values():
            return self.wifi
        return FAST if self.plugged and host in CABLE.values() else None

    def own_host(self, node: NodeId, host: str) -> str:
        return (CABLE if host in CABLE.values() else WIFI)[node]

    async def both(self, stage: Room) -> None:
        await stage.start("n00", addresses=(f"{WIFI[A]}:7000", f"{CABLE[A]}:7000"))
        await stage.start("n01", addresses=(f"{WIFI[B]}:7000", f"{CABLE[B]}:7000"))
        await stage.wait(lambda: stage.all_see({A, B}), 5)


def test_both_ends_move_to_the_cable_when_it_is_plugged_in_and_back_when_it_is_pulled() -> None:
    cabling = Cabling()

    async def tale(stage: Room, _probes: SimProbes) -> None:
        def agree(hosts: dict[NodeId, str]) -> bool:
            return stage.meshes[A].best_host(B) == hosts[B] and stage.meshes[B].best_host(A) == hosts[A]

        await cabling.both(stage)
        await stage.wait(lambda: agree(WIFI), 10)
        cabling.plugged = True
        await stage.wait(lambda: agree(CABLE), 60)
        for one, other in ((A, B), (B, A)):
            await stage.wait(
                lambda one=one, other=other: near(
                    link(stage.meshes[one].topology(), one, other).bandwidth_bytes_per_second,  # pyright: ignore
                    FAST.bandwidth_bytes_per_second,
                ),
                60,
            )
        cabling.plugged = False
        await stage.wait(lambda: agree(WIFI), 300)

    play(cabling.truth, tale, own_host=cabling.own_host)


def test_a_link_that_gets_much_worse_is_told_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    cabling = Cabling()

    async def tale(stage: Room, _probes: SimProbes) -> None:
        await cabling.both(stage)
        await stage.wait(lambda: is_measured(stage, bandwidth=True), 60)
        cabling.wifi = LinkSpeed(2e-3, 1e6, 40e-6)
        await stage.wait(lambda: stage.meshes[B].topology().link_between[A, B].degraded, 3 * BURSTS_SECONDS)
        shown = stage.meshes[A].topology().to_json()["nodes"]
        assert shown[A]["links"][B]["degraded"]
        await trio.sleep(600)

    with caplog.at_level(logging.WARNING):
        play(cabling.truth, tale, own_host=cabling.own_host)
    told = [record for record in caplog.records if "worse than half" in record.getMessage()]
    assert len(told) == 2  # once by each end, of its own direction


def test_an_address_that_no_card_confirms_is_not_dialled() -> None:
    cabling = Cabling()

    async def tale(stage: Room, _probes: SimProbes) -> None:
        await cabling.both(stage)
        await stage.wait(lambda: stage.meshes[A].best_host(B) == WIFI[B], 10)
        await trio.sleep(5)
        # What the decider says of itself is the far side of a translation: the connection's address is used.
        assert stage.meshes[B].best_host(A) == stage.transports[B].peer_host(A)

    play(cabling.truth, tale, own_host=lambda _node, _host: "203.0.113.9")


def test_the_other_end_tries_where_the_decider_finds_no_way() -> None:
    def truth(source: NodeId, target: NodeId, host: str) -> LinkSpeed | None:
        del source, target
        return None if host == "10.0.0.2" else SLOW  # n01 lets nobody in

    async def tale(stage: Room, _probes: SimProbes) -> None:
        await stage.gather(2)
        await stage.wait(lambda: is_measured(stage, bandwidth=True), 60)

    play(truth, tale)


# --- not in the way ------------------------------------------------------------------------------------


def uniform(speed: LinkSpeed) -> Truth:
    return lambda _source, _target, _host: speed


def test_no_bursts_while_a_runner_works_at_either_end() -> None:
    async def tale(stage: Room, probes: SimProbes) -> None:
        await stage.start("n00")
        busy = SeatReport("i" * 16, 1, "p" * 32, 0, "ready", sessions=1)
        stage.cards[A].update(seats=(busy,))
        await stage.start("n01")
        await stage.start("n02")
        await stage.wait(lambda: is_measured(stage, bandwidth=False), 10)
        await trio.sleep(60)
        for one, other in ((A, B), (B, A)):
            found = link(stage.meshes[B].topology(), one, other)
            assert found is not None
            assert found.bandwidth_bytes_per_second == 0
        free = link(stage.meshes[B].topology(), B, NodeId("n02"))
        assert free is not None
        assert free.bandwidth_bytes_per_second > 0
        stage.cards[A].update(seats=())
        await stage.wait(lambda: is_measured(stage, bandwidth=True), 60)
        del probes

    play(uniform(FAST), tale)


def test_real_frames_are_believed_first_and_need_no_bursts() -> None:
    async def tale(stage: Room, probes: SimProbes) -> None:
        await stage.gather(2)
        await stage.wait(lambda: is_measured(stage, bandwidth=True), 60)
        spent = probes.doors[A].spent_bytes
        for _ in range(900):  # a quarter of an hour of a runner in B that receives from A at 30 MB/s
            stage.meshes[B].frame_arrived(A, 1_500_000, 0.05)
            await trio.sleep(1)
        for mesh in stage.meshes.values():
            found = link(mesh.topology(), A, B)
            assert found is not None
            assert near(found.bandwidth_bytes_per_second, 30e6)
        round_trips = LATENCY_BYTES * (900 / 120 + 10)
        assert probes.doors[A].spent_bytes - spent < round_trips

    play(uniform(FAST), tale)


def test_frames_of_strangers_are_nobodys() -> None:
    async def tale(stage: Room, _probes: SimProbes) -> None:
        await stage.gather(2)
        stage.meshes[A].frame_arrived(NodeId("nobody"), 1_000_000, 0.1)
        stage.meshes[A].frame_arrived(B, 1_000_000, 0.0)
        assert stage.meshes[A].best_host(NodeId("nobody")) is None

    play(uniform(FAST), tale)


class Probers:
    """Probers alone on one network, without meshes around them: hours and hundreds of pings would take minutes.

    Cards and links reach everyone within five seconds, as by gossip.
    """

    def __init__(self, network: SimNetwork, probes: SimProbes, nursery: trio.Nursery) -> None:
        self.network, self.probes, self._nursery = network, probes, nursery
        self.transports: dict[NodeId, SimTransport] = {}
        self.cards: dict[NodeId, OwnCard] = {}
        self.probers: dict[NodeId, LinkProber] = {}
        self.far: dict[NodeId, FarLinks] = {}
        self._gossip = (float("-inf"), Topology((), ()))

    def topology(self) -> Topology:
        at, topology = self._gossip
        if trio.current_time() - at >= 5:
            topology = self.now()
            self._gossip = (trio.current_time(), topology)
        return topology

    def now(self) -> Topology:
        links = [
            link
            for node, prober in self.probers.items()
            for link in prober.complete(Link(node, peer, 1e-3) for peer in self.transports[node].peers())
        ]
        return Topology.of([own.card for own in self.cards.values()], links)

    def spent(self) -> dict[NodeId, int]:
        return {node: door.spent_bytes for node, door in self.probes.doors.items()}

    async def gather(self, count: int, home: Path) -> None:
        """`count` nodes, each connected to those that it wants."""
        for index in range(count):
            transport = self.network.add(f"n{index:02}")
            await self._nursery.start(transport.run)
            self.transports[transport.node_id] = transport
            card = node_card(transport.node_id, addresses=transport.addresses())
            self.cards[transport.node_id] = OwnCard(card, home)
        for node, transport in self.transports.items():
            for other in wanted(node, self.transports.keys(), (), ()).neighbours:
                await transport.dial(self.transports[other].addresses()[0], None, 1)
            self.probers[node] = LinkProber(
                transport,
                self.probes.of(node),
                self.cards[node],
                topology=self.topology,
                members=transport.peers,
                ping_seconds=lambda _node: 0.0,
                on_change=lambda: None,
                on_drift=lambda: None,
                bytes_per_hour=PROBE_BYTES_PER_HOUR,
                rng=self.network.rng,
            )
            self.far[node] = FarLinks(
                transport,
                topology=self.topology,
                dial=partial(self._dial, transport),
                on_more_to_tell=lambda: None,
            )
        for node, prober in self.probers.items():
            self._nursery.start_soon(prober.run)
            self._nursery.start_soon(self.far[node].run)

    def _dial(self, transport: SimTransport, node: NodeId) -> None:
        self._nursery.start_soon(transport.dial, self.transports[node].addresses()[0], node, 1.0)


def probe_alone(truth: Truth, count: int, tale: Callable[[Probers], Awaitable[None]], home: Path) -> None:
    network = SimNetwork(random.Random(3))
    probes = SimProbes(truth, network.rng, own_host=lambda node, _host: host_of(network, node))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            alone = Probers(network, probes, nursery)
            await alone.gather(count, home)
            await tale(alone)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("count", [2, 4])
def test_hours_of_probing_stay_on_the_budget(count: int, tmp_path: Path) -> None:
    hourly: list[int] = []

    async def tale(alone: Probers) -> None:
        for _ in range(2):
            before = alone.spent()
            await trio.sleep(3600)
            hourly.extend(spent - before[node] for node, spent in alone.spent().items())
        assert all(prober.statistics().measured == count - 1 for prober in alone.probers.values())

    probe_alone(uniform(FAST), count, tale, tmp_path)
    # One probe's bursts may be under way when an hour ends.
    assert max(hourly) <= PROBE_BYTES_PER_HOUR + 2 * MAX_BURST_BYTES
    assert min(hourly) > 0


# --- large meshes ----------------------------------------------------------------------------------------


def sites(count: int) -> Callable[[NodeId, NodeId], LinkSpeed]:
    """The truth of `count` nodes in forty sites."""
    phantom = forty_sites(random.Random(11), count)
    names = dict(zip((NodeId(f"n{index:02}") for index in range(count)), sorted(phantom.by_id), strict=True))
    return lambda one, other: phantom.link(names[one], names[other])


def test_far_pairs_are_estimated_and_measured_when_a_plan_wants_them(tmp_path: Path) -> None:
    real = sites(28)
    off: list[float] = []

    async def tale(alone: Probers) -> None:
        await trio.sleep(40)
        topology, nodes = alone.now(), sorted(alone.cards)
        far = [
            (one, other)
            for one in nodes
            for other in nodes
            if one != other and not {(one, other), (other, one)} & topology.link_between.keys()
        ]
        assert len(far) > 200
        for one, other in far:
            estimate = topology.link_or_estimate(one, other)
            assert estimate is not None
            assert estimate.estimated
            round_trip = real(one, other).latency_seconds + real(other, one).latency_seconds
            off.append(abs(estimate.rtt_seconds - round_trip) / round_trip)

        own = nodes[0]
        pairs = [pair for pair in far if own not in pair][:2] + [pair for pair in far if pair[0] == own][:2]
        alone.far[own].want(pairs)
        await trio.sleep(15)
        for source, target in (*pairs, *((target, source) for source, target in pairs)):
            link = alone.now().link_between.get((source, target))
            assert link is not None
            assert not link.estimated
            assert link.channel_rtt_seconds > 0
            assert target in alone.far[source].asked_for(), "it tells that link, however many it has"
        for links in alone.far.values():
            links.want(far)  # whatever a planner asks for
        await trio.sleep(5)
        assert (
            max(len(transport.peers()) for transport in alone.transports.values()) <= 32 + 16
        )  # its own wishes, and those of others who have room

    probe_alone(lambda one, other, _host: real(one, other), 28, tale, tmp_path)
    off.sort()
    assert off[len(off) // 2] < 0.35


async def test_of_too_many_links_those_that_planners_count_on_are_told(autojump_clock, tmp_path: Path) -> None:
    network = SimNetwork(random.Random(1))
    transport = network.add("n000")
    others = [NodeId(f"n{index:03}") for index in range(1, 1 + 2 * MAX_ANNOUNCED_LINKS)]
    asked_for = set(others) - most_wanted(transport.node_id, others, len(others) - MAX_WANTED)  # the heaviest
    card = OwnCard(node_card(transport.node_id), tmp_path)
    view = View(sign(card.card, (), transport.sign))
    gossip = Gossip(
        transport,
        card,
        view,
        links=lambda: tuple(Link(transport.node_id, other, 1e-3) for other in others),
        asked_for=lambda: asked_for,
        suspects=tuple,
        neighbours=tuple,
        on_merge=lambda _heard, _result: None,
        rng=network.rng,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(transport.run)
        await gossip.publish()
        nursery.cancel_scope.cancel()
    told = {link.target for link in view.own.links}
    assert len(told) == MAX_ANNOUNCED_LINKS
    assert asked_for <= told


def test_the_cost_of_a_node_does_not_grow_with_the_mesh(tmp_path: Path) -> None:
    spent: dict[int, float] = {}

    async def tale(alone: Probers) -> None:
        await trio.sleep(30)
        spent[len(alone.cards)] = sum(alone.spent().values()) / len(alone.cards)

    for count in (20, 40):
        probe_alone(uniform(FAST), count, tale, tmp_path)
    assert spent[40] < 1.3 * spent[20]
