"""What a seat takes of its node: weights, caches, the peak of a prefill chunk, the runner itself.

`seat_memory` is the one place where this is counted. The planner uses it for what it proposes, and
a node that is asked for a lease uses it again with its own numbers, so neither has to trust the
other. `RangeNeeds` answers the same question for every range of one model in constant time, for
the searches; a property test holds the two equal.

The need of a range rises with its end and falls with its start: widening a seat never makes it
smaller. The searches stand on that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from meshinfer.planning.model_card import LayerCard, ModelCard
from meshinfer.planning.plan import SeatMemory
from meshinfer.topology.card import NodeCard
from meshinfer.topology.placement import Placement

PREFILL_CHUNK_TOKENS = 512
"""Unless the caller says otherwise; the default of `config.Settings`."""

PROMPTS_AT_ONCE = 4
"""Prompts that the head reads in one step, a chunk of each, so that a short one need not wait for a long one. Each
further one costs the activation peak of a chunk in every stage, and holds up the running sessions' next token."""

# A card that does not say: four times the hidden size covers Llama, Qwen and SmolLM (2.7 to 3.5), not Gemma (8);
# heads of 64 are the narrowest in common use, and narrow heads mean more of them.
ASSUMED_MLP_RATIO = 4
ASSUMED_HEAD_WIDTH = 64


def seat_memory(
    card: ModelCard, placement: Placement, seat_index: int, node: NodeCard, prefill_chunk_tokens: int
) -> SeatMemory:
    """What seat `seat_index` of `placement` takes of `node`, and what `node` has free.

    `free_bytes` is what the card says: a warm seat of an older epoch that is about to give its memory
    back is the caller's business, who alone knows whether it will be freed before or after.
    """
    seat = placement.seats[seat_index]
    wide = node.computes_float32
    weights = card.weight_bytes(seat.start, seat.end, wide)
    terms = (placement.context_tokens, placement.concurrency, wide, prefill_chunk_tokens)
    cache = cache_bytes(card, seat.start, seat.end, *terms)
    if seat.ranks > 1:
        # mlx-lm shards the layers and their caches; embedding, norms and head are whole on every rank.
        layers = [layer.weights.resident(wide) for layer in card.layers[seat.start : seat.end]]
        weights += _of_rank(layers, seat.ranks) - sum(layers)
        caches = (cache_bytes(card, layer, layer + 1, *terms) for layer in range(seat.start, seat.end))
        cache = _of_rank(caches, seat.ranks)
    return SeatMemory(
        node_id=node.node_id,
        weight_bytes=weights,
        cache_bytes=cache,
        activation_bytes=activation_bytes(
            card, placement.context_tokens, placement.concurrency, wide, prefill_chunk_tokens
        ),
        overhead_bytes=node.runner_overhead_bytes,
        free_bytes=node.memory_free_bytes,
    )


def cache_bytes(
    card: ModelCard,
    start: int,
    end: int,
    context_tokens: int,
    concurrency: int,
    computes_float32: bool,
    prefill_chunk_tokens: int,
) -> int:
    """Caches of layers `[start, end)` at their fullest, which is while prompts are read.

    A chunk stands beside the window in a sliding window's cache until the next step trims it (mlx-lm's
    `RotatingKVCache`): with a window of 128 tokens and chunks of 512, five times the window.
    """
    element = 4 if computes_float32 else card.float_bytes_per_element
    beside = sum(
        layer.kv_elements_per_token * max(0, min(prefill_chunk_tokens, context_tokens - layer.kv_tokens_limit))
        for layer in card.layers[start:end]
        if layer.kv_tokens_limit
    )
    full = card.cache_bytes(start, end, context_tokens, concurrency, computes_float32)
    return full + beside * min(PROMPTS_AT_ONCE, concurrency) * element


def _of_rank(layers: Iterable[int], ranks: int) -> int:
    return sum(-(-layer // ranks) for layer in layers)


def activation_bytes(
    card: ModelCard, context_tokens: int, concurrency: int, computes_float32: bool, prefill_chunk_tokens: int
) -> int:
    """Peak of one prefill step above weights and caches, the same in every stage: a chunk of PROMPTS_AT_ONCE prompts.

    Measured with Llama layers of width 576 to 1024 on the CPU engine, chunks of 256 and 512, contexts to 4096, one
    and four prompts: 32 to 104 MB above the step's own cache, and within 10 % of this sum:
    - 8 H + 4 I elements a token: residual stream, projections and MLP, inputs and outputs alive together;
    - the attention scores, heads × chunk × context, where no fused kernel keeps them in registers (CPU);
    - one layer's cache once more, because a cache grows by copying (`KVCache.step`).
    Decoding needs less. Logits do not count: only the last position's are computed, 4 V bytes a session.
    """
    element = 4 if computes_float32 else card.float_bytes_per_element
    chunk = min(prefill_chunk_tokens, context_tokens) * min(PROMPTS_AT_ONCE, concurrency)
    inner = card.intermediate_size or ASSUMED_MLP_RATIO * card.hidden_size
    heads = card.attention_heads or -(-card.hidden_size // ASSUMED_HEAD_WIDTH)
    stream = (8 * card.hidden_size + 4 * inner) * chunk * element
    scores = heads * chunk * context_tokens * element if computes_float32 else 0
    # Most layers of a model are alike, and often one object.
    unlike = {id(layer): index for index, layer in enumerate(card.layers)}
    growth = max(
        card.cache_bytes(index, index + 1, context_tokens, concurrency, computes_float32) for index in unlike.values()
    )
    logits = 4 * card.vocab_size * concurrency
    # 10 % for what the formula does not see (allocator rounding, norms, rotary tables): its worst miss was 8 %.
    return (stream + scores + growth + logits) * 11 // 10


@dataclass(frozen=True, slots=True)
class RangeNeeds:
    """What any layer range needs on nodes of one kind, all but the runner's own overhead."""

    layers: tuple[int, ...]
    """Bytes (weights and caches) of the layers before each position: `layer_count + 1` rising sums."""
    first_bytes: int
    last_bytes: int
    """What the last stage holds beside its layers, its copy of a tied embedding among it."""
    shared_bytes: int
    """Of `last_bytes`, what a stage that is first as well holds once only."""
    everywhere_bytes: int
    """What every stage holds beside its layers, and its activations."""

    @classmethod
    def of(
        cls,
        card: ModelCard,
        context_tokens: int,
        concurrency: int,
        computes_float32: bool,
        prefill_chunk_tokens: int,
        ranks: int = 1,
    ) -> RangeNeeds:
        """Of one of `ranks` ranks, whose activations are counted as if it had all heads to itself."""
        embedding = card.embedding.resident(computes_float32)
        tied = embedding if card.tied_embeddings else 0
        # Most layers of a model are alike.
        known: dict[LayerCard, int] = {}
        for index, layer in enumerate(card.layers):
            if layer not in known:
                cache = cache_bytes(
                    card, index, index + 1, context_tokens, concurrency, computes_float32, prefill_chunk_tokens
                )
                known[layer] = _of_rank((layer.weights.resident(computes_float32),), ranks) + _of_rank((cache,), ranks)
        per_layer = (known[layer] for layer in card.layers)
        return cls(
            layers=tuple(accumulate(per_layer, initial=0)),
            first_bytes=embedding,
            last_bytes=card.head.resident(computes_float32) + tied,
            shared_bytes=tied,
            everywhere_bytes=card.every_stage.resident(computes_float32)
            + activation_bytes(card, context_tokens, concurrency, computes_float32, prefill_chunk_tokens),
        )

    def need(self, start: int, end: int) -> int:
        """Bytes of a seat that holds layers `[start, end)`."""
        total = self.layers[end] - self.layers[start] + self.everywhere_bytes
        if start == 0:
            total += self.first_bytes
        if end == len(self.layers) - 1:
            total += self.last_bytes
            if start == 0:
                total -= self.shared_bytes
        return total


@dataclass(frozen=True, slots=True)
class Room:
    """A node as a place for one seat."""

    needs: RangeNeeds
    overhead_bytes: int
    free_bytes: int

    def need(self, start: int, end: int) -> int:
        return self.needs.need(start, end) + self.overhead_bytes

    def share(self, start: int, end: int) -> int:
        """The seat's need in parts of `FULL` of what is free, rounded up; integers, so that all nodes agree."""
        return -(-self.need(start, end) * FULL // max(1, self.free_bytes))

    def fits(self, start: int, end: int) -> bool:
        return self.need(start, end) <= self.free_bytes


FULL = 1 << 20
"""A share of one: the whole free memory."""
