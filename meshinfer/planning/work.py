"""What a model asks of the nodes that run it: from its card to the terms of the cost model.

The same card is other work on another kind of engine: one that computes in float32 reads four bytes of
a float weight and sends four bytes of an activation, whatever the file says. What a card does not say is
taken to be more rather than less.
"""

from __future__ import annotations

from meshinfer.planning.cost import LayerWork, ModelWork
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes

ASSUMED_WEIGHTS_PER_PACKED_BYTE = 2
"""Of a card that does not say what a token's arithmetic is: 4 bits, the usual packing."""


def model_work(card: ModelCard, computes_float32: bool) -> ModelWork:
    """The work of `card` on engines of that kind; equal layers are one object."""
    element = 4 if computes_float32 else card.float_bytes_per_element
    layers = {layer: layer_work(layer, computes_float32, element) for layer in dict.fromkeys(card.layers)}
    output = card.embedding if card.tied_embeddings else card.head
    row = card.embedding_row.resident(computes_float32)
    return ModelWork(
        layers=tuple(layers[layer] for layer in card.layers),
        embedding_row_bytes=float(row or card.hidden_size * element),
        head_bytes=float(output.resident(computes_float32)),
        head_flops_per_token=float(card.head_flops_per_token or _flops(output)),
        activation_bytes_per_token=float((card.activation_elements_per_token or card.hidden_size) * element),
    )


def layer_work(layer: LayerCard, computes_float32: bool, element_bytes: int) -> LayerWork:
    """The work of one layer, whose caches have elements of `element_bytes`."""
    weights, expert = layer.weights.resident(computes_float32), layer.expert.resident(computes_float32)
    # A card from elsewhere may claim more experts than its layer has bytes.
    experts = layer.experts if expert and layer.experts * expert <= weights else 0
    return LayerWork(
        dense_bytes=float(weights - experts * expert),
        flops_per_token=float(layer.flops_per_token or _flops(layer.weights)),
        cache_bytes_per_token=float(layer.kv_elements_per_token * element_bytes),
        cache_tokens_limit=layer.kv_tokens_limit,
        state_bytes=float(layer.state_elements * element_bytes),
        attention_flops_per_pair=float(layer.attention_flops_per_pair),
        experts=experts,
        experts_per_token=min(layer.experts_per_token, experts),
        expert_bytes=float(expert),
    )


def _flops(weights: TensorBytes) -> int:
    return 2 * (ASSUMED_WEIGHTS_PER_PACKED_BYTE * weights.packed_bytes + weights.float_elements)
