"""A GGUF file becomes an mlx-lm directory without loss; what is not supported is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_tokenizer

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.engine.gguf import convert_gguf, read_header
from meshinfer.engine.headers import checked_weight_files
from meshinfer.engine.loader import load_seat, parameters_of
from meshinfer.models.tensors import read_tensor_headers

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
Blocks = tuple[int, bytes]
"""(GGUF tensor type, its bytes)."""


class TinyGguf:
    """Writes GGUF by its specification: enough for one small llama."""

    def __init__(self) -> None:
        self.words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab", "Ġ"]
        size = len(self.words)
        self.metadata: dict[str, Any] = {
            "general.architecture": "llama",
            "llama.block_count": LAYERS,
            "llama.context_length": 128,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": 96,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            "llama.rope.dimension_count": HIDDEN // HEADS,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": self.words,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (size - 3),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        }
        kv = KV_HEADS * HIDDEN // HEADS
        shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (96, HIDDEN), "ffn_up": (96, HIDDEN)}
        shapes |= {"ffn_down": (HIDDEN, 96), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        self.shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (size, HIDDEN), "output_norm.weight": (HIDDEN,)}
        for layer in range(LAYERS):
            self.shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        mx.random.seed(4)
        self.values = {name: mx.random.normal(shape) * 0.1 for name, shape in self.shapes.items()}
        self.kinds: dict[str, Callable[[mx.array], tuple[Blocks, mx.array]]] = {}
        """How a tensor is stored; F32 unless said."""

    def write(self, path: Path) -> dict[str, mx.array]:
        """Write it; returns the values that the stored tensors stand for."""
        infos, data, stands_for = b"", b"", {}
        for name, shape in self.shapes.items():
            (kind, raw), stands_for[name] = self.kinds.get(name, float32)(self.values[name])
            dims = b"".join(struct.pack("<Q", n) for n in reversed(shape))
            infos += text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, len(data))
            data += raw + bytes(-len(raw) % 32)
        entries = b"".join(text(key) + value(item) for key, item in self.metadata.items())
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.shapes), len(self.metadata)) + entries + infos
        path.write_bytes(header + bytes(-len(header) % 32) + data)
        return stands_for


def text(content: str) -> bytes:
    raw = content.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    match item:
        case str():
            return struct.pack("<I", 8) + text(item)
        case float():
            return struct.pack("<If", 6, item)
        case int():
            return struct.pack("<II", 4, item)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
        case list():
            return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    raise AssertionError(item)


def float32(values: mx.array) -> tuple[Blocks, mx.array]:
    return (0, bytes(memoryview(values).cast("B"))), values


def float16(values: mx.array) -> tuple[Blocks, mx.array]:
    half = values.astype(mx.float16)
    return (1, bytes(memoryview(half).cast("B"))), half.astype(mx.float32)


def blocks_of(kind: int) -> Callable[[mx.array], tuple[Blocks, mx.array]]:
    """Q4_0, Q4_1 or Q8_0, in plain Python from llama.cpp's definition of the blocks."""

    def pack(values: mx.array) -> tuple[Blocks, mx.array]:
        raw, meant = b"", []
        for row in values.reshape(-1, 32).tolist():
            low, high = min(row), max(row)
            scale = {2: max(abs(low), abs(high)) / 7, 3: (high - low) / 15, 8: max(abs(low), abs(high)) / 127}[kind]
            (scale,) = struct.unpack("<e", struct.pack("<e", scale))
            (least,) = struct.unpack("<e", struct.pack("<e", low))
            offset = {2: -8 * scale, 3: least, 8: 0.0}[kind]
            top, bottom = {2: (15, 0), 3: (15, 0), 8: (127, -127)}[kind]
            codes = [min(top, max(bottom, round((x - offset) / scale))) for x in row]
            raw += struct.pack("<e", scale) + (struct.pack("<e", least) if kind == 3 else b"")
            raw += (
                struct.pack("<32b", *codes)
                if kind == 8
                else bytes(codes[i] | codes[i + 16] << 4 for i in range(16))  # the halves share the bytes
            )
            meant.append([scale * code + offset for code in codes])
        return (kind, raw), mx.array(meant).reshape(values.shape)

    return pack


def interleaved(rows: mx.array, heads: int) -> mx.array:
    """What llama.cpp's converter does to q and k (`LlamaModel.permute`)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def plain(path: Path) -> dict[str, mx.array]:
    """The converted model's parameters, unpacked."""
    model = load_seat(path, 0, None, computes_float32=True).stage.model
    parameters = parameters_of(model)
    for name in [name for name in parameters if name.endswith(".scales")]:
        base = name.removesuffix(".scales")
        packed, scales, biases = (parameters.pop(f"{base}.{part}") for part in ("weight", "scales", "biases"))
        bits = packed.shape[-1] * 32 // (scales.shape[-1] * 32)
        parameters[f"{base}.weight"] = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
    return parameters


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_supported_kind_keeps_every_value(kind: str, tmp_path: Path, target: Path) -> None:
    gguf = TinyGguf()
    store = {"F32": float32, "F16": float16, "Q4_0": blocks_of(2), "Q4_1": blocks_of(3), "Q8_0": blocks_of(8)}[kind]
    gguf.kinds = {name: store for name, shape in gguf.shapes.items() if len(shape) == 2}
    stored = gguf.write(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", target)
    found = plain(target)
    assert len(found) == len(stored)
    for layer in range(LAYERS):
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            rows = found[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            assert mx.array_equal(interleaved(rows, heads), stored[f"blk.{layer}.attn_{name}.weight"]).item()
        for theirs, ours in (
            ("attn_v", "self_attn.v_proj"),
            ("ffn_down", "mlp.down_proj"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            ours_array = found[f"model.layers.{layer}.{ours}.weight"]
            assert mx.array_equal(ours_array, stored[f"blk.{layer}.{theirs}.weight"]).item(), theirs
    assert mx.array_equal(found["model.embed_tokens.weight"], stored["token_embd.weight"]).item()


def test_mixed_kinds_are_told_in_the_config(tmp_path: Path, target: Path) -> None:
    gguf = TinyGguf()
    gguf.kinds = {name: blocks_of(3) for name, shape in gguf.shapes.items() if len(shape) == 2}
    gguf.kinds["token_embd.weight"] = blocks_of(8)
    gguf.write(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", target)
    quantization = json.loads((target / "config.json").read_text())["quantization"]
    assert quantization["bits"] == 4
    assert quantization["model.embed_tokens"]["bits"] == 8
    (file,) = checked_weight_files(target)
    assert {each.dtype for each in read_tensor_headers(file) if each.name.endswith((".scales", ".biases"))} == {"F32"}


def test_the_directory_is_whole(tmp_path: Path, target: Path) -> None:
    TinyGguf().write(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", target)
    assert {path.name for path in target.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    tokenizer = load_tokenizer(target)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"
    assert tokenizer.encode("abc", add_special_tokens=False) == [11, 5]
    assert tokenizer.decode([1, 11, 5, 2], skip_special_tokens=True) == "abc"
    assert tokenizer.eos_token_ids == {2}


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"general.architecture": "qwen2"}, "architecture 'qwen2'; expected one of llama"),
     ({"tokenizer.ggml.pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'; expected type 'gpt2' with one of smollm, gpt-2"),
     ({"tokenizer.ggml.model": "llama"}, "tokenizer of type 'llama'"),
     ({"llama.rope.scaling.type": "yarn"}, "rotary scaling of type 'yarn'")],
)  # fmt: skip
def test_what_is_not_supported_is_named(change: dict[str, Any], reason: str, tmp_path: Path, target: Path) -> None:
    gguf = TinyGguf()
    gguf.metadata |= change
    gguf.write(tmp_path / "tiny.gguf")
    with pytest.raises(BadInput, match=reason):
        convert_gguf(tmp_path / "tiny.gguf", target)
    assert not (target / "config.json").exists(), "half a model is none"


def test_a_quantisation_that_is_not_supported_is_named(tmp_path: Path, target: Path) -> None:
    gguf = TinyGguf()
    gguf.kinds["blk.0.attn_v.weight"] = lambda values: ((12, bytes(144 * values.size // 256)), values)
    gguf.write(tmp_path / "tiny.gguf")
    with pytest.raises(BadInput, match=r"'blk.0.attn_v.weight' as Q4_K; expected only F32, F16, Q4_0, Q4_1, Q8_0"):
        convert_gguf(tmp_path / "tiny.gguf", target)
    assert not list(target.iterdir())


def test_a_tensor_of_another_model_is_named(tmp_path: Path, target: Path) -> None:
    gguf = TinyGguf()
    gguf.shapes["blk.0.ffn_gate_inp.weight"] = (4, HIDDEN)
    gguf.values["blk.0.ffn_gate_inp.weight"] = mx.zeros((4, HIDDEN))
    gguf.write(tmp_path / "tiny.gguf")
    with pytest.raises(BadInput, match=r"tensor 'blk.0.ffn_gate_inp.weight'"):
        convert_gguf(tmp_path / "tiny.gguf", target)


def test_a_file_cut_anywhere_is_corrupt(tmp_path: Path, target: Path) -> None:
    TinyGguf().write(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    for length in {*range(0, len(data), 997), 3, 7, 30, len(data) - 33}:
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(CorruptModel):
            convert_gguf(tmp_path / "cut.gguf", target)
    assert not list(target.iterdir())


def test_counts_are_bounded_before_they_are_believed(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    for body in (
        struct.pack("<IQQ", 3, 2**60, 0),
        struct.pack("<IQQ", 3, 0, 2**60),
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60),
        struct.pack("<IQQ", 3, 0, 1) + text("x") + struct.pack("<IIQ", 9, 4, 2**60),
        struct.pack("<IQQ", 3, 0, 1) + text("x") + struct.pack("<IIQ", 9, 9, 1) * 50,
        struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 2**31),
        struct.pack("<IQQ", 9, 0, 0),
    ):
        path.write_bytes(b"GGUF" + body)
        with pytest.raises(CorruptModel):
            read_header(path)


# --- the real one ---------------------------------------------------------------------------------


def test_the_real_model_converts(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["tie_word_embeddings"]) == (30, 49152, True)
    tokenizer = load_tokenizer(smollm2)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert tokenizer.decode(prompt).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    for sample in ("2024 was 12345!", "naïve – 東京 🙂", "  two  spaces\n\n\tand a tab"):
        assert tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False)) == sample
