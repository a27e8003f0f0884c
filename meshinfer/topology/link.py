"""A directed link: what one node measured on the way to another. Its one writer is `source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import between, finite
from meshinfer.base.ids import NodeId


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
    """Of that, what the software at both ends takes; 0: not measured."""
