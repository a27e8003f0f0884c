"""A GGUF file becomes a plain mlx-lm directory, without loss.

GGUF's simple quantisations are MLX's affine one under another name: a block of 32 weights with a scale
(and, in Q4_1, a minimum), `w = scale × q + bias`. So Q4_0, Q4_1 and Q8_0 keep every bit; scales become
float32, in which a CPU computes them fastest. Nothing is quantised again: 4-bit weights of a small model
re-quantised in groups of 64 agree with the original on half of the next tokens only.

What is particular to GGUF: tensors have other names, and the rows of the query and key projections are
interleaved for its own rotary embedding; undoing that moves whole rows, so packed weights are fine.
The tokenizer is rebuilt from the vocabulary and merges in the metadata.

Before MLX's reader sees the file, its header is read here and every number is checked.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.base.files import sync

SUPPORTED_ARCHITECTURES = ("llama",)

# type number: (name, values per block, bytes per block)
_TENSOR_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}  # fmt: skip
"""GGUF names how text is cut before merging; only those that we have compared with the original are here."""

_NAMES = (
    (re.compile(r"token_embd\.(.+)"), r"model.embed_tokens.\1"),
    (re.compile(r"output_norm\.(.+)"), r"model.norm.\1"),
    (re.compile(r"output\.(.+)"), r"lm_head.\1"),
    (re.compile(r"blk\.(\d+)\.attn_norm\.(.+)"), r"model.layers.\1.input_layernorm.\2"),
    (re.compile(r"blk\.(\d+)\.ffn_norm\.(.+)"), r"model.layers.\1.post_attention_layernorm.\2"),
    (re.compile(r"blk\.(\d+)\.attn_([qkv])\.(.+)"), r"model.layers.\1.self_attn.\2_proj.\3"),
    (re.compile(r"blk\.(\d+)\.attn_output\.(.+)"), r"model.layers.\1.self_attn.o_proj.\2"),
    (re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(.+)"), r"model.layers.\1.mlp.\2_proj.\3"),
)
_GROUP = 32

_MAX_COUNT = 2**24
"""Entries of one metadata array: four times the largest vocabulary's merges."""
_MAX_TEXT_BYTES = 2**24
_SPECIAL_TOKEN = 3
_USER_TOKEN = 4


def convert_gguf(source: Path, target: Path) -> None:
    """Write the model in `source` as an mlx-lm directory into `target`, an empty directory of the caller's.

    All files are on disk (fsync) when it returns; if it raises, the caller removes `target`.

    Raises:
        BadInput: an architecture, quantisation or tokenizer that is not supported; it is named.
        CorruptModel: not a GGUF file, or one that is cut short.
    """
    header = read_header(source)
    _check_supported(source, header)
    tokenizer = _tokenizer(header.metadata)
    loaded: Any = mx.load(str(source), format="gguf")
    weights = _weights(cast("dict[str, mx.array]", loaded), header.metadata)
    quantization = _quantization(weights)
    config = _config(header.metadata, weights, quantization)
    tensors = target / "model.safetensors"
    mx.save_safetensors(str(tensors), weights, metadata={"format": "mlx"})
    sync(tensors)
    index = {
        "metadata": {"total_size": sum(array.nbytes for array in weights.values())},
        "weight_map": dict.fromkeys(sorted(weights), tensors.name),
    }
    _write(target / "model.safetensors.index.json", json.dumps(index, indent=1))
    _write(target / "tokenizer.json", tokenizer.to_str())
    _write(target / "tokenizer_config.json", json.dumps(_tokenizer_config(header.metadata), indent=2))
    _write(target / "generation_config.json", json.dumps(_generation_config(header.metadata), indent=2))
    # The config comes last: a directory without one is no model.
    _write(target / "config.json", json.dumps(config, indent=2))
    sync(target)


# --- the file -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says before its data."""

    metadata: Mapping[str, Any]
    tensor_types: Mapping[str, int]


def read_header(source: Path) -> GgufHeader:
    """The header of the GGUF file `source`, each tensor checked to lie inside the file.

    Raises:
        CorruptModel: not GGUF, or cut short.
    """
    size = source.stat().st_size
    with source.open("rb") as file:
        reader = _Reader(file, source, size)
        if reader.take(4) != b"GGUF" or (version := reader.number("<I")) not in (2, 3):
            raise CorruptModel(f"{source} is not a GGUF file of version 2 or 3", expected="a whole GGUF file")
        del version
        tensor_count, entry_count = reader.count(), reader.count()
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = reader.text()
            metadata[key] = reader.value(reader.number("<I"))
        types: dict[str, int] = {}
        spans: list[tuple[str, int, int]] = []
        for _ in range(tensor_count):
            name = reader.text()
            elements = 1
            for _ in range(reader.number("<I", at_most=8)):
                elements *= reader.number("<Q", at_most=2**40)
            types[name] = reader.number("<I")
            _, per_block, block_bytes = _TENSOR_TYPES.get(types[name], ("", 1, 0))
            spans.append((name, reader.number("<Q"), -(-elements // per_block) * block_bytes))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise CorruptModel(f"{source} has an alignment of {alignment!r}", expected="a small number")
        data = -(-file.tell() // alignment) * alignment
    for name, offset, length in spans:
        if data + offset + length > size:
            raise CorruptModel(
                f"{source} is cut short: tensor {name!r} ends at byte {data + offset + length} of {size}",
                expected="a whole GGUF file",
                do="fetch it again",
            )
    return GgufHeader(metadata, types)


_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


class _Reader:
    """Numbers and texts of a GGUF header; every length is bounded by the file before it is believed."""

    def __init__(self, file: BinaryIO, source: Path, size: int) -> None:
        self._file, self._source, self._size = file, source, size

    def take(self, length: int) -> bytes:
        data = self._file.read(length) if length <= self._size else b""
        if len(data) != length:
            raise CorruptModel(f"{self._source} ends inside its header", expected="a whole GGUF file")
        return data

    def number(self, code: str, at_most: int = 2**63) -> int:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        if value > at_most:
            raise CorruptModel(f"{self._source} has a {value} in its header", expected=f"at most {at_most}")
        return value

    def count(self) -> int:
        return self.number("<Q", at_most=_MAX_COUNT)

    def text(self) -> str:
        return self.take(self.number("<Q", at_most=_MAX_TEXT_BYTES)).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9 and depth < 4:
            item, length = self.number("<I"), self.count()
            if item in _SCALARS:
                code = _SCALARS[item]
                data = self.take(length * struct.calcsize(code))
                return list(struct.unpack(f"<{length}{code[1]}", data))
            return [self.value(item, depth + 1) for _ in range(length)]
        if kind not in _SCALARS:
            raise CorruptModel(f"{self._source} has metadata of an unknown type {kind}", expected="a GGUF file")
        return self.number(_SCALARS[kind])


def _check_supported(source: Path, header: GgufHeader) -> None:
    architecture = header.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise BadInput(
            f"{source.name} is of the architecture {str(architecture)[:80]!r}",
            expected=f"one of {', '.join(SUPPORTED_ARCHITECTURES)}",
            do="take the model as an mlx-lm or Hugging Face directory instead",
        )
    for name, kind in header.tensor_types.items():
        if kind not in _TENSOR_TYPES:
            raise BadInput(
                f"{source.name} holds {name!r} as {_OTHER_TYPES.get(kind, f'type {kind}')}",
                expected=f"only {', '.join(name for name, _, _ in _TENSOR_TYPES.values())}",
                do="take a file with one of these quantisations",
            )
        _renamed(name)


# --- tensors --------------------------------------------------------------------------------------


def _weights(loaded: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> dict[str, mx.array]:
    heads = _integer(metadata, "llama.attention.head_count")
    kv_heads = _integer(metadata, "llama.attention.head_count_kv", heads)
    weights: dict[str, mx.array] = {}
    for gguf_name, loaded_array in loaded.items():
        name = _renamed(gguf_name)
        array = loaded_array
        if ".q_proj." in name or ".k_proj." in name:
            array = _uninterleaved(array, heads if ".q_proj." in name else kv_heads)
        if name.endswith((".scales", ".biases")):
            array = array.astype(mx.float32)
        weights[name] = array
    return weights


def _renamed(gguf_name: str) -> str:
    for pattern, replacement in _NAMES:
        if match := pattern.fullmatch(gguf_name):
            return match.expand(replacement)
    raise BadInput(f"a tensor {gguf_name[:80]!r}", expected="the tensors of a plain llama model")


def _uninterleaved(array: mx.array, heads: int) -> mx.array:
    """Undo GGUF's row order of q and k, in which the two halves of each head alternate."""
    rows, rest = array.shape[0], array.shape[1:]
    if heads < 1 or rows % (2 * heads):
        raise CorruptModel(f"{rows} rows of attention for {heads} heads", expected="an even number for each head")
    return mx.contiguous(array.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest))


def _quantization(weights: Mapping[str, mx.array]) -> dict[str, dict[str, Any]]:
    """Module path → how it is packed."""
    packed: dict[str, dict[str, Any]] = {}
    for name in weights:
        if name.endswith(".scales"):
            path = name.removesuffix(".scales")
            inputs = weights[name].shape[-1] * _GROUP
            bits = weights[f"{path}.weight"].shape[-1] * 32 // inputs
            packed[path] = {"group_size": _GROUP, "bits": bits, "mode": "affine"}
    return packed


def _config(
    metadata: Mapping[str, Any], weights: Mapping[str, mx.array], packed: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    heads = _integer(metadata, "llama.attention.head_count")
    hidden = _integer(metadata, "llama.embedding_length")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise BadInput(f"rotary scaling of type {str(scaling)[:40]!r}", expected="none")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv", heads),
        "head_dim": _integer(metadata, "llama.rope.dimension_count", hidden // heads),
        # A float32 in the file: 9.999999747e-06 was written as 1e-5.
        "rms_norm_eps": round(float(metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-5)), 10),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if packed:
        (bits, _), *_ = Counter(entry["bits"] for entry in packed.values()).most_common(1)
        usual = {"group_size": _GROUP, "bits": bits, "mode": "affine"}
        config["quantization"] = usual | {path: entry for path, entry in packed.items() if entry != usual}
    return config


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise CorruptModel(f"the metadata has {key} = {str(value)[:40]!r}", expected="a positive number")
    return value


# --- the tokenizer --------------------------------------------------------------------------------


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in _PRE_TOKENIZERS:
        raise BadInput(
            f"a tokenizer of type {str(kind)[:40]!r} with the pre-tokenizer {str(cut)[:40]!r}",
            expected=f"type 'gpt2' with one of {', '.join(_PRE_TOKENIZERS)}",
            do="take the model as an mlx-lm or Hugging Face directory instead",
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise CorruptModel("the metadata has no vocabulary or no merges", expected="lists of texts")
    texts, pairs = cast("list[str]", tokens), [tuple(str(pair).split(" ", 1)) for pair in cast("list[str]", merges)]
    vocabulary = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=cast("list[tuple[str, str]]", pairs), fuse_unk=False))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[cut]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _special(metadata)])
    return tokenizer


def _special(metadata: Mapping[str, Any]) -> list[str]:
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    return [
        text
        for text, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False)
        if kind in (_SPECIAL_TOKEN, _USER_TOKEN)
    ]


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(name: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _integer(metadata, "llama.context_length"),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "additional_special_tokens": _special(metadata),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos", "eos")
    return {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}


# --- writing --------------------------------------------------------------------------------------


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
