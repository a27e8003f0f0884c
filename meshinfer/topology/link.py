"""A directed link: what one node measured on the way to another. Its one writer is `source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import between, finite
from meshinfer.base.ids import NodeId
from meshinfer.topology.speed import LinkSpeed

CHANNEL_PROBE_BYTES = 4096
"""Of the frame whose round trip is measured on a channel: a decode step of a model 2048 wide, in 16 bits."""


@dataclass(frozen=True, slots=True)
class Link:
    """`source` → `target`, as `source` measured it."""

    source: NodeId
    target: NodeId
    rtt_seconds: Annotated[float, between(0, 3600)]
    """Smoothed round trip of a small message on an open stream."""
    jitter_seconds: Annotated[float, between(0, 3600)] = 0.0
    """Smoothed absolute deviation of the round trip."""
    bandwidth_bytes_per_second: Annotated[float, finite(0)] = 0.0
    """0: not measured."""
    loss: Annotated[float, between(0, 1)] = 0.0
    """Share of the last probes that had no answer within their deadline."""
    age_seconds: Annotated[float, finite(0)] = 0.0
    """Since the last measurement, on the source's own clock, when it was sent."""
    channel_rtt_seconds: Annotated[float, between(0, 3600)] = 0.0
    """Median round trip of a 4 KiB frame on a channel of the kind that carries activations; 0: not measured."""
    message_seconds: Annotated[float, between(0, 3600)] = 0.0
    """What the software at both ends together takes for one message of it; 0: not measured."""
    estimated: bool = False
    """Nobody measured this pair: it follows from the two nodes' coordinates, and from what each measured elsewhere."""
    degraded: bool = False
    """For a minute or more it has been worse than half of what it was at its best."""

    @property
    def latency_seconds(self) -> float:
        """One way, without the software at both ends and the frame's own time on the wire, which a planner adds itself.

        Half the round trip of a 4 KiB frame on a channel, less those two. Without a channel's round trip the small
        message's has to do: it crossed a slower stream, so it errs upwards, by a millisecond or two.
        """
        if not self.channel_rtt_seconds:
            return self.rtt_seconds / 2
        rate = self.bandwidth_bytes_per_second
        on_wire = CHANNEL_PROBE_BYTES / rate if rate > 0 else 0.0
        return max(0.0, (self.channel_rtt_seconds - on_wire) / 2 - self.message_seconds)

    @property
    def speed(self) -> LinkSpeed | None:
        """In a planner's terms; None while its bandwidth is not known."""
        if self.bandwidth_bytes_per_second <= 0:
            return None
        return LinkSpeed(self.latency_seconds, self.bandwidth_bytes_per_second, self.message_seconds)
