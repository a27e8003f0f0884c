"""Whether files are a model that can be run is told from names and headers, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.models.soundness import check_model, is_supported
from meshinfer.models.tensors import read_tensor_headers
from meshinfer.testing.tiny_model import SHAPES, safetensors_bytes, write_tiny_model

WHOLE = safetensors_bytes()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return path


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_the_tensors_of_a_sound_file(tmp_path: Path) -> None:
    tensors = read_tensor_headers(written(tmp_path, WHOLE))
    assert {tensor.name: tensor.shape for tensor in tensors} == SHAPES


@given(st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_corrupt(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = written(tmp_path_factory.getbasetemp(), WHOLE[:length])
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        read_tensor_headers(path)


@given(st.binary(max_size=200))
def test_garbage_is_corrupt_and_nothing_worse(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = written(tmp_path_factory.getbasetemp(), data)
    with pytest.raises(CorruptModel):
        read_tensor_headers(path)


@pytest.mark.parametrize(
    "data",
    [
        WHOLE + b"\0",
        with_header([]),
        with_header({"a": 1}),
        with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}),
        with_header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        with_header({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
        with_header({"a": {"dtype": "U8", "shape": [1] * 33, "data_offsets": [0, 1]}}, b"1"),
        with_header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, b"1"),
        with_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        with_header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"),
        with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        with_header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"1234"),
        (8).to_bytes(8, "little") + b"[" * 8,
        (2**63).to_bytes(8, "little"),
    ],
    ids=range(15),
)
def test_headers_that_cannot_be_are_corrupt(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorruptModel):
        read_tensor_headers(written(tmp_path, data))


def test_a_sound_directory(directory: Path) -> None:
    check_model(directory)


def test_pickled_weights_are_refused_by_name(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin.*can run code"):
        check_model(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "martian", "auto_map": {"AutoModel": "m.M"}}, "auto_map"),
        ({"model_type": "martian"}, "does not implement"),
        ({"model_type": "llama", "model_file": "mine.py"}, "mine.py"),
        ({"model_type": "../utils"}, "does not implement"),
        ({"model_type": ["llama"]}, "names no model_type"),
        ({}, "names no model_type"),
    ],
)
def test_a_model_that_needs_its_own_code_is_refused(directory: Path, config: dict[str, object], message: str) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=message):
        check_model(directory)


def test_remote_code_is_not_needed_where_mlx_lm_knows_the_type(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "m.M"}}))
    check_model(directory)


def test_model_types_are_looked_up_without_importing_the_engine() -> None:
    assert is_supported("llama")
    assert is_supported("qwen3")
    assert is_supported("mistral"), "by mlx-lm's table of types that another one's code serves"
    assert is_supported("lfm2-vl"), "a name that is no identifier"
    assert not is_supported("martian")
    assert not is_supported("cache"), "a file of mlx-lm's, but no architecture"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_needed_file_that_is_missing_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(BadInput, match=name.partition(".")[0]):
        check_model(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_broken_config_is_corrupt(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptModel, match=r"config\.json"):
        check_model(directory)


def test_a_shard_that_the_index_names_and_that_is_missing(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptModel, match="model-00002-of-00002"):
        check_model(directory)


def test_a_tensor_that_the_index_names_and_that_its_file_lacks(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(CorruptModel, match=r"model\.safetensors lacks the tensor 'a'"):
        check_model(directory)
