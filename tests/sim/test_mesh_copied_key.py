"""Two agents with one key: both find out, say so, and do not outbid each other for ever. On virtual time."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from mesh_room import Room, room

from meshinfer.base.ids import NodeId
from meshinfer.mesh.announcement import sign
from meshinfer.mesh.gossip import PULL_PERIOD_SECONDS
from meshinfer.mesh.own_card import MAX_OUTBIDS
from meshinfer.wire.codec import encode

COPY_AT = "10.9.9.9:7000"


class Copy:
    """Another agent with `node`'s key: it announces itself, each time above what it hears."""

    def __init__(self, stage: Room, node: NodeId) -> None:
        self._stage, self._node = stage, node
        self.announced = 0

    async def announce(self, incarnation: int) -> None:
        self.announced += 1
        card = replace(self._stage.cards[self._node].card, incarnation=incarnation, addresses=(COPY_AT,))
        network = self._stage.network
        signed = sign(card, (), lambda payload: network.seal(self._node, payload)).signed
        network.flood(self._node, encode(signed))

    async def fight(self, seconds: float) -> None:
        highest = 0
        with trio.move_on_after(seconds):
            while True:
                held = [mesh._view.get(self._node) for node, mesh in self._stage.meshes.items() if node != self._node]
                seen = max(heard.card.incarnation for heard in held if heard)
                if seen > highest:
                    highest = seen + 1
                await self.announce(highest)
                await trio.sleep(2)


async def test_a_copy_is_found_by_its_card_and_named(
    autojump_clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with room(tmp_path) as stage:
        first, second, _ = sorted(await stage.gather(3))
        stage.network.copy_key(first, COPY_AT)
        await Copy(stage, first).fight(2 * PULL_PERIOD_SECONDS)
        warning = stage.cards[first].card.warning
        assert COPY_AT in warning
        assert "rm " in warning
        assert "identity.key" in warning
        assert sum(COPY_AT in record.getMessage() for record in caplog.records) == 1, "said once"
        assert stage.cards[second].card.warning == ""


async def test_the_fight_is_bounded_also_where_the_copy_cannot_be_reached(autojump_clock, tmp_path: Path) -> None:
    async with room(tmp_path) as stage:
        first, *others = sorted(await stage.gather(3))
        before = stage.cards[first].card.incarnation
        await Copy(stage, first).fight(20 * PULL_PERIOD_SECONDS)
        assert stage.cards[first].card.incarnation <= before + 2 * MAX_OUTBIDS
        assert COPY_AT in stage.cards[first].card.warning
        settled = stage.cards[first].card.incarnation
        await Copy(stage, first).fight(10 * PULL_PERIOD_SECONDS)
        assert stage.cards[first].card.incarnation == settled
        assert all(set(others) <= stage.sees()[node] for node in others), "the others go on"


async def test_our_own_past_is_no_copy(autojump_clock, tmp_path: Path) -> None:
    """A home restored from a backup: outbid once, and looked for in vain."""
    async with room(tmp_path) as stage:
        first, *_ = sorted(await stage.gather(3))
        await Copy(stage, first).announce(stage.cards[first].card.incarnation + 5)
        await trio.sleep(3 * PULL_PERIOD_SECONDS)
        assert stage.cards[first].card.warning == ""
        assert stage.cards[first].outbids == 1
