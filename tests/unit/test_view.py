"""The view: merging is a join, lifetimes run on our own clock, nobody writes for another."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import ProtocolError
from meshinfer.base.ids import InstanceId, NodeId, PlacementId
from meshinfer.mesh.announcement import Heard, check, sign
from meshinfer.mesh.gossip import MAX_ANNOUNCED_LINKS, MAX_ANNOUNCED_SUSPECTS
from meshinfer.mesh.neighbours import FULL_MESH_NODES
from meshinfer.mesh.own_card import MAX_CARD_BYTES
from meshinfer.mesh.view import Bounds, View, slice_of
from meshinfer.testing.cards import node_card
from meshinfer.topology.card import SeatReport
from meshinfer.topology.link import Link
from meshinfer.transport.base import MAX_GOSSIP_BYTES
from meshinfer.wire.codec import encode
from meshinfer.wire.messages import Announcement, SignedAnnouncement


def seal(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


def said(name: str, incarnation: int = 1, version: int = 1, to: tuple[str, ...] = (), **more: object) -> Heard:
    links = tuple(Link(NodeId(name), NodeId(target), 0.001) for target in to)
    return sign(node_card(name, incarnation=incarnation, version=version, **more), links, seal)


def view_of(*heard: Heard, now: float = 0.0, bounds: Bounds | None = None) -> View:
    view = View(said("me"), bounds)
    for one in heard:
        view.merge(one, now)
    return view


announcements = st.builds(
    lambda name, incarnation, version, label: said(name, incarnation, version, api_url=label),
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from(["x", "y"]),
)


@given(st.lists(announcements, max_size=12), st.randoms(use_true_random=False))
def test_merging_is_commutative_and_idempotent(heard: list[Heard], rng) -> None:
    shuffled = [*heard, *heard]
    rng.shuffle(shuffled)
    one, other = view_of(*heard), view_of(*shuffled)
    assert {node: one.get(node) for node in one.nodes()} == {node: other.get(node) for node in other.nodes()}
    assert one.statistics() == other.statistics()


@given(st.lists(announcements, max_size=12))
def test_the_latest_of_each_is_held(heard: list[Heard]) -> None:
    view = view_of(*heard)
    for one in heard:
        held = view.get(one.author)
        assert held is not None
        assert held.card.order >= one.card.order


@given(st.lists(announcements, max_size=12), st.lists(announcements, max_size=12))
def test_one_pull_makes_views_equal(ours: list[Heard], theirs: list[Heard]) -> None:
    one, other = view_of(*ours), view_of(*theirs)
    for heard in other.newer_than(one.known()):
        one.merge(heard, 1.0)
    for heard in other.newer_than(()):
        held = one.get(heard.author)
        assert held is not None
        assert held.card.order >= heard.card.order
    assert [heard.author for heard in other.newer_than(one.known()) if heard.author != "me"] == []


@given(st.lists(announcements, max_size=12), st.lists(announcements, max_size=12))
def test_what_differs_is_in_slices_whose_digests_differ(ours: list[Heard], theirs: list[Heard]) -> None:
    one, other = view_of(*ours), view_of(*theirs)
    differ = {i for i, (here, there) in enumerate(zip(one.digests(), other.digests(), strict=True)) if here != there}
    whole = [heard.author for heard in other.newer_than(one.known())]
    assert {slice_of(author) for author in whole} <= differ
    if differ:
        assert [heard.author for heard in other.newer_than(one.known(differ), differ)] == whole


def test_a_large_mesh_remembers_longer_since_each_repeats_itself_rarer() -> None:
    bounds = Bounds()
    small, large = view_of(), view_of()
    small.merge(said("a"), 0)
    for index in range(2 * FULL_MESH_NODES - 1):
        large.merge(said(f"n{index}"), 0)
    assert small.expire(1.9 * bounds.lifetime_seconds) == ("a",)
    assert large.expire(1.9 * bounds.lifetime_seconds) == ()
    assert len(large.expire(2 * bounds.lifetime_seconds)) == 2 * FULL_MESH_NODES - 1


def test_merge_says_what_it_was() -> None:
    view = view_of()
    assert view.merge(said("a"), 0) == "new"
    assert view.merge(said("a"), 0) == "stale"
    assert view.merge(said("a", version=2, load=3.0), 0) == "refreshed", "load is no reason to plan anew"
    assert view.merge(said("a", version=3, memory_promised_bytes=1), 0) == "changed"
    assert view.merge(said("a", version=4, memory_promised_bytes=1, to=("b",)), 0) == "changed"
    serving = SeatReport(InstanceId("1"), 1, PlacementId("p"), 0, "ready")
    assert view.merge(said("a", version=5, seats=(serving,)), 0) == "changed"
    assert view.merge(said("a", version=6, seats=(replace(serving, sessions=3, step_seconds=0.1),)), 0) == "refreshed"
    assert view.merge(said("a", version=7, seats=(replace(serving, state="failed"),)), 0) == "changed"
    assert view.merge(said("a", version=1), 0) == "stale"


def test_our_own_card_has_one_writer() -> None:
    view = view_of()
    assert view.merge(said("me", incarnation=9, api_url="impostor"), 0) == "outbid"
    assert view.own.card.api_url == ""
    assert view.merge(said("me", incarnation=0), 0) == "stale"


def test_what_expired_does_not_come_back_to_life() -> None:
    bounds = Bounds()
    view = view_of(said("a", version=5), now=0.0)
    assert view.live([NodeId("a")], {}, bounds.lifetime_seconds) == {"me"}, "dead by the clock before it is swept"
    assert view.expire(bounds.lifetime_seconds) == ("a",)
    assert view.merge(said("a", version=5), 20.0) == "stale", "a neighbour still has it"
    assert ("a", 1, 5) in view.known(), "and need not send it again"
    assert view.merge(said("a", version=6), 20.0) == "new"
    view.expire(1e6)
    view.expire(2e6)
    assert view.statistics().expired == 0


def test_life_follows_the_links() -> None:
    #  me → a → b → c   d (nobody reaches it)
    view = view_of(said("a", to=("b",)), said("b", to=("c", "a")), said("c"), said("d", to=("me",)))
    assert view.live([NodeId("a")], {}, 1.0) == {"me", "a", "b", "c"}
    assert view.live([], {}, 1.0) == {"me"}
    view.merge(said("a", version=2), 1.0)  # a reaches nobody now
    assert view.live([NodeId("a")], {}, 1.0) == {"me", "a"}


def test_a_neighbour_held_dead_returns_only_by_words_said_well_after_the_verdict() -> None:
    view = view_of(said("a", to=("b",)), said("b"), now=10.0)
    verdict = {NodeId("b"): 10.0}
    assert view.live([NodeId("a")], verdict, 10.5) == {"me", "a"}
    view.merge(said("a", version=2, to=("b",)), 11.0)
    assert view.live([NodeId("a")], verdict, 11.0) == {"me", "a"}, "a may not have noticed yet"
    view.merge(said("a", version=3, to=("b",)), 15.0)
    assert view.live([NodeId("a")], verdict, 15.0) == {"me", "a"}, "b was slow to answer a, which grants it more time"
    view.merge(said("a", version=4, to=("b",)), 17.5)
    assert view.live([NodeId("a")], verdict, 17.5) == {"me", "a", "b"}, "a does reach it, though we do not"


def test_who_leaves_is_no_part_of_the_topology() -> None:
    view = view_of(said("a", leaving=True), said("b"))
    assert view.live([NodeId("a"), NodeId("b")], {}, 0) == {"me", "b"}


def test_topology_shows_our_card_as_it_is_now_and_links_among_the_living() -> None:
    view = view_of(said("a", to=("me", "z")), said("b"))
    now = replace(view.own.card, memory_promised_bytes=7)
    topology = view.topology(view.live([NodeId("a")], {}, 0), now)
    assert [card.node_id for card in topology.nodes] == ["a", "me"]
    assert topology.by_id[NodeId("me")].memory_promised_bytes == 7
    assert [(link.source, link.target) for link in topology.links] == [("a", "me")]


def test_the_view_is_bounded_and_the_living_are_not_pushed_out() -> None:
    bounds = Bounds(max_nodes=10)
    view = view_of(*(said(f"n{index}") for index in range(9)), bounds=bounds)
    assert view.merge(said("stranger"), 1.0) == "full"
    assert view.merge(said("n3", version=2, api_url="news"), 1.0) == "changed"
    assert view.merge(said("stranger"), bounds.lifetime_seconds + 0.5) == "new", "the expired make room"
    assert len(view.nodes()) <= 10
    small = view_of(said("a"), bounds=Bounds(max_bytes=1000))
    assert small.merge(said("b", api_url="x" * 100), 0) == "full" or small.statistics().size_bytes <= 1000
    assert len(view.known()) <= 10


def verify(author: NodeId, payload: bytes, signature: bytes) -> bool:
    return signature == seal(payload)


def test_only_what_the_author_signed_of_itself_is_believed() -> None:
    good = said("a", to=("b",))
    assert check(good.signed, verify) == good
    payload = encode(Announcement(node_card("b")))
    speaks_for_another = SignedAnnouncement(NodeId("a"), payload, seal(payload))
    with pytest.raises(ProtocolError, match="its own"):
        check(speaks_for_another, verify)
    with pytest.raises(ProtocolError, match="did not sign"):
        check(replace(good.signed, payload=payload), verify)
    stolen_link = sign(node_card("a"), (Link(NodeId("b"), NodeId("a"), 0.001),), seal)
    with pytest.raises(ProtocolError, match="links"):
        check(stolen_link.signed, verify)
    with pytest.raises(ProtocolError, match="load"):
        check(said("a", load=float("inf")).signed, verify)
    with pytest.raises(ProtocolError, match="author"):
        check(replace(good.signed, author=NodeId("../a\n")), verify)


@given(st.binary(min_size=1, max_size=300))
def test_garbage_that_someone_signed_is_refused_politely(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        check(SignedAnnouncement(NodeId("a"), payload, seal(payload)), verify)


def test_the_fullest_announcement_fits() -> None:
    nodes = [NodeId(f"12D3KooW{index:044}") for index in range(MAX_ANNOUNCED_LINKS + 1)]
    own, *others = nodes
    third = 1 / 3  # with as many digits as any measurement
    links = tuple(
        Link(own, other, third, third, 1e8 * third, third, third, third, third, degraded=True) for other in others
    )
    suspects = tuple((other, 2**40) for other in others[:MAX_ANNOUNCED_SUSPECTS])
    card = node_card(own)
    beside_the_card = len(encode(sign(card, links, seal, suspects).signed)) - len(encode(card))
    assert MAX_CARD_BYTES + beside_the_card <= MAX_GOSSIP_BYTES
