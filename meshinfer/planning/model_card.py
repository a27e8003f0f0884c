"""Sizes and costs of a model, read once from its file headers and config.

Real bytes per layer, never an average: embeddings, head, MoE and hybrid layers differ. Float and
packed (quantised) bytes stand apart, because an engine that computes in fp32 (CPU) keeps float
parameters at four bytes whatever the file says, while packed ones stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import between, sized
from meshinfer.base.wire_ids import WireModelId

Count = Annotated[int, between(0, 2**53)]


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of a group of tensors, by how the engine treats them."""

    packed_bytes: Count = 0
    """Quantised weights and integer tensors: the same in file and memory."""
    float_elements: Count = 0
    float_bytes: Count = 0
    """Of the float elements, as stored."""

    def resident(self, computes_float32: bool) -> int:
        """Bytes in memory on a node of that kind."""
        return self.packed_bytes + (4 * self.float_elements if computes_float32 else self.float_bytes)


@dataclass(frozen=True, slots=True)
class LayerCard:
    """One layer: its weights, and the cache that a session needs in it."""

    weights: TensorBytes
    kv_elements_per_token: Count
    """Cache elements that grow with each token (0 for pure state-space layers)."""
    kv_tokens_limit: Count = 0
    """Sliding window: the cache stops growing there; 0 for no limit."""
    state_elements: Count = 0
    """Cache elements of fixed size per session (convolution and state-space state)."""
    flops_per_token: Count = 0
    """Two per weight that a token visits, and what a state-space scan takes; 0: not known."""
    attention_flops_per_pair: Count = 0
    """Per token and token of its context: two per query head and element of a key, and of a value."""
    experts: Annotated[int, between(0, 65_536)] = 0
    """Of a mixture; 0: none."""
    experts_per_token: Annotated[int, between(0, 65_536)] = 0
    expert: TensorBytes = TensorBytes()
    """One of them; all of them are part of `weights`."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """All that a planner needs to know of a model."""

    model_id: WireModelId
    digest: Annotated[str, sized(1, 128)]
    """Of the config and every tensor's bytes: equal digests run together, others never."""
    model_type: Annotated[str, sized(1, 64)]
    hidden_size: Count
    vocab_size: Count
    max_context_tokens: Count
    layers: Annotated[tuple[LayerCard, ...], sized(1, 1024)]
    cut_points: Annotated[tuple[Count, ...], sized(0, 1024)]
    """Layers before which the model may be cut, learnt from its own forward; ascending, in (0, layer_count)."""
    embedding: TensorBytes
    """What the first stage holds beside its layers."""
    head: TensorBytes
    """What the last stage holds beside its layers: final norm, and output weights unless they are tied."""
    tied_embeddings: bool
    """The last stage needs the embedding too, as its output weights."""
    activation_elements_per_token: Count
    """What crosses a cut, per token: hidden_size × the tensors carried."""
    float_bytes_per_element: Annotated[int, between(1, 8)]
    """Of activations and caches on a node that keeps the file's float type."""
    intermediate_size: Count = 0
    """Width that one token has inside the widest MLP (for MoE: over all experts that it visits); 0: not known."""
    attention_heads: Count = 0
    """Query heads; 0: not known."""
    every_stage: TensorBytes = TensorBytes()
    """What every stage holds beside its layers: embeddings that are fed into each layer (gemma3n), nothing for most."""

    weight_kind: Annotated[str, sized(0, 32)] = ""
    """How most bytes of the layers are stored: `float32`, `bfloat16`, `q4g64` (4 bits in groups of 64), `mxfp4`, …"""
    head_kind: Annotated[str, sized(0, 32)] = ""
    """The same of the output weights, which many conversions pack less tightly than the layers."""
    head_flops_per_token: Count = 0
    """Two per output weight; 0: not known."""
    embedding_row: TensorBytes = TensorBytes()
    """What the first stage looks up for one token."""
    tensor_degrees: Annotated[tuple[Annotated[int, between(2, 64)], ...], sized(0, 63)] = ()
    """Ranks into which its heads and widths divide, ascending; empty where its layers cannot be sharded."""

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    def weight_bytes(self, start: int, end: int, computes_float32: bool) -> int:
        """Resident weights of a seat that holds layers `[start, end)`, with embedding and head where they live."""
        total = sum(layer.weights.resident(computes_float32) for layer in self.layers[start:end])
        total += self.every_stage.resident(computes_float32)
        first, last = start == 0, end == self.layer_count
        if first or (last and self.tied_embeddings):
            total += self.embedding.resident(computes_float32)
        return total + (self.head.resident(computes_float32) if last else 0)

    def cache_bytes(self, start: int, end: int, context_tokens: int, sessions: int, computes_float32: bool) -> int:
        """Caches of layers `[start, end)` for `sessions` full contexts."""
        tokens = -(-context_tokens // CACHE_BLOCK_TOKENS) * CACHE_BLOCK_TOKENS
        elements = 0
        for layer in self.layers[start:end]:
            grown = min(tokens, layer.kv_tokens_limit) if layer.kv_tokens_limit else tokens
            elements += layer.kv_elements_per_token * grown + layer.state_elements
        return elements * sessions * (4 if computes_float32 else self.float_bytes_per_element)


# mlx-lm's KV cache grows in steps of 256 tokens (`KVCache.step`), so a context is rounded up to that.
CACHE_BLOCK_TOKENS = 256
