"""Coordinates come to agree with the network, survive nonsense, and stand still when nothing changes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.base.errors import ProtocolError
from meshinfer.base.ids import NodeId
from meshinfer.mesh.coordinates import Coordinates, at_origin
from meshinfer.mesh.neighbours import wanted
from meshinfer.testing.cards import node_card
from meshinfer.testing.phantoms import SMALL_PHANTOMS, SOFTWARE_SECONDS, Phantom, forty_sites
from meshinfer.topology.coordinate import DIMENSIONS, Coordinate, distance_seconds
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.wire.codec import decode, encode

floats = st.floats(allow_nan=True, allow_infinity=True)


def round_trip(phantom: Phantom, one: NodeId, other: NodeId) -> float:
    ways = (phantom.link(one, other), phantom.link(other, one))
    return sum(way.latency_seconds for way in ways) + 2 * SOFTWARE_SECONDS


def converge(phantom: Phantom, rounds: int, rng: random.Random) -> dict[NodeId, Coordinates]:
    """Every node measures its neighbours once a round, 10 % off either way."""
    nodes = sorted(phantom.by_id)
    places = {node: Coordinates(random.Random(node)) for node in nodes}
    chosen = {node: set(wanted(node, nodes, (), ()).neighbours) for node in nodes}
    for node, others in list(chosen.items()):
        for other in list(others):
            chosen[other].add(node)
    for _ in range(rounds):
        for node in nodes:
            for other in sorted(chosen[node]):
                measured = round_trip(phantom, node, other) * (1 + rng.uniform(-0.1, 0.1))
                places[node].measured(other, places[other].own, measured)
    return places


def errors(phantom: Phantom, places: dict[NodeId, Coordinates], rng: random.Random, pairs: int = 500) -> list[float]:
    """Relative errors of estimated round trips, sorted."""
    found: list[float] = []
    for _ in range(pairs):
        one, other = rng.sample(sorted(places), 2)
        truth = round_trip(phantom, one, other)
        found.append(abs(distance_seconds(places[one].own, places[other].own) - truth) / truth)
    return sorted(found)


@pytest.mark.parametrize("title", SMALL_PHANTOMS)
def test_small_networks_are_learnt(title):
    rng = random.Random(1)
    phantom = SMALL_PHANTOMS[title](rng)
    found = errors(phantom, converge(phantom, 100, rng), rng)
    assert found[len(found) // 2] < 0.3


def test_a_hundred_nodes_in_forty_sites_are_learnt_from_a_dozen_each():
    rng = random.Random(2)
    phantom = forty_sites(rng, 100)
    early = errors(phantom, converge(phantom, 2, random.Random(3)), random.Random(4))
    late = errors(phantom, converge(phantom, 40, random.Random(3)), random.Random(4))
    assert late[len(late) // 2] < 0.25
    assert late[len(late) // 2] < early[len(early) // 2] / 2


def test_the_same_dice_give_the_same_places():
    phantom = SMALL_PHANTOMS["two-rooms"](random.Random(5))
    once = converge(phantom, 20, random.Random(6))
    again = converge(phantom, 20, random.Random(6))
    assert {node: place.own for node, place in once.items()} == {node: place.own for node, place in again.items()}


places = st.builds(Coordinate, st.tuples(*(floats,) * DIMENSIONS), floats, floats, floats) | st.builds(
    Coordinate, st.lists(floats, max_size=3).map(tuple), floats, floats, floats
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from("abc"), places, floats), max_size=30))
def test_nonsense_from_others_leaves_a_sane_place(told):
    own = Coordinates(random.Random(0))
    for peer, place, rtt in told:
        own.measured(NodeId(peer), place, rtt)
    numbers = (*own.own.position, own.own.height_seconds, own.own.error, own.own.adjustment_seconds)
    assert all(math.isfinite(number) for number in numbers)
    assert decode(Coordinate, encode(own.announced())) == own.announced()


def test_no_wire_takes_a_place_of_another_dimension():
    with pytest.raises(ProtocolError):
        decode(Coordinate, encode(replace(at_origin(), position=(0.0,))))


@given(st.floats(1e-4, 1.0))
def test_two_nodes_find_their_distance(rtt):
    one, other = Coordinates(random.Random(1)), Coordinates(random.Random(2))
    for _ in range(200):
        one.measured(NodeId("b"), other.own, rtt)
        other.measured(NodeId("a"), one.own, rtt)
    assert abs(distance_seconds(one.own, other.own) - rtt) < 0.1 * rtt


def test_what_is_announced_stands_still_when_the_network_does():
    phantom = SMALL_PHANTOMS["star"](random.Random(7))
    settled = converge(phantom, 100, random.Random(8))
    node = min(settled)
    others = sorted(settled.keys() - {node})
    said = settled[node].announced()
    rng = random.Random(9)
    changes = 0
    for _ in range(100):
        for other in others:
            truth = round_trip(phantom, node, other)
            settled[node].measured(other, settled[other].own, truth * (1 + rng.uniform(-0.1, 0.1)))
        changes += settled[node].announced() != said
        said = settled[node].announced()
    assert changes < 60  # ten per cent of noise move the hub of a star now and then, not with every measurement


# --- far pairs of a topology --------------------------------------------------------------------------


def test_a_far_pair_is_estimated_and_says_so():
    near, far = (0.001,) + (0.0,) * (DIMENSIONS - 1), (0.02,) + (0.0,) * (DIMENSIONS - 1)
    cards = [
        node_card("a", coordinate=Coordinate(near, 1e-3, 0.1)),
        node_card("b", coordinate=Coordinate(far, 1e-3, 0.1)),
        node_card("c"),
    ]
    links = [
        Link(NodeId("a"), NodeId("c"), 2e-3, bandwidth_bytes_per_second=5e6),
        Link(NodeId("c"), NodeId("b"), 2e-3, bandwidth_bytes_per_second=9e6),
    ]
    topology = Topology.of(cards, links)
    link = topology.link_or_estimate(NodeId("a"), NodeId("b"))
    assert link is not None
    assert link.estimated
    assert link.rtt_seconds == pytest.approx(0.021, rel=0.05)
    assert link.bandwidth_bytes_per_second == 5e6  # what a gives at least, and less than b takes
    assert topology.link_or_estimate(NodeId("a"), NodeId("c")) is links[0]
    assert topology.link_or_estimate(NodeId("b"), NodeId("c")) is None  # c has no coordinate, nobody measured
    assert topology.link_or_estimate(NodeId("a"), NodeId("a")) is None
