"""What a node says of itself.

A card has one writer, its node, and two counters: `incarnation` rises at each start (and to refute
a rumour), `version` at each change within it. The pair orders cards of one node; nothing orders
cards of different nodes, and nothing needs to. All sizes are bounded, since a card crosses the
network in one gossip message of at most 64 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from meshinfer.base.bounds import between, finite, sized
from meshinfer.base.wire_ids import WireInstanceId, WireModelId, WireNodeId, WirePlacementId
from meshinfer.topology.coordinate import Coordinate
from meshinfer.topology.placement import Placement
from meshinfer.topology.speed import NodeSpeed

Count = Annotated[int, between(0, 2**63 - 1)]
LAST_EPOCH = 2**32 - 1
Epoch = Annotated[int, between(0, LAST_EPOCH)]
"""Of an instance. A bound that every message keeps, or what one of them brings cannot be said in another."""
ShortText = Annotated[str, sized(0, 128)]

SLOWDOWN_STEP = 0.25
"""A difference that a plan may depend on; less comes and goes within a minute."""

SeatState = Literal["leased", "loading", "linking", "ready", "cut", "failed"]
"""leased: memory promised. loading: a runner reads its layers. linking: loaded, its channels are being
opened. ready: it can run steps. cut: it lost the seat beside it, its layers stay warm, or go on loading, for a while
for the next epoch. failed: it cannot go on, `error` says why; it is about to be forgotten."""


@dataclass(frozen=True, slots=True)
class SeatReport:
    """One seat that the node holds, as it is now."""

    instance_id: WireInstanceId
    epoch: Epoch
    placement_id: WirePlacementId
    seat_index: Count
    state: SeatState
    progress: Annotated[float, between(0, 1)] = 0.0
    """Share of the seat's bytes that are loaded."""
    promised_bytes: Count = 0
    resident_bytes: Count = 0
    """What the runner's weights and caches hold now, as its engine counts it."""
    sessions: Count = 0
    step_seconds: Annotated[float, finite(0)] = 0.0
    """Smoothed time of one decode step in this stage; 0 before the first."""
    error: Annotated[str, sized(0, 512)] = ""
    error_code: Annotated[str, sized(0, 32)] = ""
    """failed: the error's class, for those that trying again does not mend (`corrupt_model`)."""

    @property
    def loads(self) -> bool:
        """Its layers are not in memory yet, and on their way."""
        return self.state == "loading" or (self.state == "cut" and self.progress < 1)

    @property
    def substance(self) -> SeatReport:
        """Without what moves all the time: on counters nobody acts at once, and on progress not by the percent.

        On `sessions`, holders of a placement that has lost do (`serving.view`): others hear them with the node's next
        announcement, up to 4 s late, and for so long holders may disagree about when it is over.
        """
        return replace(self, resident_bytes=0, sessions=0, step_seconds=0.0, progress=round(self.progress, 1))


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A model whose files lie complete and verified in the node's store."""

    model_id: WireModelId
    digest: ShortText
    file_bytes: Count


@dataclass(frozen=True, slots=True)
class KindSpeed:
    """How fast the node computes with weights of one kind."""

    kind: ShortText
    """As `ModelCard.weight_kind` names it: `float32`, `bfloat16`, `q4g32`, `q8g64`, …"""
    speed: NodeSpeed


@dataclass(frozen=True, slots=True)
class NodeCard:
    """All that a node says of itself."""

    node_id: WireNodeId
    incarnation: Count
    version: Count
    name: ShortText
    agent_version: ShortText
    addresses: Annotated[tuple[ShortText, ...], sized(0, 32)]
    """`host:port` of its libp2p listener on each usable interface; the hosts serve the runners' channels too."""
    api_url: ShortText
    """Where its HTTP API answers; empty if it listens on loopback only."""
    platform: ShortText
    accelerator: ShortText
    cpu_cores: Count
    memory_total_bytes: Count
    memory_usable_bytes: Count
    """What runners may use in all: what the machine can give, or the operator's limit if that is less."""
    memory_promised_bytes: Count
    """Leased or loaded; `usable − promised` is free."""
    runner_overhead_bytes: Count
    """What a runner takes before its first layer (interpreter, libraries)."""
    computes_float32: bool
    """The engine casts float parameters to fp32 here (CPU), so they take 4 bytes whatever the file says."""
    load: Annotated[float, finite(0)]
    """CPU that others than this node's agent and its runners use, as a share of all cores, over the last half minute.
    No run queue: a node's own runners would be in it, and what waits for a moment counts there like what computes."""
    models: Annotated[tuple[HeldModel, ...], sized(0, 64)] = ()
    seats: Annotated[tuple[SeatReport, ...], sized(0, 64)] = ()
    placements: Annotated[tuple[Placement, ...], sized(0, 64)] = ()
    """The placements that `seats` belong to, whole, so that one card explains itself."""
    leaving: bool = False
    """It is gone as far as the others are concerned: its last word."""
    speeds: Annotated[tuple[KindSpeed, ...], sized(0, 16)] = ()
    """Measured on this machine with its own engine; empty until it is."""
    coordinate: Coordinate | None = None
    """Where it is, for pairs that are not measured; None in a mesh so small that all are."""
    warning: Annotated[str, sized(0, 256)] = ""
    """What a person must see to on this node, in words; empty if nothing."""
    draining: bool = False
    """It is about to leave: it works for what it has, gives its seats to others, and takes nothing new."""
    blocked: Annotated[tuple[WireNodeId, ...], sized(0, 16)] = ()
    """Nodes whose runners answered nothing when this one dialled them of late, though their agents do. Sorted."""

    @property
    def takes_nothing(self) -> bool:
        """Nothing is to be planned on it, or asked of it as a planner."""
        return self.leaving or self.draining

    @property
    def order(self) -> tuple[int, int]:
        """Later cards of the same node compare greater."""
        return (self.incarnation, self.version)

    @property
    def substance(self) -> NodeCard:
        """What a reader acts on: without numbers, counters, load and the coordinate, which drifts a little all the time."""
        seats = tuple(seat.substance for seat in self.seats)
        return replace(self, incarnation=0, version=0, load=0.0, coordinate=None, seats=seats)

    @property
    def slowdown(self) -> float:
        """Of its engine by what else the machine does, in steps of SLOWDOWN_STEP; 1 on GPUs, which are not shared so.

        An engine on a CPU is one thread. As long as others leave a core free it has that; once they use all of n, it
        shares them with at least n others, and gets n/(n + 1) of a core or less: how much less is not known.
        """
        if not self.computes_float32 or not self.cpu_cores:
            return 1.0
        crowded = min(self.load, 1.0) + 1 / self.cpu_cores - 1
        return 1 + SLOWDOWN_STEP * max(0, round(crowded / SLOWDOWN_STEP))

    @property
    def memory_free_bytes(self) -> int:
        return max(0, self.memory_usable_bytes - self.memory_promised_bytes)
