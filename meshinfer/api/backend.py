"""What the front door needs of the agent behind it; `agent.py` provides it, tests provide a fake."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshinfer.base.ids import InstanceId, ModelId, NodeId, SessionId
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Preview
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.events import EventStream
from meshinfer.serving.requests import GenerateRequest
from meshinfer.serving.view import Instance
from meshinfer.topology.graph import Topology
from meshinfer.wire.messages import Place


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that this mesh knows."""

    model_id: ModelId
    digest: str
    file_bytes: int
    node_ids: tuple[NodeId, ...]
    """Live nodes that hold its files."""
    instance_state: str
    """`ready`, `loading`, … of its instance, or `` if there is none."""


@dataclass(frozen=True, slots=True)
class RunnerEntry:
    """A runner process of this node, and the seat that it is."""

    pid: int
    instance_id: InstanceId
    epoch: int
    placement_id: str
    """Empty until its node's card shows that seat."""
    seat_index: int
    resident_bytes: int
    """As the kernel counts it."""
    active_bytes: int
    """As the engine counts it: weights, caches and what it works on."""
    cache_bytes: int
    """Keys and values of its sessions."""
    kept_bytes: int
    """What it holds in case a session is opened again."""
    sessions: int
    steps: int
    tokens: int
    recomputed_tokens: int
    """For sessions that were opened again."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """What became of an instance that was to be deleted."""

    instance_id: InstanceId
    freed_bytes: dict[NodeId, int]
    unconfirmed: tuple[NodeId, ...]
    """Nodes that did not answer in time; their seats lapse when they hear of it."""


class Backend(Protocol):
    """The agent as the HTTP API sees it. Errors are `MeshinferError`s."""

    @property
    def node_id(self) -> NodeId: ...

    def topology(self) -> Topology: ...

    def instances(self) -> tuple[Instance, ...]: ...

    def models(self) -> tuple[ModelEntry, ...]: ...

    def runners(self) -> tuple[RunnerEntry, ...]:
        """Of this node."""
        ...

    async def model_card(self, model_id: ModelId) -> ModelCard:
        """From this node's store or a peer's. Raises UnknownModel."""
        ...

    async def text_directory(self, model_id: ModelId) -> Path:
        """A directory with the model's tokenizer, template and generation config (fetched from a peer if need be)."""
        ...

    async def previews(self, model_id: ModelId, workload: Workload, constraints: Constraints) -> Preview: ...

    async def place(self, place: Place) -> Instance:
        """Returns when every seat is leased and committed; NoRoom with the numbers when it cannot be."""
        ...

    async def delete(self, instance_id: InstanceId) -> Deleted:
        """Raises UnknownInstance."""
        ...

    def generate(self, request: GenerateRequest) -> AbstractAsyncContextManager[EventStream]:
        """Run `request`. Events end with `Finished`; the stream's `receive` raises a MeshinferError if it fails.

        Entering raises NoRoom when this node's queue is full, NodeLeaving when it takes no more. Leaving the
        context cancels the session on every stage.
        """
        ...

    async def cancel(self, session_id: SessionId) -> bool:
        """End a session that runs through this node as its origin; False if there is none."""
        ...

    async def ready(self) -> tuple[bool, str]:
        """Whether the generation path lives (its tasks answer, not only the event loop), and why not."""
        ...
