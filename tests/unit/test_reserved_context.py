"""How long prompt and answer may be, while a model is served, repaired, or not placed."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from meshinfer.api.generation import reserved_context
from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.base.units import MIB
from meshinfer.config import Settings
from meshinfer.serving.view import Instance
from meshinfer.testing.cards import model_card
from meshinfer.topology.placement import Placement, Seat

CARD = replace(model_card(layer_bytes=(MIB,) * 2), model_id=ModelId("a"))
USUAL = Settings(context_tokens=512)


def instance(state: Literal["broken", "ready"], context_tokens: int) -> Instance:
    seats = (Seat(NodeId("n"), 0, 2),)
    placement = Placement(CARD.model_id, CARD.digest, 2, "pipeline", "libp2p", context_tokens, 1, seats)
    return Instance(InstanceId("1" * 16), 1, placement, state, 1.0, (None,))


@pytest.mark.parametrize(
    ("instances", "prompt_tokens", "expected"),
    [
        ((), 10, 512),
        ((instance("ready", 4096),), 10, 4096),
        ((instance("broken", 4096),), 10, 512),
        ((instance("broken", 4096),), 600, 4096),
        ((instance("broken", 4096), instance("ready", 1024)), 600, 1024),
        ((instance("broken", 4096), instance("ready", 1024)), 2000, 4096),
    ],
    ids=["not placed", "ready", "repaired, short", "repaired, long", "beside another, short", "beside another, long"],
)
def test_a_long_prompt_waits_for_a_repair_and_a_short_one_takes_what_fits(
    instances: tuple[Instance, ...], prompt_tokens: int, expected: int
) -> None:
    assert reserved_context(instances, CARD, USUAL, prompt_tokens) == expected
