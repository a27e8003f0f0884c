"""The next epoch of an instance: the same again where nothing is lost, unless two nodes cannot talk any more."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from meshinfer.base.ids import NodeId
from meshinfer.base.units import MIB
from meshinfer.planning.repair import crosses, repairs
from meshinfer.testing.cards import MODEL_DIGEST, MODEL_ID, model_card, node_card
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.topology.placement import Placement, Seat

CARD = model_card((8 * MIB,) * 12)


def mesh(*names: str, cut: frozenset[str] = frozenset()) -> Topology:
    """All linked, but for the pair `cut`."""
    links = [
        Link(NodeId(one), NodeId(other), 0.001)
        for one, other in permutations(names, 2)
        if frozenset((one, other)) != cut
    ]
    return Topology.of([node_card(name, 200 * MIB) for name in names], links)


def in_turn(*names: str) -> Placement:
    """As many layers to each."""
    share = 12 // len(names)
    seats = tuple(Seat(NodeId(name), share * index, share * (index + 1)) for index, name in enumerate(names))
    return Placement(MODEL_ID, MODEL_DIGEST, 12, "pipeline", "libp2p", 256, 1, seats)


@pytest.mark.parametrize("names", ["abc", "aba", "aab"])
def test_where_nothing_is_lost_the_next_epoch_is_the_same(names: str) -> None:
    old = in_turn(*names)
    assert [plan.placement for plan in repairs(old, [], mesh(*sorted({*names})), CARD)] == [old]


@pytest.mark.parametrize("cut", ["ab", "bc", "ac"])
def test_of_two_that_have_a_channel_and_do_not_see_each_other_one_goes(cut: str) -> None:
    """`ac`: the way back, from the last stage to the head."""
    old = in_turn(*"abc")
    found = repairs(old, [], mesh(*"abcd", cut=frozenset(cut)), CARD)
    for plan in found:
        one, other = map(NodeId, cut)
        assert not crosses(plan.placement, [(one, other), (other, one)])
        moved = [now.node_id for was, now in zip(old.seats, plan.placement.seats, strict=True) if was != now]
        assert len(moved) == 1, "all others stay warm"
    assert {seat.node_id for seat in found[0].placement.seats} > {"d"}


def blocked(topology: Topology, **ways: str) -> Topology:
    """Each named node dialled the runners of those in vain."""
    cards = [replace(card, blocked=tuple(map(NodeId, ways.get(card.node_id, "")))) for card in topology.nodes]
    return Topology.of(cards, topology.links)


@pytest.mark.parametrize("ways", [{"a": "b", "c": "a"}, {"a": "bc"}, {"a": "b", "d": "a"}])
def test_whom_several_dial_in_vain_is_replaced(ways: dict[str, str]) -> None:
    """`d` has no seat: what it says of `a` counts too."""
    found = repairs(in_turn(*"abc"), [], blocked(mesh(*"abcdef"), **ways), CARD)
    assert found[0].placement.node_ids[1:] == tuple("bc")
    assert found[0].placement.node_ids[0] in {"d", "e", "f"}


def test_a_way_that_is_blocked_is_gone_round_where_it_is_dialled() -> None:
    """The other way round a channel opens, and nobody is replaced for it."""
    old = in_turn(*"abc")
    for plan in repairs(old, [], blocked(mesh(*"abcd"), a="b"), CARD):
        assert not crosses(plan.placement, [(NodeId("a"), NodeId("b"))])
    assert repairs(old, [], blocked(mesh(*"abcd"), b="a"), CARD)[0].placement == old


def test_who_is_in_nobodys_mesh_is_in_nobodys_way() -> None:
    """A member may write on its card what it likes."""
    assert not blocked(mesh(*"abc"), a="xyz").blocked


def test_of_those_that_are_apart_who_is_lost_anyway_goes() -> None:
    found = repairs(in_turn(*"abc"), [1], mesh(*"abcd", cut=frozenset("ab")), CARD)
    assert found[0].placement.node_ids == tuple("adc")
    for plan in found:
        assert [seat.node_id for seat in plan.placement.seats][::2] == ["a", "c"]


def test_whom_no_channel_joins_need_not_see_each_other() -> None:
    old = in_turn(*"abac")
    assert [plan.placement for plan in repairs(old, [], mesh(*"abc", cut=frozenset("bc")), CARD)] == [old]


def test_a_hole_is_filled_and_the_warm_stay_where_they_are() -> None:
    first, *_ = repairs(in_turn(*"abc"), [1], mesh(*"acd"), CARD)
    assert first.placement.node_ids == tuple("adc")


@pytest.mark.parametrize("names", ["abc", "aba"])
def test_a_seat_whose_node_lives_is_made_again_there_though_the_way_by_another_is_shorter(names: str) -> None:
    """Its runner crashed: what it read lies in that node's memory."""
    old = in_turn(*names)
    nodes = [node_card(name, 200 * MIB) for name in "abcd"]
    links = [
        Link(NodeId(one), NodeId(other), 0.001 if "d" in (one, other) else 0.01)
        for one, other in permutations("abcd", 2)
    ]
    first, second, *_ = repairs(old, [2], Topology.of(nodes, links), CARD)
    assert first.placement == old
    assert second.placement.seats[2].node_id == "d"
    without_files = [replace(card, models=()) if card.node_id == old.seats[2].node_id else card for card in nodes]
    first, *_ = repairs(old, [2], Topology.of(without_files, links), CARD)
    assert first.placement.seats[2].node_id == "d", "it would have to fetch them"
