"""Phantoms: seeded, whole, and what their names promise."""

from random import Random

import pytest

from meshinfer.base.ids import NodeId
from meshinfer.planning.planner import plan
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing.phantoms import (
    PHANTOMS,
    SMALL_PHANTOMS,
    asymmetric_uplinks,
    dense_model,
    forty_sites,
    star,
    thunderbolt_pair,
    two_rooms,
)
from meshinfer.wire.codec import encode


@pytest.mark.parametrize("name", SMALL_PHANTOMS)
def test_one_seed_one_phantom(name):
    make = PHANTOMS[name]
    assert make(Random(7)) == make(Random(7))
    assert make(Random(7)) != make(Random(8))
    assert make(Random(7)).topology.digest == make(Random(7)).topology.digest


@pytest.mark.parametrize("name", SMALL_PHANTOMS)
def test_the_topology_is_the_truth_and_measurements_come_near(name):
    phantom = PHANTOMS[name](Random(1))
    noisy = phantom.measured(Random(2), spread=0.1)
    assert len(phantom.topology.links) == len(phantom.nodes) * (len(phantom.nodes) - 1)
    for link in phantom.topology.links:
        there, back = phantom.link(link.source, link.target), phantom.link(link.target, link.source)
        seconds = there.latency_seconds + back.latency_seconds + there.message_seconds + back.message_seconds
        assert link.rtt_seconds == pytest.approx(seconds)
        assert link.latency_seconds == pytest.approx((there.latency_seconds + back.latency_seconds) / 2)
        assert link.bandwidth_bytes_per_second == there.bandwidth_bytes_per_second
        measured = noisy.link_between[link.source, link.target]
        assert measured.rtt_seconds == pytest.approx(link.rtt_seconds, rel=0.101)
    for card in phantom.topology.nodes:
        encode(card)
        assert phantom.speeds[card.node_id].stream_bytes_per_second > 1e9


@pytest.mark.parametrize("name", SMALL_PHANTOMS)
def test_every_small_phantom_serves_a_model_of_its_size(name):
    """A 30B in 4 bits: more than the smaller nodes hold, less than all together."""
    phantom = PHANTOMS[name](Random(3))
    card = dense_model(layers=60, hidden=6656, inner=17_920).card
    assert plan(phantom.topology, card, Workload(context_tokens=2048, concurrency=1), Constraints()).plans


def test_the_wall_between_two_rooms_is_crossed_once_each_way():
    phantom = two_rooms(Random(4))
    card = dense_model(layers=110).card
    chosen = plan(phantom.topology, card, Workload(context_tokens=2048, concurrency=1), Constraints()).plans[0]
    rooms = [phantom.by_id[node_id].site for node_id in chosen.placement.node_ids]
    assert set(rooms) == {"hall", "loft"}
    assert sum(a != b for a, b in zip(rooms, [*rooms[1:], rooms[0]], strict=True)) == 2


def test_the_cable_is_used():
    phantom = thunderbolt_pair(Random(5))
    pair = (NodeId("pair0"), NodeId("pair1"))
    assert phantom.link(*pair).bandwidth_bytes_per_second > 1e9
    assert phantom.link(pair[0], NodeId("straggler0")).bandwidth_bytes_per_second < 1e8
    card = dense_model(layers=80).card
    chosen = plan(phantom.topology, card, Workload(context_tokens=2048, concurrency=1), Constraints()).plans[0]
    assert set(chosen.placement.node_ids) == set(pair)


def test_a_star_is_near_in_the_middle_only():
    phantom = star(Random(6))
    hub, leaf, other = NodeId("hub"), NodeId("leaf0"), NodeId("leaf1")
    assert phantom.link(hub, leaf).latency_seconds < phantom.link(leaf, other).latency_seconds


def test_uplinks_are_not_downlinks():
    phantom = asymmetric_uplinks(Random(7))
    rates = [
        (phantom.link(a, b).bandwidth_bytes_per_second, phantom.link(b, a).bandwidth_bytes_per_second)
        for a in phantom.by_id
        for b in phantom.by_id
        if a < b
    ]
    assert any(max(pair) > 3 * min(pair) for pair in rates)


def test_a_thousand_nodes_measure_their_own_site_and_a_few_others():
    phantom = forty_sites(Random(8))
    assert len(phantom.nodes) == 1000
    per_node = len(phantom.topology.links) / 1000
    assert per_node < 40
    card = dense_model(layers=80).card
    chosen = plan(phantom.topology, card, Workload(context_tokens=2048, concurrency=1), Constraints()).plans[0]
    assert len({phantom.by_id[node_id].site for node_id in chosen.placement.node_ids}) == 1
