"""What a placement would do, term by term, as a preview shows it and the wire carries it.

Every number is one that a person can doubt: which node computes how long, over which link, and whether
anybody has measured that (`assumed` says what was not).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import between, finite, sized
from meshinfer.base.ids import NodeId
from meshinfer.base.wire_ids import WireNodeId
from meshinfer.planning import cost
from meshinfer.planning.cost import ModelWork, Stage
from meshinfer.planning.measured import LinkRates, NodeRates
from meshinfer.planning.workload import Objective, Workload

Seconds = Annotated[float, finite(0)]
Rate = Annotated[float, finite(0)]
Tokens = Annotated[int, between(1, 2**31 - 1)]
Words = Annotated[str, sized(0, 256)]


@dataclass(frozen=True, slots=True)
class StageTerms:
    """One stage: a decode step of one session, and a prefill chunk."""

    nodes: Annotated[tuple[WireNodeId, ...], sized(1, 64)]
    compute_seconds: Seconds
    link_seconds: Seconds
    """All-reduces within a tensor group."""
    overhead_seconds: Seconds
    chunk_seconds: Seconds
    stream_bytes_per_second: Rate
    """Of the slowest of its nodes."""
    flops_per_second: Rate
    assumed: Words = ""
    """What of this nobody has measured; empty if all of it was."""

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.link_seconds + self.overhead_seconds


@dataclass(frozen=True, slots=True)
class HopTerms:
    """One hop, of one session's activation or, the last one, its token."""

    source: WireNodeId
    target: WireNodeId
    seconds: Seconds
    chunk_seconds: Seconds
    """With a prefill chunk; 0 for the way back."""
    latency_seconds: Seconds
    message_seconds: Seconds
    bandwidth_bytes_per_second: Rate
    assumed: Words = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """All terms of one placement under one workload."""

    objective: Objective
    objective_seconds: Seconds
    """What plans are compared by: a request's, or a full house's."""
    prompt_tokens: Tokens
    output_tokens: Tokens
    concurrency: Tokens
    ttft_seconds: Seconds
    tpot_seconds: Seconds
    """Of one stream alone; the next three are its parts."""
    compute_seconds: Seconds
    link_seconds: Seconds
    overhead_seconds: Seconds
    request_seconds: Seconds
    tokens_per_second: Rate
    """All sessions together while they decode."""
    served_tokens_per_second: Rate
    """The same with the reading of their prompts."""
    stages: Annotated[tuple[StageTerms, ...], sized(1, 256)]
    hops: Annotated[tuple[HopTerms, ...], sized(0, 256)]
    """From stage to stage, the token's way back last; none for one stage."""

    @property
    def tokens_per_second_alone(self) -> float:
        return 1 / self.tpot_seconds if self.tpot_seconds else 0.0

    @property
    def is_measured(self) -> bool:
        """Whether nothing of it is assumed."""
        return not any(each.assumed for each in (*self.stages, *self.hops))


@dataclass(frozen=True, slots=True)
class StageAt:
    """A stage of a placement: who computes what, as fast as measured."""

    start: int
    end: int
    nodes: tuple[NodeId, ...]
    rates: tuple[NodeRates, ...]
    inner: cost.LinkSpeed | None
    inner_assumed: str
    work: ModelWork


@dataclass(frozen=True, slots=True)
class HopAt:
    source: NodeId
    target: NodeId
    rates: LinkRates


def predict(stages: Sequence[StageAt], hops: Sequence[HopAt], workload: Workload, chunk_tokens: int) -> Prediction:
    """The terms of `stages` in pipeline order, with `hops` between them, the way back last."""
    prompt, output = workload.typical
    parts = [
        Stage(
            each.start,
            each.end,
            tuple(rates.layers for rates in each.rates),
            each.inner,
            work=each.work,
            heads=tuple(rates.head for rates in each.rates),
        )
        for each in stages
    ]
    told = cost.predict(
        stages[0].work,
        parts,
        [hop.rates.speed for hop in hops],
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=workload.concurrency,
        chunk_tokens=chunk_tokens,
    )
    house = workload.objective == "throughput"
    chunk_hops = [*told.chunk_hop_seconds, 0.0] if hops else []
    return Prediction(
        objective=workload.objective,
        objective_seconds=told.house_seconds if house else told.request_seconds,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=workload.concurrency,
        ttft_seconds=told.ttft_seconds,
        tpot_seconds=told.tpot_seconds,
        compute_seconds=told.compute_seconds,
        link_seconds=told.link_seconds,
        overhead_seconds=told.overhead_seconds,
        request_seconds=told.request_seconds,
        tokens_per_second=told.tokens_per_second,
        served_tokens_per_second=told.served_tokens_per_second,
        stages=tuple(
            StageTerms(
                nodes=each.nodes,
                compute_seconds=time.compute_seconds,
                link_seconds=time.link_seconds,
                overhead_seconds=time.overhead_seconds,
                chunk_seconds=chunk,
                stream_bytes_per_second=min(rates.layers.stream_bytes_per_second for rates in each.rates),
                flops_per_second=min(rates.layers.flops_per_second for rates in each.rates),
                assumed=next((r.assumed for r in each.rates if r.assumed), each.inner_assumed)[:256],
            )
            for each, time, chunk in zip(stages, told.stages, told.chunk_seconds, strict=True)
        ),
        hops=tuple(
            HopTerms(
                source=hop.source,
                target=hop.target,
                seconds=seconds,
                chunk_seconds=chunk,
                latency_seconds=hop.rates.speed.latency_seconds,
                message_seconds=hop.rates.speed.message_seconds,
                bandwidth_bytes_per_second=hop.rates.speed.bandwidth_bytes_per_second,
                assumed=hop.rates.assumed[:256],
            )
            for hop, seconds, chunk in zip(hops, told.hop_seconds, chunk_hops, strict=True)
        ),
    )
