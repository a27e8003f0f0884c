"""The real `Backend`: serving's parts behind the front door."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import trio

from meshinfer.api.backend import Deleted, ModelEntry, RunnerEntry
from meshinfer.base.errors import PeerLost
from meshinfer.base.ids import InstanceId, ModelId, NodeId, SessionId
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Preview
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.events import EventStream
from meshinfer.serving.requests import GenerateRequest
from meshinfer.serving.service import Serving
from meshinfer.serving.view import Instance
from meshinfer.topology.graph import Topology
from meshinfer.wire.messages import Place


class ServingBackend:
    """See `api.backend.Backend`."""

    def __init__(self, serving: Serving, text_directory: Callable[[ModelId], Awaitable[Path]]) -> None:
        self._serving = serving
        self._ports = serving.ports
        self._text_directory = text_directory

    @property
    def node_id(self) -> NodeId:
        return self._ports.node_id

    def topology(self) -> Topology:
        return self._ports.topology()

    def instances(self) -> tuple[Instance, ...]:
        return self._ports.instances()

    def models(self) -> tuple[ModelEntry, ...]:
        states = {instance.placement.model_id: instance.state for instance in self.instances()}
        held: dict[tuple[ModelId, str], tuple[int, list[NodeId]]] = {}
        for card in self.topology().nodes:
            for model in card.models:
                held.setdefault((model.model_id, model.digest), (model.file_bytes, []))[1].append(card.node_id)
        return tuple(
            ModelEntry(model_id, digest, file_bytes, tuple(nodes), states.get(model_id, ""))
            for (model_id, digest), (file_bytes, nodes) in sorted(held.items())
        )

    def runners(self) -> tuple[RunnerEntry, ...]:
        runners = self._serving.seats.runners
        beats = runners.heartbeats()
        shown = self._ports.own_card().seats
        placements = {(seat.instance_id, seat.epoch, seat.seat_index): seat.placement_id for seat in shown}
        return tuple(
            RunnerEntry(
                pid=pid,
                instance_id=key.instance_id,
                epoch=key.epoch,
                placement_id=placements.get((key.instance_id, key.epoch, key.seat_index), ""),
                seat_index=key.seat_index,
                resident_bytes=beats[key].resident_bytes if key in beats else 0,
                active_bytes=beats[key].active_bytes if key in beats else 0,
                cache_bytes=beats[key].cache_bytes if key in beats else 0,
                kept_bytes=beats[key].kept_bytes if key in beats else 0,
                sessions=beats[key].sessions if key in beats else 0,
                steps=beats[key].steps if key in beats else 0,
                tokens=beats[key].tokens if key in beats else 0,
                recomputed_tokens=beats[key].recomputed_tokens if key in beats else 0,
            )
            for key, pid in runners.pids().items()
        )

    async def model_card(self, model_id: ModelId) -> ModelCard:
        return (await self._ports.model_cards.get(model_id)).card

    async def text_directory(self, model_id: ModelId) -> Path:
        return await self._text_directory(model_id)

    async def previews(self, model_id: ModelId, workload: Workload, constraints: Constraints) -> Preview:
        return await self._serving.planner.preview(model_id, workload, constraints)

    async def place(self, place: Place) -> Instance:
        placed = await self._serving.placer.place(place)
        instance = await self._serving.placer.appears(placed)
        if instance is not None:
            return instance
        raise PeerLost(
            f"instance {placed.instance_id} was placed but its nodes do not announce it",
            do="look at `meshinfer status`, then try again",
        )

    async def delete(self, instance_id: InstanceId) -> Deleted:
        freed, unconfirmed = await self._serving.placer.delete(instance_id)
        return Deleted(instance_id, freed, unconfirmed)

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[EventStream]:
        return self._serving.sessions.generate(request)

    async def cancel(self, session_id: SessionId) -> bool:
        await trio.lowlevel.checkpoint()
        return self._serving.sessions.cancel(session_id)

    async def ready(self) -> tuple[bool, str]:
        return await self._serving.sessions.ready()
