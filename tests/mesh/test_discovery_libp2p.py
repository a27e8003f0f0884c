"""The whole control plane on the real network: discovery, handshake, gossip, and a death, on loopback."""

from __future__ import annotations

import random
from pathlib import Path

import trio
from conftest import PATIENCE_SECONDS, Nodes, until

from meshinfer.base.ids import NodeId
from meshinfer.mesh.mesh import Mesh, MeshSettings
from meshinfer.mesh.own_card import OwnCard
from meshinfer.testing.cards import node_card


class Agents:
    """A mesh on each transport."""

    def __init__(self, nodes: Nodes, home: Path) -> None:
        self._nodes, self._home = nodes, home
        self.meshes: dict[NodeId, Mesh] = {}
        self.scopes: dict[NodeId, trio.CancelScope] = {}

    async def start(self, name: str, **settings: object) -> Mesh:
        transport = await self._nodes.start(name)
        own_card = OwnCard(node_card(transport.node_id), self._home / name)
        mesh = Mesh(transport, own_card, MeshSettings(self._home / name, "test", **settings), random.Random(name))

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with trio.CancelScope() as self.scopes[transport.node_id]:
                await mesh.run(task_status=task_status)
            await self._nodes.stop(transport)

        await self._nodes.nursery.start(live)
        self.meshes[transport.node_id] = mesh
        return mesh

    async def wait_until_all_see(self, nodes: set[NodeId]) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            for node in nodes:
                watch = self.meshes[node].changes()
                while self.meshes[node].topology().by_id.keys() != nodes:
                    await watch.changed()


async def test_three_agents_find_each_other_by_multicast_and_notice_a_death(nodes: Nodes, tmp_path: Path) -> None:
    agents = Agents(nodes, tmp_path)
    begun = trio.current_time()
    first, second, third = [await agents.start(name) for name in ("a", "b", "c")]
    everyone = {mesh.node_id for mesh in (first, second, third)}
    await agents.wait_until_all_see(everyone)
    found = trio.current_time() - begun
    await until(lambda: len(first.topology().links) == 6)
    assert all(0 < link.rtt_seconds < 5 for link in first.topology().links)

    begun = trio.current_time()
    agents.scopes[third.node_id].cancel()
    await agents.wait_until_all_see(everyone - {third.node_id})
    print(f"found each other in {found:.2f} s, noticed the death in {trio.current_time() - begun:.2f} s")  # noqa: T201
    print([round(link.rtt_seconds * 1e3, 2) for link in first.topology().links], "ms")  # noqa: T201


async def test_one_contact_and_the_address_book_are_enough_without_multicast(nodes: Nodes, tmp_path: Path) -> None:
    agents = Agents(nodes, tmp_path)
    first = await agents.start("a", discovery=False)
    (address,) = nodes_addresses(first)
    second = await agents.start("b", discovery=False, seeds=(address,))
    third = await agents.start("c", discovery=False, seeds=(address,))
    everyone = {mesh.node_id for mesh in (first, second, third)}
    await agents.wait_until_all_see(everyone)
    await until(lambda: all(member.is_neighbour for member in third.members()))

    agents.scopes[third.node_id].cancel()
    await agents.wait_until_all_see(everyone - {third.node_id})
    again = await agents.start("c", discovery=False)  # nothing but its address book to go by
    assert again.node_id == third.node_id
    await agents.wait_until_all_see(everyone)


def nodes_addresses(mesh: Mesh) -> tuple[str, ...]:
    return mesh.topology().by_id[mesh.node_id].addresses
