"""Addresses: the book on disk, the plan when to dial which, and whom to want at all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import NoRoom
from meshinfer.base.ids import NodeId
from meshinfer.mesh.address_book import MAX_NODES, AddressBook
from meshinfer.mesh.addresses import nearness, worth_dialling
from meshinfer.mesh.dial_plan import COURTESY_SECONDS, MAX_WAIT_SECONDS, OLD_WAIT_SECONDS, Dial, DialPlan
from meshinfer.mesh.far_links import MAX_WANTED
from meshinfer.mesh.gossip import MAX_ANNOUNCED_LINKS
from meshinfer.mesh.neighbours import FULL_MESH_NODES, NEIGHBOURS, Wanted, most_wanted, wanted
from meshinfer.mesh.own_card import OwnCard
from meshinfer.mesh.prober import LinkEstimate
from meshinfer.testing.cards import node_card
from meshinfer.topology.card import HeldModel

A, B = NodeId("a"), NodeId("b")

# --- the book -----------------------------------------------------------------------------------


def test_the_book_outlives_its_process_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    book = AddressBook(path)
    book.remember(A, ["192.0.2.1:1"])
    book.remember(B, ["192.0.2.2:2", "not an address", "0.0.0.0:3", "host.example:4"])
    book.remember(A, ["192.0.2.9:9"])
    assert not book.is_saved
    book.save()
    assert book.is_saved
    assert list(AddressBook(path).entries().items()) == [(A, ("192.0.2.9:9",)), (B, ("192.0.2.2:2",))]
    assert path.stat().st_mode & 0o077 == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["book.json"], "no half-made file is left"


def test_the_book_is_bounded(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "book.json")
    for index in range(MAX_NODES + 10):
        book.remember(NodeId(f"n{index}"), ["192.0.2.1:1"])
    assert len(book.entries()) == MAX_NODES
    assert next(iter(book.entries())) == f"n{MAX_NODES + 9}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"nodes": 7}',
        b'{"nodes": [7, {"node_id": "../x", "addresses": ["192.0.2.1:1"]}, {"node_id": "a", "addresses": [1]}]}',
        b"[" * 100_000,
        b" " * 2_000_000,
    ],
)
def test_a_garbled_book_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "book.json"
    path.write_bytes(content)
    assert AddressBook(path).entries() == {}


def test_a_disk_that_refuses_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    book = AddressBook(tmp_path / "file" / "book.json")
    book.remember(A, ["192.0.2.1:1"])
    book.save()


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_is_read_without_harm(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({"nodes": content}))
    AddressBook(path)


# --- addresses ----------------------------------------------------------------------------------


def test_only_what_can_be_dialled_is_taken_from_strangers() -> None:
    words = (
        "192.0.2.1:4001",
        "0.0.0.0:1",
        "239.1.2.3:4",
        "[::1]:5",
        "[::]:5",
        "1.2.3.4",
        "1.2.3.4:99999",
        "evil.example:1",
    )
    assert worth_dialling(words, 16) == ("192.0.2.1:4001", "[::1]:5")
    assert len(worth_dialling((f"192.0.2.1:{port}" for port in range(1, 100)), 16)) == 16


def test_near_addresses_come_first() -> None:
    own = ("10.0.5.7:1", "192.168.1.20:1")
    theirs = ["203.0.113.5:1", "127.0.0.1:1", "192.168.1.30:1", "10.0.9.1:1"]
    by_nearness = sorted(theirs, key=lambda address: nearness(address, own))
    assert by_nearness == ["192.168.1.30:1", "10.0.9.1:1", "203.0.113.5:1", "127.0.0.1:1"]
    assert min(theirs, key=lambda address: nearness(address, ("127.0.0.1:9",))) == "127.0.0.1:1"


# --- the plan -----------------------------------------------------------------------------------


def plan_of(own: NodeId = A, *seeds: str) -> DialPlan:
    return DialPlan(own, lambda: ("192.0.2.100:1",), random.Random(1), seeds)


def wants(*nodes: NodeId) -> Wanted:
    return Wanted(nodes, (), 0)


def test_all_known_addresses_are_one_dial_nearest_first() -> None:
    plan = plan_of()
    plan.learn(B, ["198.51.100.1:1", "192.0.2.7:1"], 0)
    dial = Dial(B, ("192.0.2.7:1", "198.51.100.1:1"))
    assert plan.due(wants(B), frozenset(), 0) == [dial]
    assert plan.due(wants(B), frozenset(), 0) == [], "it is under way"
    plan.ended(dial)
    assert plan.due(wants(B), {B}, 0) == [], "it is connected"


def test_the_higher_id_lets_the_lower_dial_first() -> None:
    plan = plan_of(B)
    plan.learn(A, ["192.0.2.7:1"], 5.0)
    assert plan.due(wants(A), frozenset(), 5.0) == []
    assert plan.next_wakeup(wants(A), frozenset(), 5.0) == 5.0 + COURTESY_SECONDS
    assert plan.due(wants(A), frozenset(), 5.0 + COURTESY_SECONDS) == [Dial(A, ("192.0.2.7:1",))]


def test_failing_addresses_wait_longer_and_longer_within_bounds() -> None:
    plan = plan_of()
    plan.learn(B, ["192.0.2.7:1"], 0)
    now, waits = 0.0, []
    for _ in range(400):
        (dial,) = plan.due(wants(B), frozenset(), now)
        plan.failed(dial.addresses[0], now)
        plan.ended(dial)
        wakeup = plan.next_wakeup(wants(B), frozenset(), now)
        waits.append(wakeup - now)
        now = wakeup
    assert waits[0] < 0.4
    assert max(wait for wait in waits[:150]) <= MAX_WAIT_SECONDS * 1.25
    assert OLD_WAIT_SECONDS * 0.75 <= waits[-1] <= OLD_WAIT_SECONDS * 1.25
    plan.learn(B, ["192.0.2.7:1"], now, fresh=True)
    assert plan.due(wants(B), frozenset(), now) != [], "it was heard just now"


def test_a_lost_connection_is_dialled_whatever_failed_before() -> None:
    plan = plan_of()
    assert plan.redial(B) is None
    plan.learn(B, ["192.0.2.7:1"], 0)
    plan.failed("192.0.2.7:1", 0)
    assert plan.redial(B) == Dial(B, ("192.0.2.7:1",))
    assert plan.redial(B) is None, "it is under way"


def test_a_seed_is_dialled_until_whoever_is_there_is_connected() -> None:
    plan = plan_of(A, "seed.example:1")
    (dial,) = plan.due(wants(), frozenset(), 0)
    assert dial == Dial(None, ("seed.example:1",))
    plan.worked("seed.example:1", B)
    plan.ended(dial)
    assert plan.due(wants(), {B}, 0) == []
    assert plan.due(wants(), frozenset(), 0) == [dial], "B is gone: who is there now?"


def test_hints_do_not_push_out_the_address_that_worked() -> None:
    plan = plan_of()
    plan.worked("192.0.2.7:1", B)
    for port in range(1, 200):
        plan.learn(B, [f"203.0.113.1:{port}"], 0)
    dial = plan.redial(B)
    assert dial is not None
    assert dial.addresses[0] == "192.0.2.7:1"
    assert len(dial.addresses) <= 16


# --- whom to want -------------------------------------------------------------------------------


@given(st.integers(2, 120), st.integers(0, 2**32))
def test_everyone_in_a_small_mesh_and_a_few_in_a_large_one(count: int, seed: int) -> None:
    rng = random.Random(seed)
    nodes = [NodeId(f"{rng.getrandbits(64):x}") for _ in range(count)]
    chosen = {node: set(wanted(node, nodes, (), ()).neighbours) for node in nodes}
    if count <= FULL_MESH_NODES:
        assert all(chosen[node] == set(nodes) - {node} for node in nodes)
        return
    assert all(len(chosen[node]) == NEIGHBOURS for node in nodes)
    edges = {node: chosen[node] | {other for other in nodes if node in chosen[other]} for node in nodes}
    dead = set(rng.sample(nodes, 3))
    left = [node for node in nodes if node not in dead]
    reached, waiting = set(), [left[0]]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += edges[node] - dead
    assert reached == set(left), "three deaths do not split it"


def test_a_joiner_moves_only_what_it_is_part_of() -> None:
    nodes = [NodeId(f"n{index}") for index in range(40)]
    before = {node: set(wanted(node, nodes, (), ()).neighbours) for node in nodes}
    after = {node: set(wanted(node, [*nodes, NodeId("late")], (), ()).neighbours) for node in nodes}
    for node in nodes:
        assert after[node] - before[node] <= {"late"}


def test_nodes_that_cannot_be_reached_take_nobodys_place() -> None:
    nodes = [NodeId(f"n{index}") for index in range(40)]
    first = wanted(A, nodes, (), ()).neighbours
    with_failing = wanted(A, nodes, (), set(first[:3])).neighbours
    assert set(first) <= set(with_failing)
    assert len(set(with_failing) - set(first[:3])) == NEIGHBOURS


def test_strangers_are_tried_a_few_at_a_time() -> None:
    strangers = [NodeId(f"s{index}") for index in range(30)]
    alone = wanted(A, [A], strangers, {strangers[0]})
    assert alone.strangers[-1] == strangers[0], "those that failed come last"
    plan = plan_of()
    for node in strangers:
        plan.learn(node, ["192.0.2.7:1"], 0)
    assert len(plan.due(alone, frozenset(), 1)) == alone.strangers_at_once


# --- the own card and the links that it goes out with ---------------------------------------------


def test_each_start_has_a_higher_incarnation_and_each_change_a_higher_version(tmp_path: Path) -> None:
    first = OwnCard(node_card("a"), tmp_path)
    second = OwnCard(node_card("a"), tmp_path)
    assert (first.card.incarnation, second.card.incarnation) == (1, 2)
    assert second.card.order > first.card.order
    before = second.card
    assert second.update(api_url="http://a").order > before.order
    assert second.changes.count == 1
    second.update(api_url="http://a")
    assert second.changes.count == 1, "nothing changed"
    assert second.update(load=2.0).version == before.version + 2
    assert second.changes.count == 1, "what drifts travels with the next announcement"
    second.outbid(7)
    assert second.card.incarnation == 8
    assert OwnCard(node_card("a"), tmp_path).card.incarnation == 9


def test_a_garbled_incarnation_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "incarnation").write_text("many")
    assert OwnCard(node_card("a"), tmp_path).card.incarnation == 1


def test_a_card_too_large_to_announce_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    own_card = OwnCard(node_card("a"), tmp_path)
    before = own_card.card
    models = tuple(HeldModel(node_card("a").models[0].model_id, "d" * 128, index) for index in range(400))
    with pytest.raises(NoRoom, match="bytes"):
        own_card.update(models=models)
    assert own_card.card == before


def test_a_link_is_smoothed_and_steady() -> None:
    estimate = LinkEstimate()
    assert estimate.link(A, B, 0) is None
    estimate.answered(0.090, 0.5)
    slow = estimate.link(A, B, 0.5)
    assert slow is not None
    assert slow.rtt_seconds == 0.090
    estimate.answered(0.010, 1.0)  # the first paid for opening the stream, and is forgotten
    first = estimate.link(A, B, 1.5)
    assert first is not None
    assert (first.rtt_seconds, first.jitter_seconds, first.age_seconds) == (0.010, 0.005, 0.5)
    for step in range(20):
        estimate.answered(0.0101 + 0.0001 * (step % 2), 2.0)
    later = estimate.link(A, B, 2.0)
    assert later is not None
    assert later.rtt_seconds == first.rtt_seconds, "a fifth is not reached"
    for _ in range(40):
        estimate.answered(0.050, 3.0)
    moved = estimate.link(A, B, 3.0)
    assert moved is not None
    assert 0.04 < moved.rtt_seconds < 0.05
    for _ in range(10):
        estimate.lost()
    lossy = estimate.link(A, B, 3.0)
    assert lossy is not None
    assert lossy.loss == 0.25


def test_a_bounded_announcement_leaves_nobody_without_a_link_that_others_tell() -> None:
    nodes = [NodeId(f"n{index:03}") for index in range(300)]
    others = {node: [other for other in nodes if other != node] for node in nodes}
    asked_for = {node: set(random.Random(node).sample(others[node], MAX_WANTED)) for node in nodes}
    told = {node: most_wanted(node, others[node], MAX_ANNOUNCED_LINKS, asked_for[node]) for node in nodes}
    for node in nodes:
        wishes = wanted(node, nodes, (), ()).neighbours
        assert set(wishes) <= told[node]
        assert asked_for[node] <= told[node], "planners count on them"
        assert all(node in told[other] for other in wishes), "each of them tells of it"
