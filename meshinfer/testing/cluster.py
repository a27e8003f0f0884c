"""Whole agents in one process: real mesh and serving on a simulated network, with the exact engine.

    async with Cluster(rng).running(3) as cluster:
        answer = await cluster.ask(cluster.nodes[0], prompt, tokens=8)
        cluster.kill(cluster.nodes[1])

Everything above the transport and the runner is the product's own code. Run it on a clock that jumps
(`trio.testing.MockClock(autojump_threshold=0)`): a minute takes a moment.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio
from trio import TaskStatus

from meshinfer.base.beats import begin_beats
from meshinfer.base.ids import ModelId, NodeId, SessionId
from meshinfer.base.units import MIB
from meshinfer.config import Settings
from meshinfer.mesh.mesh import Mesh, MeshSettings
from meshinfer.mesh.own_card import OwnCard
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.workload import Workload
from meshinfer.serving.model_cards import ModelCards
from meshinfer.serving.ports import Ports
from meshinfer.serving.requests import Finished, Generated, GenerateRequest
from meshinfer.serving.service import Serving
from meshinfer.serving.view import Instance
from meshinfer.testing.cards import model_card, node_card
from meshinfer.testing.clocks import NodeClocks
from meshinfer.testing.engine import FakeFabric, FakeSpeed
from meshinfer.testing.fake_channel import certificate_of
from meshinfer.testing.network import SimNetwork, SimTransport
from meshinfer.testing.probes import SimProbes, Truth
from meshinfer.topology.card import HeldModel, SeatReport
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import ModelFile, ModelInfo
from meshinfer.wire.records import Sampling

WORKLOAD = Workload(context_tokens=256, concurrency=1)
HOMES = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a directory of our own is made in it
"""Where simulated homes are: in memory where there is such a place, since whoever writes one waits for the disk (a
second and more on a busy one; virtual time stands still meanwhile)."""


@dataclass(eq=False)
class SimNode:
    """One agent of a cluster."""

    name: str
    transport: SimTransport
    mesh: Mesh
    serving: Serving
    home: Path
    clocks: NodeClocks
    ended: trio.Event = field(default_factory=trio.Event)
    nursery: trio.Nursery | None = None
    """Everything that runs in it; None before and after its life."""

    @property
    def node_id(self) -> NodeId:
        return self.transport.node_id

    def instances(self) -> tuple[Instance, ...]:
        with self.clocks.worn():
            return self.serving.ports.instances()

    def sees(self) -> frozenset[NodeId]:
        """The live members, by its view."""
        with self.clocks.worn():
            return frozenset(self.mesh.topology().by_id)

    def tasks(self, *names: str) -> int:
        """How many of its tasks have one of `names` in their own."""
        waiting = [self.nursery] if self.nursery is not None else []
        count = 0
        while waiting:
            for task in waiting.pop().child_tasks:
                count += any(name in task.name for name in names)
                waiting += task.child_nurseries
        return count


class Cluster:
    """Some agents on one simulated network."""

    def __init__(
        self,
        rng: random.Random,
        *,
        memory_bytes: int = 48 * MIB,
        overhead_bytes: int = 0,
        model: ModelCard | None = None,
        others: Sequence[ModelCard] = (),
        speed: FakeSpeed | None = None,
        truth: Truth | None = None,
        clocks: Mapping[str, NodeClocks] | None = None,
    ) -> None:
        """Nodes have `memory_bytes` each, of which a runner takes `overhead_bytes`; by default `model` (64 MiB in 8 layers)
        needs two of them.

        Every node has the files of `others`, too. With `truth` about links they are probed.
        `clocks`, by name, are those of nodes whose clocks are wrong (`testing.clocks`).
        """
        self.network = SimNetwork(rng)
        self.probes = SimProbes(truth, rng) if truth else None
        self.fabric = FakeFabric(self.network, speed)
        self.model = model or model_card(layer_bytes=(8 * MIB,) * 8)
        self.models = {card.model_id: card for card in (self.model, *others)}
        self.nodes: list[SimNode] = []
        """Those that were started, the killed ones too, in order."""
        self._rng = rng
        self._clocks = dict(clocks or {})
        self._memory_bytes = memory_bytes
        self._overhead_bytes = overhead_bytes
        self._nursery: trio.Nursery | None = None
        self._requests = 0

    @asynccontextmanager
    async def running(self, count: int) -> AsyncGenerator[Cluster]:
        """`count` agents that all see each other; all are gone afterwards."""
        with tempfile.TemporaryDirectory(dir=HOMES) as homes:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for index in range(count):
                    await self.start(f"node{index}", Path(homes) / f"node{index}")
                await self.settle()
                try:
                    yield self
                finally:
                    nursery.cancel_scope.cancel()

    async def start(self, name: str, home: Path) -> SimNode:
        """One more agent, which knows the address of one that lives, as discovery would tell it. The name of a killed one:
        its restart.
        """
        assert self._nursery is not None
        home.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - a simulation may block
        transport = self.network.add(name)
        others = self.live() or self.nodes
        seeds = others[0].transport.addresses() if others else ()
        card = replace(
            node_card(name, self._memory_bytes, holds=()),
            node_id=transport.node_id,
            name=name,
            addresses=transport.addresses(),
            runner_overhead_bytes=self._overhead_bytes,
            models=tuple(HeldModel(model.model_id, model.digest, 1) for model in self.models.values()),
        )
        own_card = OwnCard(card, home)
        probes = self.probes.of(transport.node_id) if self.probes else None
        mesh = Mesh(transport, own_card, MeshSettings(home, "sim", seeds, discovery=False), self._rng, probes=probes)
        serving = self._serving(transport, mesh, own_card, home)
        node = SimNode(name, transport, mesh, serving, home, self._clocks.get(name) or NodeClocks())
        self.nodes.append(node)
        with node.clocks.worn():
            await self._nursery.start(self._run, node)
        return node

    async def restart(self, node: SimNode) -> SimNode:
        """The same home and name again, after `kill`."""
        await node.ended.wait()
        return await self.start(node.name, node.home)

    def kill(self, node: SimNode) -> None:
        """Kill -9 of agent and runners."""
        self.fabric.kill(node.node_id)
        self.network.kill(node.node_id)

    def stop(self, node: SimNode) -> None:
        """SIGSTOP of agent and runners (a lid closes)."""
        self.fabric.stop(node.node_id)
        self.network.stop(node.node_id)

    def resume(self, node: SimNode) -> None:
        self.fabric.resume(node.node_id)
        self.network.resume(node.node_id)

    def live(self) -> list[SimNode]:
        """Nodes that run, in the order of their start; the stopped too."""
        return [node for node in self.nodes if self.node_of(node.node_id) is node]

    def node_of(self, node_id: NodeId) -> SimNode | None:
        """The one that runs under that id."""
        transport = self.network.running(node_id)
        return next((node for node in self.nodes if node.transport is transport), None) if transport else None

    async def settle(self, nodes: Sequence[SimNode] = (), timeout_seconds: float = 30.0) -> None:
        """Until `nodes` (all that were started, by default) see exactly each other."""
        group = nodes or self.nodes
        everyone = frozenset(node.node_id for node in group)
        await self.until(lambda: all(node.sees() == everyone for node in group), timeout_seconds)

    async def until(self, is_so: Callable[[], bool], timeout_seconds: float = 30.0) -> float:
        """Virtual seconds until `is_so()`. Raises trio.TooSlowError if it does not come true in time."""
        start = trio.current_time()
        with trio.fail_after(timeout_seconds):
            while not is_so():  # noqa: ASYNC110 - anything can make it so, and virtual time is free
                await trio.sleep(0.01)
        return trio.current_time() - start

    def request(
        self,
        prompt: Sequence[int],
        tokens: int,
        seed: int = 7,
        deadline_seconds: float = 60.0,
        *,
        model_id: ModelId | None = None,
        workload: Workload = WORKLOAD,
    ) -> GenerateRequest:
        """A request for `tokens` tokens of the cluster's (first) model."""
        self._requests += 1
        return GenerateRequest(
            session_id=SessionId(f"{self._requests:032x}"),
            model_id=model_id or self.model.model_id,
            prompt_ids=tuple(prompt),
            max_new_tokens=tokens,
            stop_token_ids=(),
            sampling=Sampling(seed=seed),
            workload=workload,
            deadline_seconds=deadline_seconds,
        )

    async def ask(
        self, origin: SimNode, request: GenerateRequest, on_token: Callable[[int], None] | None = None
    ) -> tuple[int, ...]:
        """The whole answer, checked to be gapless. Raises the request's MeshinferError."""
        tokens: list[int] = []
        with origin.clocks.worn():
            async with origin.serving.sessions.generate(request) as events:
                async for event in events:
                    if isinstance(event, Generated):
                        assert event.index == len(tokens), f"token {event.index} after {len(tokens)}"
                        tokens.append(event.token_id)
                        if on_token:
                            on_token(event.index)
                    elif isinstance(event, Finished):
                        assert event.reason == "length"
        return tuple(tokens)

    async def _run(self, node: SimNode, *, task_status: TaskStatus[None]) -> None:
        try:
            with node.transport.process:
                begin_beats()
                async with trio.open_nursery() as nursery:
                    node.nursery = nursery
                    await nursery.start(node.transport.run)
                    await nursery.start(node.mesh.run)
                    nursery.start_soon(node.serving.run)
                    task_status.started()
        finally:
            node.nursery = None
            node.ended.set()

    def _serving(self, transport: SimTransport, mesh: Mesh, own_card: OwnCard, home: Path) -> Serving:
        settings = Settings(home=home)
        files = (ModelFile("config.json", 1, "0" * 64),)

        def local(model_id: ModelId) -> ModelInfo | None:
            card = self.models.get(model_id)
            return ModelInfo(card, files) if card else None

        def announce(
            seats: tuple[SeatReport, ...],
            placements: tuple[Placement, ...],
            promised_bytes: int,
            blocked: tuple[NodeId, ...],
        ) -> None:
            own_card.update(seats=seats, placements=placements, memory_promised_bytes=promised_bytes, blocked=blocked)

        async def model_path(model_id: ModelId, progress: Callable[[int, int], None]) -> Path:
            del model_id, progress
            await trio.lowlevel.checkpoint()
            return home

        ports = Ports(
            settings=settings,
            transport=transport,
            call=mesh.call,
            topology=mesh.topology,
            doubtful=mesh.doubtful,
            out_of_reach=mesh.out_of_reach,
            is_waking=mesh.is_waking,
            blame=mesh.blame,
            watch=mesh.changes,
            announce=announce,
            drain=partial(own_card.update, draining=True),
            model_cards=ModelCards(transport, mesh.call, mesh.topology, local, settings.call_timeout_seconds),
            model_path=model_path,
            start_runner=self.fabric.start_runner(transport.node_id),
            open_channel=self.fabric.open_channel(transport.node_id),
            origin_certificate_der=certificate_of(transport.node_id),
            best_host=mesh.best_host,
            want_links=mesh.want_links,
            frame_arrived=mesh.frame_arrived,
        )
        return Serving.of(ports)
