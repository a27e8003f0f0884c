"""Which seats hold what: an immutable, content-addressed value.

A placement can be previewed, posted, deleted and posted again; its id is the digest of its
content, so equal placements have equal ids on every node and a changed one cannot pass for the old.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from meshinfer.base.bounds import between, sized
from meshinfer.base.errors import BadInput
from meshinfer.base.ids import NodeId, PlacementId, digest_hex
from meshinfer.base.wire_ids import WireModelId, WireNodeId

Strategy = Literal["pipeline", "tensor", "hybrid"]
ChannelKind = Literal["libp2p", "mlx-ring", "mlx-jaccl"]

# 1024 layers is four times the deepest model published; a bound, not a goal.
LayerIndex = Annotated[int, between(0, 1024)]


@dataclass(frozen=True, slots=True)
class Seat:
    """One node's place: the layers `[start, end)`, and its rank in the stage's tensor group."""

    node_id: WireNodeId
    start: LayerIndex
    end: LayerIndex
    rank: Annotated[int, between(0, 63)] = 0
    ranks: Annotated[int, between(1, 64)] = 1

    @property
    def layers(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Placement:
    """Which seats hold what, for how long a context and how many sessions at once."""

    model_id: WireModelId
    model_digest: Annotated[str, sized(1, 128)]
    layer_count: LayerIndex
    strategy: Strategy
    channel: ChannelKind
    context_tokens: Annotated[int, between(1, 2**31 - 1)]
    """KV cache is reserved for this many tokens (prompt and answer) …"""
    concurrency: Annotated[int, between(1, 4096)]
    """… for each of this many sessions."""
    seats: Annotated[tuple[Seat, ...], sized(1, 256)]
    """In pipeline order; the ranks of one stage stand together."""

    @cached_property
    def placement_id(self) -> PlacementId:
        seats = tuple((s.node_id, s.start, s.end, s.rank, s.ranks) for s in self.seats)
        content = (self.model_id, self.model_digest, self.layer_count, self.strategy, self.channel)
        return PlacementId(digest_hex(repr((*content, self.context_tokens, self.concurrency, seats)).encode()))

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """Its nodes, each once, in pipeline order."""
        return tuple(dict.fromkeys(seat.node_id for seat in self.seats))

    @cached_property
    def is_whole(self) -> bool:
        """Whether `validate` finds nothing."""
        try:
            self.validate()
        except BadInput:
            return False
        return True

    def validate(self) -> None:
        """Check that every layer is held exactly once, in order, by stages whose ranks are whole.

        Raises:
            BadInput: naming the first gap, overlap or incomplete group.
        """
        position = 0
        index = 0
        while index < len(self.seats):
            seat = self.seats[index]
            group = self.seats[index : index + seat.ranks]
            whole = [(s.start, s.end, s.rank, s.ranks) for s in group]
            if whole != [(seat.start, seat.end, rank, seat.ranks) for rank in range(seat.ranks)]:
                raise BadInput(
                    f"seat {index} starts a tensor group of {seat.ranks} ranks that is not whole",
                    expected="ranks 0 to n-1 of one layer range, next to each other",
                )
            if seat.start != position or seat.end <= seat.start:
                raise BadInput(
                    f"seat {index} holds layers [{seat.start}, {seat.end})",
                    expected=f"a non-empty range that starts at layer {position}",
                    do="let every layer be held exactly once, in order",
                )
            position, index = seat.end, index + seat.ranks
        if position != self.layer_count:
            raise BadInput(
                f"the seats end at layer {position}",
                expected=f"all {self.layer_count} layers of {self.model_id}",
            )
