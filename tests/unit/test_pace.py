"""How often a node repeats itself: seldom where nothing happens, soon where anything may still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshinfer.base.ids import NodeId
from meshinfer.mesh.membership import Timing
from meshinfer.mesh.pace import PERIOD_SECONDS, QUIET_PERIOD_SECONDS, SETTLE_SECONDS, Pace
from meshinfer.mesh.view import Bounds
from meshinfer.testing.cards import node_card

CARD = node_card(NodeId("n"))
LONG_AGO, NOW = 0.0, 1000.0


def quiet() -> Pace:
    """Of a node that said `CARD` just now; nothing has happened for long."""
    pace = Pace(CARD, LONG_AGO)
    pace.told(CARD, NOW)
    return pace


def test_in_a_quiet_mesh_a_node_repeats_itself_seldom():
    assert quiet().due(replace(CARD, version=CARD.version + 1), 1, NOW) == NOW + QUIET_PERIOD_SECONDS


def test_after_news_from_anywhere_it_does_so_often_and_then_seldom_again():
    pace = quiet()
    pace.stir(NOW + 1)
    assert pace.due(CARD, 1, NOW + 1) == NOW + PERIOD_SECONDS
    assert pace.due(CARD, 1, NOW + 1 + SETTLE_SECONDS) == NOW + QUIET_PERIOD_SECONDS


@pytest.mark.parametrize("drift", [{"load": 0.5}, {"version": 9, "load": 0.5}])
def test_what_drifts_on_its_card_is_told_within_a_period(drift: dict[str, float]):
    pace = quiet()
    drifted = replace(CARD, **drift)
    assert pace.due(drifted, 1, NOW + 1) == NOW + PERIOD_SECONDS
    pace.told(drifted, NOW + PERIOD_SECONDS)
    assert pace.due(drifted, 1, NOW + PERIOD_SECONDS) == NOW + PERIOD_SECONDS + QUIET_PERIOD_SECONDS


def test_what_drifts_on_its_links_is_told_within_a_period():
    pace = quiet()
    pace.drifted()
    assert pace.due(CARD, 1, NOW + 1) == NOW + PERIOD_SECONDS
    pace.told(CARD, NOW + PERIOD_SECONDS)
    assert pace.due(CARD, 1, NOW + PERIOD_SECONDS) == NOW + PERIOD_SECONDS + QUIET_PERIOD_SECONDS


@pytest.mark.parametrize("rarity", [1.0, 4.0])
def test_nobodys_words_lapse_before_two_of_them_are_lost(rarity: float):
    bounds = Bounds()
    assert 3 * (quiet().due(CARD, rarity, NOW) - NOW) < bounds.lifetime_seconds * rarity


def test_a_node_that_stopped_for_ten_seconds_still_holds_what_it_heard():
    assert Bounds().lifetime_seconds > 10 + QUIET_PERIOD_SECONDS


def test_what_is_said_after_a_verdict_is_said_soon():
    """For as long as others' words are waited for, and suspicions are announced."""
    assert Bounds().doubt_seconds + 2 * PERIOD_SECONDS <= SETTLE_SECONDS
    assert Timing().accuse_seconds + PERIOD_SECONDS <= SETTLE_SECONDS
