"""What an instance is, derived from cards: alike on every node, and never from what a dead node said."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.ids import ModelId, NodeId, instance_id_for
from meshinfer.serving.acquaintance import STRANGER_SECONDS, Acquaintance
from meshinfer.serving.view import AHEAD, instances
from meshinfer.testing.cards import node_card
from meshinfer.topology.card import SeatReport
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement, Seat

MODEL = ModelId("m")
INSTANCE = instance_id_for(MODEL)
IDS = [NodeId(name) for name in ("ada", "bea", "cam")]
PLACED = Placement(
    MODEL, "d" * 64, 6, "pipeline", "libp2p", 4096, 1,
    (Seat(IDS[0], 0, 2), Seat(IDS[1], 2, 4), Seat(IDS[2], 4, 6)),
)  # fmt: skip
OTHER = replace(PLACED, seats=(Seat(IDS[1], 0, 3), Seat(IDS[0], 3, 6)))


def holding(name, *reports, placements=(PLACED,)):
    return node_card(name, seats=reports, placements=placements)


def report(index, state="ready", epoch=1, placement=PLACED, **more):
    return SeatReport(INSTANCE, epoch, placement.placement_id, index, state, **more)


def seen(*cards):
    return instances(Topology.of(cards, []))


def states(*per_seat):
    """The instance when the three seats are in these states; None: not announced."""
    cards = [
        holding(name, *([report(index, state)] if state else []))
        for index, (name, state) in enumerate(zip(IDS, per_seat, strict=True))
    ]
    return seen(*cards)[0]


@pytest.mark.parametrize(
    ("per_seat", "state"),
    [
        (("ready", "ready", "ready"), "ready"),
        (("ready", "linking", "ready"), "loading"),
        (("loading", "leased", "loading"), "loading"),
        (("leased", "leased", None), "placing"),
        (("leased", None, None), "placing"),
        (("ready", "ready", None), "placing"),  # its node lives: gossip of one overtakes another's
        (("loading", None, "loading"), "placing"),
        (("ready", "failed", "ready"), "broken"),
        (("leased", "failed", None), "broken"),
    ],
)
def test_seats_make_the_instance(per_seat, state):
    instance = states(*per_seat)
    assert instance.state == state
    assert instance.missing == tuple(node for node, seat in zip(IDS, per_seat, strict=True) if seat is None)


def test_a_dead_node_takes_its_seat_with_it():
    ada, bea, cam = (holding(name, report(index)) for index, name in enumerate(IDS))
    assert seen(ada, bea, cam)[0].state == "ready"
    assert seen(ada, cam)[0].state == "broken"
    assert seen(ada, cam)[0].missing == (IDS[1],)
    assert seen() == ()


def test_only_the_newest_epoch_counts():
    ada = holding("ada", report(0, epoch=1), report(1, "loading", epoch=2, placement=OTHER), placements=(PLACED, OTHER))
    bea = holding("bea", report(0, "loading", epoch=2, placement=OTHER), placements=(OTHER,))
    cam = holding("cam", report(2, epoch=1))
    (instance,) = seen(ada, bea, cam)
    assert (instance.epoch, instance.placement, instance.state) == (2, OTHER, "loading")


def test_what_is_loaded_ahead_is_no_instance_yet_and_changes_none():
    ahead = holding("bea", report(0, epoch=AHEAD, placement=OTHER), placements=(OTHER,))
    assert seen(ahead) == ()
    assert seen(ahead, holding("ada", report(0))) == seen(holding("bea"), holding("ada", report(0)))


@pytest.mark.parametrize("epoch_of_who_won", [1, 2])
def test_who_lost_and_still_serves_is_named_with_who_won(epoch_of_who_won):
    """Two sides of a partition that meet; the loser is whole, and somebody's answer is on its way through it."""
    one = replace(PLACED, seats=(Seat(IDS[0], 0, 3), Seat(IDS[1], 3, 6)))
    two = replace(PLACED, seats=(Seat(NodeId("dan"), 0, 2), Seat(NodeId("eve"), 2, 6)))
    won, lost = sorted((one, two), key=lambda placement: placement.placement_id)

    def named(state="ready", sessions=1):
        (won_first, won_last), (lost_first, lost_last) = won.node_ids, lost.node_ids
        return seen(
            holding(won_first, report(0, "loading", epoch_of_who_won, won), placements=(won,)),
            holding(won_last, report(1, "loading", epoch_of_who_won, won), placements=(won,)),
            holding(lost_first, report(0, placement=lost, sessions=sessions), placements=(lost,)),
            holding(lost_last, report(1, state, placement=lost), placements=(lost,)),
        )[0]

    assert (named().placement, named().outlived) == (won, {(1, lost.placement_id)})
    assert named(sessions=0).outlived == frozenset()
    assert named(state="cut").outlived == frozenset()


def test_of_two_placements_in_one_epoch_the_lower_id_wins_everywhere():
    winner = min(PLACED, OTHER, key=lambda placement: placement.placement_id)
    ada = holding("ada", report(0))
    bea = holding("bea", report(0, placement=OTHER), placements=(OTHER,))
    assert seen(ada, bea)[0].placement == winner


def test_a_seat_on_another_node_s_card_counts_for_nothing():
    """Nobody can hold a seat for someone else, or a seat that its placement gives to another."""
    cards = [holding("ada", report(0), report(1), report(2)), holding("bea"), holding("cam")]
    assert len(seen(*cards)[0].missing) == 2


def test_a_card_hides_no_instance_of_others():
    """A newer epoch, or a placement with a lower id, counts only from a node that it gives a seat to, and whole."""
    cards = [holding(name, report(index)) for index, name in enumerate(IDS)]
    stranger = holding("zoe", report(0, epoch=9), report(7, epoch=9))
    full = replace(PLACED, seats=(Seat(NodeId("zoe"), 0, 2),))
    liar = holding("zoe", report(0, epoch=9, placement=full), placements=(full,))
    for other in (stranger, liar):
        (instance,) = seen(*cards, other)
        assert (instance.epoch, instance.state, instance.placement) == (1, "ready", PLACED)


def test_a_failed_seat_says_why():
    cards = [holding("ada", report(0)), holding("bea", report(1, "failed", error="out of memory")), holding("cam")]
    assert seen(*cards)[0].error == "out of memory"


def test_a_seat_without_its_placement_is_not_believed():
    assert seen(holding("ada", report(0), placements=())) == ()


reports = st.builds(
    SeatReport,
    instance_id=st.sampled_from([instance_id_for(MODEL, replica) for replica in range(2)]),
    epoch=st.integers(0, 2),
    placement_id=st.sampled_from([PLACED.placement_id, OTHER.placement_id]),
    seat_index=st.integers(0, 3),
    state=st.sampled_from(["leased", "loading", "linking", "ready", "failed"]),
    progress=st.floats(0, 1),
)


# A card names each of its seats once.
held = st.lists(reports, max_size=4, unique_by=lambda r: (r.instance_id, r.epoch, r.placement_id, r.seat_index))


@given(st.lists(held, min_size=3, max_size=3), st.data())
def test_derivation_does_not_depend_on_order(per_node, data):
    def cards(shuffled):
        for name, own in zip(IDS, per_node, strict=True):
            order = data.draw(st.permutations(own)) if shuffled else own
            yield holding(name, *order, placements=(PLACED, OTHER))

    straight = seen(*cards(shuffled=False))
    assert seen(*data.draw(st.permutations(list(cards(shuffled=True))))) == straight
    assert [instance.instance_id for instance in straight] == sorted(i.instance_id for i in straight)
    for instance in straight:
        assert 0 <= instance.progress <= 1
        assert len(instance.reports) == len(instance.placement.seats)
        assert (instance.state == "ready") == all(r is not None and r.state == "ready" for r in instance.reports)


def test_who_was_never_met_is_not_mourned():
    """A newcomer that hears of one seat before it hears of the other nodes must not have the instance repaired."""
    acquaintance = Acquaintance()
    first = Topology.of([holding("ada", report(0))], [])

    def state(topology, now):
        return instances(topology, acquaintance.strangers(topology, now))[0].state

    assert seen(*first.nodes)[0].state == "broken", "what it would be to a node that had met the others"
    assert state(first, 10.0) == "placing"
    both = Topology.of([holding("ada", report(0)), holding("bea", report(1))], [])
    assert state(both, 10.5) == "placing"
    assert acquaintance.next_wakeup(10.5) == 10.0 + STRANGER_SECONDS, "since cam was first heard of"
    everyone = Topology.of([*both.nodes, holding("cam", report(2))], [])
    assert state(everyone, 11.0) == "ready"
    assert state(both, 11.1) == "broken", "it was met, and is lost at once"
    assert acquaintance.next_wakeup(11.1) == math.inf


def test_a_stranger_that_never_shows_is_lost():
    acquaintance = Acquaintance()
    alone = Topology.of([holding("ada", report(0))], [])
    assert set(acquaintance.strangers(alone, 5.0)) == {"bea", "cam"}
    assert set(acquaintance.strangers(alone, 5.0 + STRANGER_SECONDS)) == set()
    assert set(acquaintance.strangers(alone, 500.0)) == set()
    assert set(acquaintance.strangers(Topology.of([holding("dan", placements=())], []), 501.0)) == set(), (
        "nobody names anybody"
    )
    assert set(acquaintance.strangers(alone, 502.0)) == {"bea", "cam"}
