"""A room of agents' meshes on a SimNetwork: the stage on which the mesh tests play."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from hypothesis import HealthCheck, settings
from trio.testing import MockClock

from meshinfer.base.ids import NodeId
from meshinfer.mesh.mesh import Mesh, MeshSettings
from meshinfer.mesh.own_card import OwnCard
from meshinfer.testing.cards import node_card
from meshinfer.testing.network import SimNetwork, SimTransport
from meshinfer.testing.probes import SimProbes


class Room:
    """Nodes `n00`, `n01`, … that all know one contact, the first."""

    def __init__(self, network: SimNetwork, nursery: trio.Nursery, home: Path, probes: SimProbes | None = None) -> None:
        self.network, self._nursery, self._home, self._probes = network, nursery, home, probes
        self.meshes: dict[NodeId, Mesh] = {}
        """All and only those that run (perhaps stopped)."""
        self.transports: dict[NodeId, SimTransport] = {}
        self.cards: dict[NodeId, OwnCard] = {}

    async def start(
        self, name: str, *, seeds: tuple[str, ...] | None = None, address: str = "", addresses: tuple[str, ...] = ()
    ) -> Mesh:
        transport = self.network.add(name, addresses or ((address,) if address else ()))
        home = self._home / name
        own_card = OwnCard(node_card(transport.node_id), home)
        if seeds is None:
            seeds = next(iter(self.transports.values())).addresses() if self.transports else ()
        settings = MeshSettings(home, "test", seeds, discovery=False)
        probes = self._probes.of(transport.node_id) if self._probes else None
        mesh = Mesh(transport, own_card, settings, random.Random(name), probes=probes)

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with transport.process:
                async with trio.open_nursery() as nursery:
                    await nursery.start(transport.run)
                    await nursery.start(mesh.run)
                    task_status.started()
            self.meshes.pop(transport.node_id, None)

        await self._nursery.start(live)
        self.meshes[transport.node_id] = mesh
        self.transports[transport.node_id] = transport
        self.cards[transport.node_id] = own_card
        return mesh

    def sees(self) -> dict[NodeId, set[NodeId]]:
        """For each that runs: everyone in its topology."""
        return {node: {card.node_id for card in mesh.topology().nodes} for node, mesh in self.meshes.items()}

    def all_see(self, nodes: set[NodeId], by: set[NodeId] | None = None) -> bool:
        return all(seen == nodes for node, seen in self.sees().items() if node in (by or nodes))

    async def wait(self, condition: Callable[[], bool], within_seconds: float) -> float:
        """Until `condition`, looked at every 20 ms of virtual time; how long it took. Fails after `within_seconds`."""
        begun = trio.current_time()
        while not condition():
            assert trio.current_time() - begun < within_seconds, self.sees()
            await trio.sleep(0.02)
        return trio.current_time() - begun

    async def gather(self, count: int, apart_seconds: float = 0) -> set[NodeId]:
        """`count` nodes that all see each other."""
        for index in range(count):
            await self.start(f"n{index:02}")
            await trio.sleep(apart_seconds)
        everyone = set(self.meshes)
        await self.wait(lambda: self.all_see(everyone), 10)
        return everyone


@asynccontextmanager
async def room(home: Path, network: SimNetwork | None = None, probes: SimProbes | None = None) -> AsyncIterator[Room]:
    async with trio.open_nursery() as nursery:
        yield Room(network or SimNetwork(), nursery, home, probes)
        nursery.cancel_scope.cancel()


def play(network: SimNetwork, tale: Callable[[Room], Awaitable[None]], probes: SimProbes | None = None) -> None:
    """Run `tale` in a fresh room, on virtual time."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as home:
            async with room(Path(home), network, probes) as stage:
                await tale(stage)
        assert network.failures == []

    trio.run(main, clock=MockClock(autojump_threshold=0))


def simulation(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many schedules, the same on each run; a whole mesh takes what it takes."""
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
