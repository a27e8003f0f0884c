"""A placement is a value: what a preview shows can be posted, and a changed one cannot pass for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.api.errors import BadParameter
from meshinfer.api.placements import placement_from_json, placement_to_json
from meshinfer.base.ids import ModelId, NodeId
from meshinfer.topology.placement import Placement, Seat


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    cuts = sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=4)))
    seats = tuple(
        Seat(NodeId(f"n{index}"), start, end) for index, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False))
    )
    tokens, sessions = draw(st.integers(1, 10**6)), draw(st.integers(1, 64))
    return Placement(ModelId("a/b"), "d" * 32, cuts[-1], "pipeline", "libp2p", tokens, sessions, seats)


@given(placement=placements())
def test_there_and_back(placement: Placement):
    assert placement_from_json(json.loads(json.dumps(placement_to_json(placement)))) == placement


GOOD = placement_to_json(
    Placement(ModelId("a/b"), "d", 4, "pipeline", "libp2p", 8, 1, (Seat(NodeId("x"), 0, 2), Seat(NodeId("y"), 2, 4)))
)


@pytest.mark.parametrize(
    "change",
    [
        {"context_tokens": 9},
        {"colour": "red"},
        {"strategy": "magic"},
        {"context_tokens": "8"},
        {"context_tokens": 0},
        {"model_id": "../x"},
        {"seats": []},
        {"seats": "none"},
        {"seats": [{"node_id": "x", "start": 0, "end": 4, "colour": "red"}]},
        {"seats": [{"node_id": "x", "start": 0}]},
        {"seats": [5]},
        {"placement_id": None, "seats": [{"node_id": "x", "start": 0, "end": 3}]},
        {"placement_id": None, "seats": [{"node_id": "x", "start": 1, "end": 4}]},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]):
    with pytest.raises(BadParameter):
        placement_from_json({**GOOD, **change})


def test_one_of_your_own_needs_no_id():
    own = {key: value for key, value in GOOD.items() if key != "placement_id"}
    assert placement_from_json(own) == placement_from_json(GOOD)
