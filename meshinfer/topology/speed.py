"""How fast a node and a link are: the measured numbers that a prediction is made of.

Never looked up in a table of chips: an unknown machine is a number like any other. Weights and
prompts have rates of their own because they are bound by different things: a decode step streams
every weight once (memory), a prefill chunk multiplies with each of them many times (arithmetic).
Rates depend on how the weights are stored, so a node has one `NodeSpeed` per kind of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import between

Rate = Annotated[float, between(1e-3, 1e18)]
Seconds = Annotated[float, between(0, 3600)]


@dataclass(frozen=True, slots=True)
class NodeSpeed:
    """One node, for one kind of weights."""

    stream_bytes_per_second: Rate
    """Weight bytes that a matrix-vector product of the model's sizes gets through: BW."""
    flops_per_second: Rate
    """Of a matrix product as wide as a prefill chunk: F."""
    step_overhead_seconds: Seconds
    """Of a step whatever its size (dispatch, evaluation, hand-over to the channel): o."""
    sampling_seconds: Seconds = 0.0
    """One token of one session, in the last stage."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of one link, on the kind of channel that carries activations."""

    latency_seconds: Seconds
    """One way: half the median round trip of small probes on an open stream: α."""
    bandwidth_bytes_per_second: Rate
    """β."""
    message_seconds: Seconds = 0.0
    """Software cost of a message at both ends together: σ."""
