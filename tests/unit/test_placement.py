"""A placement: content-addressed, and whole."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import BadInput
from meshinfer.base.ids import ModelId, NodeId
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.codec import decode, encode


@st.composite
def placements(draw, most_layers=12):
    """Valid ones: stages of one to three ranks over a random partition."""
    count = draw(st.integers(1, most_layers))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=5))) if count > 1 else []
    ids = iter(range(1000))
    seats = tuple(
        Seat(NodeId(f"node{next(ids)}"), start, end, rank, ranks)
        for start, end in zip([0, *cuts], [*cuts, count], strict=True)
        for ranks in [draw(st.integers(1, 3))]
        for rank in range(ranks)
    )
    strategy = "hybrid" if any(seat.ranks > 1 for seat in seats) else "pipeline"
    return Placement(ModelId("m"), "d" * 64, count, strategy, "libp2p", 4096, 2, seats)


@given(placements())
def test_a_whole_placement_holds_every_layer_once(placement):
    placement.validate()
    held = [layer for seat in placement.seats if seat.rank == 0 for layer in range(seat.start, seat.end)]
    assert held == list(range(placement.layer_count))
    assert sum(seat.layers for seat in placement.seats if seat.rank == 0) == placement.layer_count


@given(placements(), st.data())
def test_any_seat_missing_moved_or_doubled_is_found(placement, data):
    index = data.draw(st.integers(0, len(placement.seats) - 1))
    seat, seats = placement.seats[index], list(placement.seats)
    change = data.draw(st.sampled_from(["drop", "double", "start", "end", "empty", "rank"]))
    if change == "drop":
        del seats[index]
    elif change == "double":
        seats.insert(index, seat)
    elif change == "start":
        seats[index] = replace(seat, start=seat.start + 1)
    elif change == "end":
        seats[index] = replace(seat, end=seat.end + 1)
    elif change == "empty":
        seats[index] = replace(seat, end=seat.start)
    else:
        seats[index] = replace(seat, ranks=seat.ranks + 1)
    with pytest.raises(BadInput):
        replace(placement, seats=tuple(seats)).validate()


@given(placements(), placements())
def test_equal_placements_have_equal_ids_and_others_have_others(a, b):
    again = decode(Placement, encode(a))
    assert again == a
    assert again.placement_id == a.placement_id
    assert len(a.placement_id) == 32
    assert (a.placement_id == b.placement_id) == (a == b)
    assert replace(a, concurrency=a.concurrency + 1).placement_id != a.placement_id
    assert replace(a, context_tokens=a.context_tokens + 1).placement_id != a.placement_id
    assert replace(a, model_digest="e").placement_id != a.placement_id


def test_a_node_with_two_seats_is_named_once():
    seats = (Seat(NodeId("b"), 0, 1), Seat(NodeId("a"), 1, 2), Seat(NodeId("b"), 2, 3))
    assert Placement(ModelId("m"), "d", 3, "pipeline", "libp2p", 1, 1, seats).node_ids == ("b", "a")


def test_the_first_gap_is_named():
    seats = (Seat(NodeId("a"), 0, 2), Seat(NodeId("b"), 3, 4))
    with pytest.raises(BadInput, match=r"seat 1 holds layers \[3, 4\).*starts at layer 2"):
        Placement(ModelId("m"), "d", 4, "pipeline", "libp2p", 1, 1, seats).validate()
