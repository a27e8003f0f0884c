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

FLOAT_KINDS = ("float32", "bfloat16", "float16")
"""Kinds of weights that are not quantised."""


def engine_kind(kind: str, computes_float32: bool) -> str:
    """The kind as which a node's engine holds weights of `kind`: where it computes in float32, floats are that."""
    return "float32" if computes_float32 and kind in FLOAT_KINDS else kind


LEAST_RATE = 1e-3
Rate = Annotated[float, between(LEAST_RATE, 1e18)]
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
    layer_overhead_seconds: Seconds = 0.0
    """Of each layer in each step, whatever their size: a layer is some twenty operations, each dispatched by itself."""
    cache_bytes_per_second: Annotated[float, between(0, 1e18)] = 0.0
    """Keys and values that attention reads; 0: as weights. On CPUs several times that of packed weights, which have
    to be unpacked."""
    row_bytes_per_second: Annotated[float, between(0, 1e18)] = 0.0
    """The same weights again, for each further session of a step; 0: they cost nothing more, as on GPUs. A CPU unpacks
    packed weights for each row anew, and then this is about BW: several sessions are no faster than one after another."""
    pass_bytes_per_second: Annotated[float, between(0, 1e18)] = 0.0
    """Weights that a prefill chunk reads and unpacks before it multiplies, whatever its length; 0: while it multiplies.
    On CPUs as much as 60 tokens' arithmetic (4 bits, measured)."""

    def to_json(self) -> dict[str, float | None]:
        """For people and dashboards: rates per second, times in microseconds."""
        return {
            "stream_gb": round(self.stream_bytes_per_second / 1e9, 3),
            "gflops": round(self.flops_per_second / 1e9, 1),
            "cache_gb": round(self.cache_bytes_per_second / 1e9, 3) or None,
            "row_gb": round(self.row_bytes_per_second / 1e9, 3) or None,
            "pass_gb": round(self.pass_bytes_per_second / 1e9, 3) or None,
            "step_overhead_us": round(self.step_overhead_seconds * 1e6, 1),
            "layer_overhead_us": round(self.layer_overhead_seconds * 1e6, 1),
            "sampling_us": round(self.sampling_seconds * 1e6, 1),
        }


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One direction of one link, on the kind of channel that carries activations."""

    latency_seconds: Seconds
    """One way: half the median round trip of small probes on an open stream: α."""
    bandwidth_bytes_per_second: Rate
    """β."""
    message_seconds: Seconds = 0.0
    """Software cost of a message at both ends together: σ."""
