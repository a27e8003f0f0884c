"""Cards with sensible defaults, for tests and phantoms that care about two fields and not about twenty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshinfer.base.ids import ModelId, NodeId
from meshinfer.base.units import GIB, MIB
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes
from meshinfer.topology.card import HeldModel, NodeCard

MODEL_ID = ModelId("phantom/model")
MODEL_DIGEST = "c0ffee" * 8


def node_card(
    name: str,
    free_bytes: int = 8 * GIB,
    *,
    holds: Iterable[tuple[ModelId, str]] = ((MODEL_ID, MODEL_DIGEST),),
    **more: Any,
) -> NodeCard:
    """A node called `name`, which is its id too; `more` are fields of the card."""
    card = NodeCard(
        node_id=NodeId(name),
        incarnation=1,
        version=1,
        name=name,
        agent_version="0",
        addresses=("192.0.2.1:4001",),
        api_url="",
        platform="phantom",
        accelerator="phantom",
        cpu_cores=8,
        memory_total_bytes=free_bytes * 2,
        memory_usable_bytes=free_bytes,
        memory_promised_bytes=0,
        runner_overhead_bytes=0,
        computes_float32=False,
        load=0.0,
        models=tuple(HeldModel(model_id, digest, 1) for model_id, digest in holds),
    )
    return replace(card, **more)


def model_card(
    layer_bytes: Sequence[int] = (MIB,) * 8,
    *,
    kv_elements_per_token: int = 0,
    cut_points: Sequence[int] | None = None,
    embedding_bytes: int = 0,
    head_bytes: int = 0,
    **more: Any,
) -> ModelCard:
    """A model of quantised layers that may be cut anywhere unless said otherwise; `more` are fields of the card."""
    card = ModelCard(
        model_id=MODEL_ID,
        digest=MODEL_DIGEST,
        model_type="phantom",
        hidden_size=64,
        vocab_size=1000,
        max_context_tokens=131_072,
        layers=tuple(LayerCard(TensorBytes(size), kv_elements_per_token) for size in layer_bytes),
        cut_points=tuple(range(1, len(layer_bytes)) if cut_points is None else cut_points),
        embedding=TensorBytes(embedding_bytes),
        head=TensorBytes(head_bytes),
        tied_embeddings=False,
        activation_elements_per_token=64,
        float_bytes_per_element=2,
        intermediate_size=256,
        attention_heads=4,
    )
    return replace(card, **more)
