"""Whom gossip goes through: everyone has some neighbours for it, nobody has all, and then that stays."""

from __future__ import annotations

import pytest
import trio
from conftest import PATIENCE_SECONDS, Nodes, connect

from meshinfer.base.ids import NodeId
from meshinfer.transport.libp2p import Libp2pTransport
from meshinfer.transport.libp2p.gossip import HEARTBEAT_SECONDS


async def take_in(transport: Libp2pTransport) -> None:
    async for _ in transport.events:
        pass


def overlay(transports: list[Libp2pTransport]) -> dict[NodeId, frozenset[object]]:
    return {each.node_id: frozenset(each._router.mesh[each._topic]) for each in transports}


@pytest.mark.parametrize("count", [3, 8])
async def test_everyone_has_two_to_four_neighbours_and_keeps_them(nodes: Nodes, count: int):
    transports: list[Libp2pTransport] = []
    for number in range(count):
        one = await nodes.start(f"node{number}")
        nodes.nursery.start_soon(take_in, one)
        for other in transports:
            await connect(one, other)
        transports.append(one)

    with trio.fail_after(PATIENCE_SECONDS):
        while not all(2 <= len(n) <= 4 for n in overlay(transports).values()):  # noqa: ASYNC110 - no event tells of it
            await trio.sleep(0.1)
    await trio.sleep(2 * HEARTBEAT_SECONDS)  # what is under way may change it once more
    settled = overlay(transports)
    assert all(2 <= len(neighbours) <= 4 for neighbours in settled.values())
    await trio.sleep(4 * HEARTBEAT_SECONDS)
    assert overlay(transports) == settled
