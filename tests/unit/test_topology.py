"""The topology: one value for one state of the mesh, whatever order it was heard in."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import topologies

from meshinfer.base.ids import NodeId
from meshinfer.testing.cards import node_card
from meshinfer.topology.card import KindSpeed
from meshinfer.topology.coordinate import Coordinate
from meshinfer.topology.graph import Topology, quantise
from meshinfer.topology.link import Link
from meshinfer.topology.speed import NodeSpeed


@given(topologies(), st.randoms(use_true_random=False))
def test_input_order_and_strangers_change_nothing(topology, rng):
    cards, links = list(topology.nodes), list(topology.links)
    links += [Link(NodeId("stranger"), cards[0].node_id, 0.1), Link(cards[0].node_id, NodeId("stranger"), 0.1)]
    rng.shuffle(cards)
    rng.shuffle(links)
    again = Topology.of(cards, links)
    assert again == topology
    assert again.digest == topology.digest
    assert [card.node_id for card in again.nodes] == sorted(card.node_id for card in cards)


@given(st.permutations([(1, 5), (2, 1), (2, 3)]))
def test_of_several_cards_of_one_node_the_latest_counts(orders):
    cards = [node_card("ada", incarnation=i, version=v) for i, v in orders]
    assert [card.order for card in Topology.of(cards, []).nodes] == [(2, 3)]


@given(st.permutations([(9.0, 0.3), (1.0, 0.1), (4.0, 0.2)]))
def test_of_several_links_of_one_pair_the_freshest_counts(measured):
    ada, bea = node_card("ada"), node_card("bea")
    links = [Link(ada.node_id, bea.node_id, rtt, age_seconds=age) for age, rtt in measured]
    topology = Topology.of([ada, bea], [*links, Link(ada.node_id, ada.node_id, 0.0)])
    assert [link.rtt_seconds for link in topology.links] == [0.1]


@pytest.mark.parametrize(
    "change",
    [
        {"memory_usable_bytes": 1},
        {"memory_promised_bytes": 1},
        {"runner_overhead_bytes": 1},
        {"computes_float32": True},
        {"leaving": True},
        {"blocked": (NodeId("bea"),)},
        {"models": ()},
        {"incarnation": 2},
        {"speeds": (KindSpeed("q4g64", NodeSpeed(1e9, 1e12, 1e-3)),)},
        {"coordinate": Coordinate((0.02, *(0.0,) * 7), 0.001, 0.1)},
    ],
)
def test_all_that_a_plan_depends_on_is_in_the_digest(change):
    ada, bea = node_card("ada"), node_card("bea")
    assert Topology.of([replace(ada, **change), bea], []).digest != Topology.of([ada, bea], []).digest


@pytest.mark.parametrize("change", ["message_seconds", "bandwidth_bytes_per_second", "loss", "channel_rtt_seconds"])
def test_all_that_a_plan_depends_on_of_a_link_is_in_the_digest(change):
    cards = [node_card("ada"), node_card("bea")]
    link = Link(NodeId("ada"), NodeId("bea"), 0.001)
    assert Topology.of(cards, [link]).digest != Topology.of(cards, [replace(link, **{change: 0.5})]).digest


def test_load_counts_where_the_engine_shares_its_cores_with_others():
    def digest(**more):
        return Topology.of([node_card("ada", cpu_cores=2, **more)], []).digest

    assert digest(load=1.0, computes_float32=True) != digest(load=0.2, computes_float32=True)
    assert digest(load=0.5, computes_float32=True) == digest(load=0.2, computes_float32=True)
    assert digest(load=1.0) == digest(load=0.2)


@pytest.mark.parametrize(
    ("cores", "load", "slowdown"),
    [(2, 0.5, 1.0), (2, 1.0, 1.5), (2, 7.0, 1.5), (1, 0.5, 1.5), (8, 1.0, 1.0), (0, 1.0, 1)],
)
def test_one_thread_is_slowed_once_no_core_is_left_to_it(cores, load, slowdown):
    """Others that use all of n cores are at least n, and each has its part of them."""
    assert node_card("ada", cpu_cores=cores, load=load, computes_float32=True).slowdown == slowdown


@pytest.mark.parametrize("change", [{"name": "other"}, {"version": 9}, {"load": 3.0}])
def test_what_no_plan_depends_on_is_not(change):
    ada = node_card("ada")
    assert Topology.of([replace(ada, **change)], []).digest == Topology.of([ada], []).digest


def test_noise_in_the_third_digit_makes_no_other_topology():
    def digest(rtt_seconds, **more):
        cards = [node_card("ada"), node_card("bea")]
        return Topology.of(cards, [Link(NodeId("ada"), NodeId("bea"), rtt_seconds, **more)]).digest

    assert digest(0.00246) == digest(0.00238, age_seconds=5.0, jitter_seconds=0.1)
    assert digest(0.0024) != digest(0.0026)


@given(st.floats(0, 1e12))
def test_quantise_keeps_two_digits_and_the_order(value):
    assert quantise(value) == pytest.approx(value, rel=0.05, abs=1e-300)
    assert quantise(quantise(value)) == quantise(value)
    assert quantise(value) <= quantise(value * 1.2 + 1e-300)


@given(topologies())
def test_every_node_and_link_can_be_asked(topology):
    for source, target in permutations([card.node_id for card in topology.nodes], 2):
        link = topology.link_between.get((source, target))
        shown = topology.to_json()["nodes"][source]["links"].get(target)
        assert (link is None) == (shown is None)
        if link and shown:
            assert shown["latency_us"] == pytest.approx(link.rtt_seconds / 2 * 1e6, abs=0.1)
            rate = link.bandwidth_bytes_per_second
            # Not measured is not zero.
            assert shown["bandwidth_gbps"] == (pytest.approx(rate * 8 / 1e9) if rate else None)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_free_memory_is_never_negative(usable, promised):
    card = node_card("ada", usable, memory_promised_bytes=promised)
    assert card.memory_free_bytes == max(0, usable - promised)


def test_the_page_shows_each_node_s_speeds():
    speed = NodeSpeed(1.25e9, 4e10, 3e-4, layer_overhead_seconds=1e-4)
    node = node_card("a", speeds=(KindSpeed("q4g64", speed),))
    shown = Topology.of([node], []).to_json()["nodes"]["a"]["speeds"]
    assert shown["q4g64"]["stream_gb"] == 1.25
    assert shown["q4g64"]["cache_gb"] is None
    assert shown["q4g64"]["layer_overhead_us"] == 100
