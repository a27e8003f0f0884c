"""What a placement would cost in time, term by term; every term can be shown.

What limits what: a *decode* step reads every active weight and every session's cache once, so it
runs at memory bandwidth; a *prefill* chunk does the same arithmetic for each of its tokens, so it
runs at the arithmetic rate. A hop costs latency and software in decode (a few kilobytes), bandwidth
in prefill (megabytes). One stream passes the stages in turn, so their times add; several streams
overlap, so the slowest stage or link sets the pace. Hence more nodes never speed one stream up,
except as a tensor group on links quick enough for two all-reduces per layer.

| n | term | here |
|---|---|---|
| 1 | layer, decode | `layer_decode_seconds` |
| 2 | stage, decode | `decode_time` |
| 3 | hop | `hop_seconds` |
| 4 | one stream | `Prediction.tpot_seconds`, `Prediction.request_seconds` |
| 5 | several streams | `tokens_per_second`, `house_seconds` |
| 6 | prefill | `prefill_time`, `ttft_seconds` |
| 7 | memory | `planning.memory` |
| 8 | tensor group | `all_reduce_seconds`; a `Stage` of several ranks |
| 9 | hybrid | stages of one and of several ranks together |
| 10 | moving what is warm | `worth_moving` |

Pure float arithmetic without a call into the platform's libm: powers are multiplied out, sums are
`fsum`, which rounds once (the built-in sum differs between Python 3.11 and 3.12). The same bits on
every IEEE machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

from meshinfer.topology.speed import LinkSpeed, NodeSpeed

HYSTERESIS = 0.15
"""A running placement is replaced for a gain above this: measurements are good to about 10 %, so less may be noise."""
IN_FLIGHT = 1
"""Micro-batches that decode at once: this build's head starts a step when the last one is answered. So balance pays in
prefill, whose chunks do overlap, and not in decode; a constant of the build, and of nothing else here."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer asks of its node."""

    dense_bytes: float
    """Weights that every step reads."""
    flops_per_token: float
    """Two per parameter that a token visits."""
    cache_bytes_per_token: float = 0.0
    """Keys and values of one token of context; a step reads those of all the context."""
    cache_tokens_limit: int = 0
    """Sliding window; 0: none."""
    state_bytes: float = 0.0
    """Per session, read and written at each step whatever the context."""
    attention_flops_per_pair: float = 0.0
    """Per token and token of its context: 4 × query heads × head width."""
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: float = 0.0
    """One of them."""

    def active_bytes(self, tokens: int) -> float:
        """Weights that a step of `tokens` tokens reads: of n experts, those that at least one token visits.

        n · (1 − (1 − k/n)^tokens) of them on average, if the router spreads its choices evenly.
        """
        if not self.experts:
            return self.dense_bytes
        missed = _power(1 - self.experts_per_token / self.experts, tokens)
        return self.dense_bytes + self.experts * (1 - missed) * self.expert_bytes

    def cached_tokens(self, context: float) -> float:
        return min(context, self.cache_tokens_limit) if self.cache_tokens_limit else context


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model asks of its nodes."""

    layers: tuple[LayerWork, ...]
    embedding_row_bytes: float
    """Looked up per token by the first stage."""
    head_bytes: float
    head_flops_per_token: float
    """The output projection, once per sampled token, by the last stage."""
    activation_bytes_per_token: float
    """What crosses a cut: hidden size × tensors carried × bytes of an element."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A layer range and who computes it: one node, or a tensor group."""

    start: int
    end: int
    ranks: tuple[NodeSpeed, ...]
    inner: LinkSpeed | None = None
    """The slowest link of the group's ring; None for a single node."""
    shares: tuple[float, ...] = ()
    """Of each layer, per rank; equal if empty. They add up to 1."""
    work: ModelWork | None = None
    """Where its engine holds the weights in another float type than the model that goes with it says."""
    heads: tuple[NodeSpeed, ...] = ()
    """Per rank, for the output weights, where these are of another kind than the layers."""

    def share(self, rank: int) -> float:
        return self.shares[rank] if self.shares else 1 / len(self.ranks)


@dataclass(frozen=True, slots=True)
class StageTime:
    """One step of one stage."""

    compute_seconds: float
    link_seconds: float
    """All-reduces within a tensor group."""
    overhead_seconds: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.link_seconds + self.overhead_seconds


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a placement would do."""

    ttft_seconds: float
    tokens_per_second: float
    """All the workload's sessions together, while they decode."""
    house_seconds: float
    """All the workload's sessions at once, prompts and answers."""
    output_tokens: int
    concurrency: int
    stages: tuple[StageTime, ...]
    """Decode step of each stage, one stream."""
    chunk_seconds: tuple[float, ...]
    """Prefill chunk of each stage."""
    hop_seconds: tuple[float, ...]
    """Each hop of a decode step, the token's way back last."""
    chunk_hop_seconds: tuple[float, ...]
    """Each hop of a prefill chunk; the token's way back is not among them."""

    @property
    def compute_seconds(self) -> float:
        """Of one token of one stream; with the next two its whole time."""
        return fsum(stage.compute_seconds for stage in self.stages)

    @property
    def link_seconds(self) -> float:
        return fsum([*(stage.link_seconds for stage in self.stages), *self.hop_seconds])

    @property
    def overhead_seconds(self) -> float:
        return fsum(stage.overhead_seconds for stage in self.stages)

    @property
    def tpot_seconds(self) -> float:
        return self.compute_seconds + self.link_seconds + self.overhead_seconds

    @property
    def request_seconds(self) -> float:
        """A typical request alone, from its arrival to its last token."""
        return self.ttft_seconds + (self.output_tokens - 1) * self.tpot_seconds

    @property
    def served_tokens_per_second(self) -> float:
        """Output of all sessions together, reading the prompts included."""
        return self.concurrency * self.output_tokens / self.house_seconds


# --- 1, 2, 8: steps -----------------------------------------------------------------------------


def layer_decode_seconds(layer: LayerWork, node: NodeSpeed, batch: int, context: float, share: float = 1.0) -> float:
    """One step of `batch` sessions with `context` tokens each; of a tensor rank, its `share` of the layer."""
    cached = layer.cached_tokens(context)
    read, flops = layer.active_bytes(batch), batch * layer.flops_per_token
    weights = few_rows_seconds(node, read, batch * layer.active_bytes(1) - read, flops)
    cache = batch * (cached * layer.cache_bytes_per_token + layer.state_bytes)
    reading = weights + cache / (node.cache_bytes_per_second or node.stream_bytes_per_second)
    flops += batch * cached * layer.attention_flops_per_pair
    return share * max(reading, flops / node.flops_per_second) + node.layer_overhead_seconds


def layer_prefill_seconds(layer: LayerWork, node: NodeSpeed, chunk: int, context: float, share: float = 1.0) -> float:
    """One chunk of `chunk` tokens whose mean context is `context`."""
    flops = chunk * (layer.flops_per_token + layer.cached_tokens(context) * layer.attention_flops_per_pair)
    return share * many_rows_seconds(node, layer.active_bytes(chunk), flops) + node.layer_overhead_seconds


def many_rows_seconds(node: NodeSpeed, read_bytes: float, flops: float) -> float:
    """A product of so many weights with a chunk's rows."""
    before = read_bytes / node.pass_bytes_per_second if node.pass_bytes_per_second else 0.0
    return max(before + flops / node.flops_per_second, read_bytes / node.stream_bytes_per_second)


def few_rows_seconds(node: NodeSpeed, read_bytes: float, again_bytes: float, flops: float) -> float:
    """A product of so many weights with a step's rows, of which those after the first read `again_bytes` once more.

    Row by row, or as a chunk where that is quicker (`engine.unpacking` does so from four rows on).
    """
    once = read_bytes / node.stream_bytes_per_second
    if not node.row_bytes_per_second:
        return once
    by_rows = once + again_bytes / node.row_bytes_per_second
    return min(by_rows, many_rows_seconds(node, read_bytes, flops)) if node.pass_bytes_per_second else by_rows


def decode_time(model: ModelWork, stage: Stage, batch: int, context: float) -> StageTime:
    """One decode step of a stage; embedding lookup, head and sampling where they are."""
    work = stage.work or model

    def slowest_rank(layer: LayerWork) -> float:
        return max(
            layer_decode_seconds(layer, node, batch, context, stage.share(rank))
            for rank, node in enumerate(stage.ranks)
        )

    compute = _over_layers(work, stage, slowest_rank)
    if stage.start == 0:
        compute += embedding_seconds(work, stage, batch)
    if stage.end == len(work.layers):
        compute += head_seconds(work, stage, batch)
    return StageTime(compute, all_reduces_seconds(work, stage, batch), overhead_seconds(stage))


def _over_layers(work: ModelWork, stage: Stage, price: Callable[[LayerWork], float]) -> float:
    """The sum of `price` over a stage's layers; equal layers are one object, and priced once."""
    prices: dict[int, float] = {}
    for layer in work.layers[stage.start : stage.end]:
        if id(layer) not in prices:
            prices[id(layer)] = price(layer)
    return fsum(prices[id(layer)] for layer in work.layers[stage.start : stage.end])


def prefill_time(model: ModelWork, stage: Stage, chunk: int, context: float) -> StageTime:
    """One prefill chunk of a stage.

    Only the prompt's last position is sampled, in a step of its own. So nobody asks for a chunk's hidden states, and
    engines compute what is asked for: no head, and of the model's last layer only keys and values, which is next to
    nothing.
    """
    work = stage.work or model
    compute = fsum(
        max(
            layer_prefill_seconds(work.layers[index], node, chunk, context, stage.share(rank))
            for rank, node in enumerate(stage.ranks)
        )
        for index in range(stage.start, min(stage.end, len(work.layers) - 1))
    )
    if stage.start == 0:
        compute += embedding_seconds(work, stage, chunk)
    return StageTime(compute, all_reduces_seconds(work, stage, chunk), overhead_seconds(stage))


def embedding_seconds(work: ModelWork, stage: Stage, tokens: int) -> float:
    """Rows of the embedding; each rank looks them up for itself."""
    return tokens * work.embedding_row_bytes / min(node.stream_bytes_per_second for node in stage.ranks)


def head_seconds(work: ModelWork, stage: Stage, batch: int) -> float:
    """Output projection and sampling of one token per session; mlx-lm shards layers only, so each rank does it all."""
    slowest = max(
        max(
            few_rows_seconds(node, work.head_bytes, (batch - 1) * work.head_bytes, batch * work.head_flops_per_token),
            batch * work.head_flops_per_token / node.flops_per_second,
        )
        for node in stage.heads or stage.ranks
    )
    return slowest + batch * max(node.sampling_seconds for node in stage.ranks)


def all_reduce_seconds(ranks: int, message_bytes: float, link: LinkSpeed) -> float:
    """A ring: each of 2 (p − 1) turns sends one p-th of the message over every link at once."""
    turns = 2 * (ranks - 1)
    return turns * (link.latency_seconds + link.message_seconds) + turns / ranks * (
        message_bytes / link.bandwidth_bytes_per_second
    )


def all_reduces_seconds(work: ModelWork, stage: Stage, tokens: int) -> float:
    """Two a layer: after the attention and after the MLP.

    So p equal ranks are quicker than one of them, whose step takes T, only over links with a one-way latency α
    such that 2 · L · 2 (p − 1) · α < (1 − 1/p) · T, which is what they save: α < T / (4 L p).
    """
    if len(stage.ranks) == 1:
        return 0.0
    assert stage.inner is not None, "a tensor group has links"
    message = tokens * work.activation_bytes_per_token
    return 2 * (stage.end - stage.start) * all_reduce_seconds(len(stage.ranks), message, stage.inner)


def overhead_seconds(stage: Stage) -> float:
    """Of a step, whatever its size."""
    return max(node.step_overhead_seconds for node in stage.ranks)


# --- 3, 4, 5, 6: hops, streams, prompts ---------------------------------------------------------


FIRST_WINDOW_BYTES = 14_600.0
"""What TCP sends before it has heard anything: ten segments (RFC 6928). A channel that was idle for a moment, as between
two prompts, begins with that again; a decode step's few kilobytes fit into it."""


def hop_seconds(link: LinkSpeed, message_bytes: float) -> float:
    """One message, one way."""
    return link.latency_seconds + link.message_seconds + sending_seconds(link, message_bytes)


def sending_seconds(link: LinkSpeed, message_bytes: float) -> float:
    """From a message's first byte to its last: slow start, each round trip twice as much, until the link is full.

    0.5 MB over a link with 30 ms each way waits five round trips, 0.3 s, whatever its bandwidth.
    """
    waited, window, rtt = 0.0, FIRST_WINDOW_BYTES, 2 * link.latency_seconds
    while message_bytes > window and window / link.bandwidth_bytes_per_second < rtt:
        waited += rtt
        message_bytes -= window
        window *= 2
    return waited + message_bytes / link.bandwidth_bytes_per_second


TOKEN_BYTES = 64.0
"""A sampled token on its way back: a record of a few dozen bytes."""


def decode_hops(model: ModelWork, stages: Sequence[Stage], hops: Sequence[LinkSpeed], batch: int) -> tuple[float, ...]:
    """Each hop of a decode step; the last of `hops` is the token's way back."""
    if not hops:
        return ()
    messages = _messages(model, stages, batch)
    there = (hop_seconds(link, message) for link, message in zip(hops[:-1], messages, strict=True))
    return (*there, hop_seconds(hops[-1], batch * TOKEN_BYTES))


def _messages(model: ModelWork, stages: Sequence[Stage], tokens: int) -> list[float]:
    """Bytes of the activations that each stage but the last sends on, as wide as its own engine computes."""
    return [tokens * (stage.work or model).activation_bytes_per_token for stage in stages[:-1]]


def _transfers(messages: Sequence[float], hops: Sequence[LinkSpeed]) -> list[float]:
    """How long each link is busy with its message."""
    return [bytes_ / link.bandwidth_bytes_per_second for bytes_, link in zip(messages, hops[:-1], strict=True)]


def tokens_per_second(
    model: ModelWork,
    stages: Sequence[Stage],
    hops: Sequence[LinkSpeed],
    concurrency: int,
    context: float,
    in_flight: int = IN_FLIGHT,
) -> float:
    """All sessions together while they decode, in the best division into at most `in_flight` micro-batches.

    X = B / max(slowest stage, slowest transfer, (ΣD + ΣC) / M) for M micro-batches of B sessions.
    """
    best = 0.0
    for count in range(1, min(concurrency, in_flight) + 1):
        batch = -(-concurrency // count)
        step = [decode_time(model, stage, batch, context).seconds for stage in stages]
        transfers = _transfers(_messages(model, stages, batch), hops) if hops else []
        around = fsum(step) + fsum(decode_hops(model, stages, hops, batch))
        # The last micro-batch may be smaller: concurrency / count of them on average.
        best = max(best, (concurrency / count) / max([*step, *transfers, around / count]))
    return best


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """One chunk on its way through all stages."""

    stages: tuple[float, ...]
    hops: tuple[float, ...]
    bottleneck_seconds: float
    """Slowest stage or transfer: what each further chunk adds, since chunks overlap."""

    @property
    def through_seconds(self) -> float:
        return fsum([*self.stages, *self.hops])


def chunks_of(prompt_tokens: int, chunk_tokens: int) -> tuple[int, int]:
    """(count, tokens) of the chunks of a prompt, as if they were equal.

    Its last token is not among them: it is the first step that samples.
    """
    read = max(1, prompt_tokens - 1)
    count = -(-read // chunk_tokens)
    return count, -(-read // count)


def prefill(
    model: ModelWork, stages: Sequence[Stage], hops: Sequence[LinkSpeed], tokens: int, context: float
) -> PrefillTime:
    """A chunk of `tokens` tokens, whose mean context is `context`."""
    step = tuple(prefill_time(model, stage, tokens, context).seconds for stage in stages)
    messages = _messages(model, stages, tokens) if hops else []
    there = tuple(hop_seconds(link, message) for link, message in zip(hops[:-1], messages, strict=True))
    return PrefillTime(step, there, max([*step, *_transfers(messages, hops)]))


def predict(
    model: ModelWork,
    stages: Sequence[Stage],
    hops: Sequence[LinkSpeed],
    *,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    chunk_tokens: int,
) -> Prediction:
    """All of it, for one placement.

    Args:
        model: what it asks.
        stages: in pipeline order.
        hops: from each stage to the next and, last, from the last back to the head; empty for one stage.
        prompt_tokens: of a typical request.
        output_tokens: of a typical request; the mean context of a step is the prompt and half of these.
        concurrency: sessions at once, for the throughput.
        chunk_tokens: prefill chunk.
    """
    assert len(hops) == (len(stages) if len(stages) > 1 else 0), "one hop per stage, the way back among them"
    context = prompt_tokens + output_tokens / 2
    chunks, tokens = chunks_of(prompt_tokens, chunk_tokens)
    chunk = prefill(model, stages, hops, tokens, prompt_tokens / 2)
    steps = tuple(decode_time(model, stage, 1, context) for stage in stages)
    step_hops = decode_hops(model, stages, hops, 1)
    house = [decode_time(model, stage, concurrency, context).seconds for stage in stages]
    around = fsum([*house, *decode_hops(model, stages, hops, concurrency)])
    return Prediction(
        # The first token comes out of a step of its own. It follows the last chunk through the stages, so part of it
        # may overlap; it is counted in full.
        ttft_seconds=chunk.through_seconds
        + (chunks - 1) * chunk.bottleneck_seconds
        + fsum([*(step.seconds for step in steps), *step_hops]),
        tokens_per_second=tokens_per_second(model, stages, hops, concurrency, context),
        house_seconds=chunk.through_seconds
        + (concurrency * chunks - 1) * chunk.bottleneck_seconds
        + output_tokens * around,
        output_tokens=output_tokens,
        concurrency=concurrency,
        stages=steps,
        chunk_seconds=chunk.stages,
        hop_seconds=step_hops,
        chunk_hop_seconds=chunk.hops,
    )


# --- 10: warm -----------------------------------------------------------------------------------


def worth_moving(now_seconds: float, then_seconds: float) -> bool:
    """Whether a running placement should give way to one whose objective is `then_seconds`."""
    return now_seconds - then_seconds > HYSTERESIS * now_seconds


def _power(base: float, exponent: int) -> float:
    """`base ** exponent` by squaring: libm's `pow` differs in its last bit between platforms."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
