"""A directed link: what one node measured on the way to another. Its one writer is `source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import between, finite
from meshinfer.base.wire_ids import WireNodeId
from meshinfer.topology.speed import LinkSpeed

CHANNEL_PROBE_BYTES = 4096
"""Of the frame whose round trip is measured on a channel: a decode step of a model 2048 wide, in 16 bits."""
LEAST_CHANNEL_RTT_SECONDS = 1e-6
"""Of a measured channel: 0 would say that nobody measured it, and a clock tells no less apart."""


def off_the_wire(rtt_seconds: float, bandwidth_bytes_per_second: float) -> float:
    """The measured round trip of a frame of CHANNEL_PROBE_BYTES, less the frame's own time on the wire where that is known.

    Whoever measures takes it off, with the bandwidth of then: latency and bandwidth are facts of their own from there on.
    """
    if rtt_seconds <= 0 or bandwidth_bytes_per_second <= 0:
        return rtt_seconds
    return max(LEAST_CHANNEL_RTT_SECONDS, rtt_seconds - CHANNEL_PROBE_BYTES / bandwidth_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Link:
    """`source` → `target`, as `source` measured it."""

    source: WireNodeId
    target: WireNodeId
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
    """Median round trip of a frame on a channel of the kind that carries activations, its time on the wire taken off
    (`off_the_wire`), so that it says nothing of bandwidth; 0: not measured."""
    message_seconds: Annotated[float, between(0, 3600)] = 0.0
    """What the software at both ends together takes for one message of it; 0: not measured."""
    estimated: bool = False
    """Nobody measured this pair: it follows from the two nodes' coordinates, and from what each measured elsewhere."""
    degraded: bool = False
    """For a minute or more it has been worse than half of what it was at its best."""

    @property
    def latency_seconds(self) -> float:
        """One way, without the software at both ends, which a planner adds itself.

        Half the round trip on a channel, less the software. Without a channel's round trip the small message's has to
        do: it crossed a slower stream, so it errs upwards, by a millisecond or two. Bandwidth is not in it: a link
        with more of it and the same latency is never worse, whatever the size of a message.
        """
        if not self.channel_rtt_seconds:
            return self.rtt_seconds / 2
        return max(0.0, self.channel_rtt_seconds / 2 - self.message_seconds)

    @property
    def speed(self) -> LinkSpeed | None:
        """In a planner's terms; None while its bandwidth is not known."""
        if self.bandwidth_bytes_per_second <= 0:
            return None
        return LinkSpeed(self.latency_seconds, self.bandwidth_bytes_per_second, self.message_seconds)
