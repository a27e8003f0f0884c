"""From files to a seat: only what the seat needs becomes resident, and bad files are named before MLX sees them."""

from __future__ import annotations

import gc
import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from tiny_models import CONFIGS, VOCABULARY, make_model, write_model

from meshinfer.base.errors import CorruptModel
from meshinfer.engine.loader import load_seat, open_model, parameters_of
from meshinfer.engine.structure import NotSplittable
from meshinfer.engine.unpacking import UNPACK_FROM_ROWS, unpack_for_many_rows
from meshinfer.models import tensors
from meshinfer.models.filenames import WEIGHTS_INDEX

FILES = 3
SLACK_BYTES = 4096
"""Rotary tables and the like."""


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", files=FILES)
    gc.collect()
    mx.clear_cache()
    return tmp_path / "model"


def float32_bytes(module: nn.Module) -> int:
    flat: Any = tree_flatten(module.parameters())
    return sum(array.size * 4 for _, array in flat)


def logits_of(directory: Path, bounds: list[tuple[int, int]], tokens: mx.array) -> mx.array:
    carried: Any = None
    for start, end in bounds:
        stage = load_seat(directory, start, end, computes_float32=True).stage
        carried = stage(tokens, carried, stage.make_cache())
        mx.eval(carried)
    return carried


def test_opening_a_model_reads_no_tensor(model_directory: Path) -> None:
    before = mx.get_active_memory()
    open_model(model_directory)
    assert mx.get_active_memory() - before <= SLACK_BYTES


@pytest.mark.parametrize("bounds", [(0, 2), (2, 3), (1, 4), (3, 5), (0, 5)])
def test_a_seat_holds_its_layers_bytes_only(model_directory: Path, bounds: tuple[int, int]) -> None:
    whole = make_model("llama")
    start, end = bounds
    expected = sum(float32_bytes(layer) for layer in whole.layers[start:end])
    expected += float32_bytes(whole.model.embed_tokens) if start == 0 else 0
    expected += float32_bytes(whole.model.norm) + float32_bytes(whole.lm_head) if end == 5 else 0
    del whole
    gc.collect()
    before = mx.get_active_memory()
    seat = load_seat(model_directory, start, end, computes_float32=True)
    assert seat.weight_bytes == expected
    assert expected <= mx.get_active_memory() - before <= expected + SLACK_BYTES
    assert seat.vocab_size == VOCABULARY
    # A step more reads nothing more.
    stage, active = seat.stage, mx.get_active_memory()
    carried = [mx.zeros(spec.shape) for spec in stage.carried_shapes(1, 3)]
    mx.eval(stage(mx.zeros((1, 3), mx.int32), carried, stage.make_cache()))
    mx.clear_cache()
    assert mx.get_active_memory() <= active + SLACK_BYTES


def test_a_last_seat_of_a_tied_model_holds_the_embedding(tmp_path: Path) -> None:
    write_model(tmp_path, "llama-tied")
    whole = make_model("llama-tied")
    seat = load_seat(tmp_path, 3, 5, computes_float32=True)
    inner = whole.model
    assert seat.weight_bytes == sum(map(float32_bytes, [*whole.layers[3:], inner.norm, inner.embed_tokens]))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_loads_in_seats_that_give_the_whole(name: str, tmp_path: Path) -> None:
    whole = write_model(tmp_path, name, dtype=mx.float32)
    count = len(whole.layers)
    seat = load_seat(tmp_path, 0, None, computes_float32=True)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    cuts = seat.stage.structure.cut_points
    bounds = [(0, cuts[0]), (cuts[0], count)] if cuts else [(0, count)]
    split = logits_of(tmp_path, bounds, tokens)
    assert mx.array_equal(split, seat.stage(tokens, None, seat.stage.make_cache())).item()


def test_floats_are_float32_where_it_is_asked_for_and_stay_where_not(model_directory: Path) -> None:
    for wide, dtype in ((True, mx.float32), (False, mx.bfloat16)):
        seat = load_seat(model_directory, 1, 3, computes_float32=wide)
        dtypes = {array.dtype for layer in seat.stage.model.layers[1:3] for array in parameters_of(layer).values()}
        assert dtypes == {dtype}
        assert seat.stage.carried_shapes(1, 1)[0].dtype == str(dtype).removeprefix("mlx.core.")


def test_quantisation_scales_become_float32_too(tmp_path: Path) -> None:
    quantization = {"group_size": 32, "bits": 4}
    write_model(tmp_path, "llama", quantization=quantization, tie_word_embeddings=False)
    seat = load_seat(tmp_path, 1, 3, computes_float32=True)
    projection = seat.stage.model.layers[1].self_attn.q_proj
    assert isinstance(projection, nn.QuantizedLinear)
    assert (projection.weight.dtype, projection.scales.dtype) == (mx.uint32, mx.float32)


def test_progress_rises_to_the_total(model_directory: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    seat = load_seat(model_directory, 1, 4, computes_float32=True, progress=lambda *said: seen.append(said))
    assert seen[0][0] == 0
    assert seen[-1] == (seat.weight_bytes, seat.weight_bytes, 0)
    for (done, _, following), (then, _, _) in pairwise(seen):
        assert then == done + following > done, "it says how much is read next"
    assert len(seen) == 4, "at the start and after each of three layers"


# --- files that are bad ---------------------------------------------------------------------------


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_by_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def append_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def no_header(path: Path) -> None:
    path.write_bytes(b"\x01\x02")


def endless_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def not_json(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"!" + data[9:])


def change_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return apply


def first_of(header: dict[str, Any]) -> dict[str, Any]:
    return min(header.values(), key=lambda entry: entry["data_offsets"])


BREAKAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut in half": (cut_in_half, "cut short"),
    "cut by a byte": (cut_by_a_byte, "cut short"),
    "a byte more": (append_a_byte, "bytes of data"),
    "two bytes long": (no_header, "header alone"),
    "endless header": (endless_header, "header alone"),
    "header is not JSON": (not_json, "unreadable header"),
    "offset beyond the file": (
        change_header(lambda h: first_of(h)["data_offsets"].__setitem__(1, 10**15)),
        "bytes for",
    ),
    "negative offset": (change_header(lambda h: first_of(h)["data_offsets"].__setitem__(0, -8)), "described by"),
    "shape is too large": (change_header(lambda h: first_of(h)["shape"].__setitem__(0, 10**9)), "bytes for"),
    "shape is not numbers": (change_header(lambda h: first_of(h).__setitem__("shape", ["a"])), "described by"),
    "unknown type": (change_header(lambda h: first_of(h).__setitem__("dtype", "F3")), "described by"),
    "tensor is a text": (change_header(lambda h: h.__setitem__("x", "y")), "described by"),
    "tensors overlap": (change_header(lambda h: h.__setitem__("x", dict(first_of(h)))), "overlap"),
    "gap": (change_header(lambda h: h.pop(next(n for n, e in h.items() if e is first_of(h)))), "gap at byte 0"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_file_is_named_before_mlx_reads_it(breakage: str, model_directory: Path) -> None:
    file = model_directory / f"model-00002-of-{FILES:05}.safetensors"
    damage, reason = BREAKAGES[breakage]
    damage(file)
    with pytest.raises(CorruptModel, match=reason) as caught:
        load_seat(model_directory, 0, None, computes_float32=True)
    assert file.name in caught.value.what


@pytest.mark.parametrize("dtype", [*tensors._BYTES, "F64", "F8_E5M2", "F4"])
def test_the_store_takes_exactly_what_mlx_reads(dtype: str, tmp_path: Path) -> None:
    size = tensors._BYTES.get(dtype, 8)
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    if dtype in tensors._BYTES:
        assert [tensor.dtype for tensor in tensors.read_tensor_headers(path)] == [dtype]
        assert mx.load(str(path))["a"].nbytes == size
    else:
        with pytest.raises(CorruptModel, match="described by"):
            tensors.read_tensor_headers(path)
        with pytest.raises(RuntimeError):
            mx.load(str(path))


def test_a_missing_file_is_named(model_directory: Path) -> None:
    (model_directory / f"model-00001-of-{FILES:05}.safetensors").unlink()
    with pytest.raises(CorruptModel, match=f"model-00001-of-{FILES:05}.safetensors is missing"):
        load_seat(model_directory, 0, None, computes_float32=True)


def test_a_tensor_that_the_index_promises_must_be_there(model_directory: Path) -> None:
    index = json.loads((model_directory / WEIGHTS_INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = f"model-00001-of-{FILES:05}.safetensors"
    (model_directory / WEIGHTS_INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptModel, match=r"lacks the tensor 'model.extra.weight'"):
        open_model(model_directory)


def test_an_empty_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match=r"config.json is missing"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CorruptModel, match="holds no tensors"):
        open_model(tmp_path)


@pytest.mark.parametrize("kind", ["no_such_model", "cache", "../llama", "base", "", 7, None])
def test_an_unknown_model_type_is_named(model_directory: Path, kind: Any) -> None:
    change_config(model_directory, model_type=kind)
    with pytest.raises(CorruptModel, match="names the model type"):
        open_model(model_directory)


def test_code_from_a_model_is_never_run(model_directory: Path) -> None:
    (model_directory / "evil.py").write_text("raise SystemExit('it ran')")
    change_config(model_directory, model_file="evil.py")
    with pytest.raises(CorruptModel, match="its own code"):
        open_model(model_directory)


@pytest.mark.parametrize(
    "settings",
    [{"num_hidden_layers": 9}, {"num_hidden_layers": 2}, {"hidden_size": 40}, {"num_attention_heads": 0},
     {"intermediate_size": "wide"}],
)  # fmt: skip
def test_a_config_that_does_not_fit_its_tensors_is_reported(model_directory: Path, settings: dict[str, Any]) -> None:
    change_config(model_directory, **settings)
    with pytest.raises(CorruptModel, match="cannot be built"):
        load_seat(model_directory, 0, None, computes_float32=True)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_reported(model_directory: Path, text: str) -> None:
    (model_directory / "config.json").write_text(text)
    with pytest.raises(CorruptModel, match=r"config.json is not"):
        open_model(model_directory)


def test_a_range_that_cannot_be_is_refused(model_directory: Path) -> None:
    with pytest.raises(NotSplittable):
        load_seat(model_directory, 2, 9, computes_float32=True)


def change_config(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


# --- unpacking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_unpacked_products_are_the_packed_ones(bits: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshinfer.engine.unpacking._BLOCK_ELEMENTS", 64 * 20)
    mx.random.seed(1)
    linear = nn.Linear(64, 50, bias=bias).to_quantized(group_size=32, bits=bits)
    holder = nn.Sequential(linear)
    rows = mx.random.normal((2, 5, 64))
    packed, packed_row = linear(rows), linear(rows[:1, :1])
    unpack_for_many_rows(holder)
    assert rows.size // 64 >= UNPACK_FROM_ROWS
    assert mx.allclose(linear(rows), packed, atol=1e-5).item()
    assert mx.array_equal(linear(rows[:1, :1]), packed_row).item(), "few rows stay with the packed kernel"
