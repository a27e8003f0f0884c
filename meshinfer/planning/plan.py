"""What the planner answers: plans, best first, and refusals with their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from meshinfer.base.bounds import at_least, finite, sized
from meshinfer.base.units import format_bytes
from meshinfer.base.wire_ids import WireNodeId
from meshinfer.planning.prediction import Prediction
from meshinfer.topology.placement import ChannelKind, Placement, Strategy


@dataclass(frozen=True, slots=True)
class SeatMemory:
    """What one seat takes of its node, and what the node has."""

    node_id: WireNodeId
    weight_bytes: Annotated[int, at_least(0)]
    cache_bytes: Annotated[int, at_least(0)]
    activation_bytes: Annotated[int, at_least(0)]
    """Peak of one prefill chunk."""
    overhead_bytes: Annotated[int, at_least(0)]
    """The runner itself."""
    free_bytes: Annotated[int, at_least(0)]
    """Of the node, before this seat."""

    @property
    def need_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes + self.overhead_bytes

    @property
    def shortfall_bytes(self) -> int:
        return max(0, self.need_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement that can be, with its reasons."""

    placement: Placement
    memory: Annotated[tuple[SeatMemory, ...], sized(1, 256)]
    """One a seat, in the placement's order."""
    topology_digest: Annotated[str, sized(0, 64)]
    predicted_hop_seconds: Annotated[float, finite(0)]
    """Link time per token: the hops from stage to stage and the token's way back to the head."""
    binds: Annotated[str, sized(0, 512)]
    """What limits this candidate: memory of a node, or a link."""
    reason: Annotated[str, sized(0, 512)]
    """Why it is the choice, or why another one is."""
    prediction: Prediction | None = None
    """What it would do, term by term."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that cannot be."""

    strategy: Strategy
    channel: ChannelKind
    nodes: Annotated[tuple[WireNodeId, ...], sized(0, 256)]
    constraint: Annotated[str, sized(0, 64)]
    """What binds: `memory`, `cut`, `model`, `context`, `nodes`, `layers`, `tensor`, `build`."""
    explanation: Annotated[str, sized(0, 2048)]
    memory: Annotated[tuple[SeatMemory, ...], sized(0, 256)] = ()
    """Need, have and shortfall per node where memory binds."""
    placement: Placement | None = None
    """Whole, where it could be but for this build or the numbers."""
    prediction: Prediction | None = None
    """What it would do if it could be."""


@dataclass(frozen=True, slots=True)
class Declined:
    """A node that may take part, and would only slow the choice."""

    node_id: WireNodeId
    with_it: Annotated[float, finite(0)]
    without_it: Annotated[float, finite(0)]
    """Seconds of the objective: of a request, or of a full house."""
    explanation: Annotated[str, sized(0, 512)]


@dataclass(frozen=True, slots=True)
class Preview:
    """All candidates for one model: the first plan is the choice."""

    plans: Annotated[tuple[Plan, ...], sized(0, 64)]
    refusals: Annotated[tuple[Refusal, ...], sized(0, 64)]
    declined: Annotated[tuple[Declined, ...], sized(0, 64)] = ()


def memory_to_json(memory: tuple[SeatMemory, ...]) -> list[dict[str, Any]]:
    """Need, have and shortfall per seat, in bytes and in words."""
    return [
        {
            "node_id": seat.node_id,
            "weight_bytes": seat.weight_bytes,
            "kv_bytes": seat.cache_bytes,
            "activation_bytes": seat.activation_bytes,
            "overhead_bytes": seat.overhead_bytes,
            "need_bytes": seat.need_bytes,
            "free_bytes": seat.free_bytes,
            "shortfall_bytes": seat.shortfall_bytes,
            "summary": f"needs {format_bytes(seat.need_bytes)}, has {format_bytes(seat.free_bytes)} free",
        }
        for seat in memory
    ]
