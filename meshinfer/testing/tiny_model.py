"""A made-up model on disk, written without any tensor library: right in form, a few kilobytes.

For whatever moves, checks or lists models without running them. Its tensors are zeros and its card
is the smallest that is valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from meshinfer.base.ids import ModelId, digest_hex
from meshinfer.models.progress import Watch
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes

SHAPES: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.mlp.up_proj.weight": (32, 8),
    "model.layers.1.mlp.up_proj.weight": (32, 8),
}


def safetensors_bytes(shapes: Mapping[str, tuple[int, ...]] = SHAPES, fill: bytes = b"\0") -> bytes:
    """A sound safetensors file of float32 tensors, each byte `fill`."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + fill * end


def write_tiny_model(directory: Path, fill: bytes = b"\0") -> Path:
    """An mlx-lm directory of the form of a two-layer llama."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 16}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}}}))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory / "model.safetensors").write_bytes(safetensors_bytes(fill=fill))
    return directory


def describe_tiny(directory: Path, model_id: ModelId, watch: Watch) -> ModelCard:
    """The card of a tiny model, with a digest of its bytes: what the engine says of a real one."""
    watch(f"reading the layers of {model_id}")
    digest = digest_hex(*((directory / name).read_bytes() for name in ("config.json", "model.safetensors")))
    layer = LayerCard(TensorBytes(float_elements=256, float_bytes=1024), kv_elements_per_token=16)
    return ModelCard(
        model_id=model_id,
        digest=digest,
        model_type="llama",
        hidden_size=8,
        vocab_size=16,
        max_context_tokens=128,
        layers=(layer, layer),
        cut_points=(1,),
        embedding=TensorBytes(float_elements=128, float_bytes=512),
        head=TensorBytes(),
        tied_embeddings=True,
        activation_elements_per_token=8,
        float_bytes_per_element=4,
    )
