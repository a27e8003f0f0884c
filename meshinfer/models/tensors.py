"""What a model's safetensors files say of themselves, read without any tensor library.

The format: eight bytes with the length of a JSON header (little endian), the header, then the
tensors' bytes. The header gives each tensor's dtype, shape and half-open byte range. The file is
sound exactly when the ranges fit dtype and shape, cover the data without hole or overlap, and end
where the file ends; so a truncated download is found by reading a few kilobytes of a file of many
gigabytes. A flipped bit inside a tensor is not: that is what the digests of the manifest are for.

The store asks before it takes a model in; the engine asks again before MLX, which believes every
header and would read past the end of a file that was cut short, maps a byte.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from meshinfer.base.errors import CorruptModel
from meshinfer.models.filenames import WEIGHTS_INDEX
from meshinfer.models.json_file import read_json

MAX_HEADER_BYTES = 100_000_000
"""The reference reader's own bound."""

# Exactly what MLX 0.32 reads; the format also has F64, F8_E5M2, and types of 4 and 6 bits.
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "C64": 8,
}  # fmt: skip
_MAX_AXES = 32
"""Models have up to 5; without a bound, the product of a header's worth of them takes hours."""
_AGAIN = "fetch this file again, or pull the model again"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes `[begin, end)` of the data that follows the header."""


def read_tensor_headers(path: Path) -> tuple[TensorHeader, ...]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        CorruptModel: truncated, too long, or not a safetensors file.
    """
    size, header = read_header(path)
    return check_header(str(path), size, header)


def read_header(path: Path) -> tuple[int, bytes]:
    """The file's size, and its JSON header as it stands there, not yet checked.

    Raises:
        CorruptModel: the file is shorter than that.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CorruptModel(
                f"{path} has {size} bytes, and its header alone would have {length}",
                expected="a whole safetensors file",
                do=_AGAIN,
            )
        return size, file.read(length)


def check_header(where: str, size: int, header: bytes) -> tuple[TensorHeader, ...]:
    """The tensors of a file of `size` bytes with this header, in the order of their bytes.

    Raises:
        CorruptModel: the header cannot be, or the file is not what it says.
    """
    try:
        entries: Any = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{where} has an unreadable header ({error})", expected="JSON", do=_AGAIN) from error
    if not isinstance(entries, dict):
        raise CorruptModel(f"{where} has an unreadable header", expected="a JSON object", do=_AGAIN)
    described = cast("dict[str, Any]", entries)
    tensors = sorted(
        (_tensor(where, name, entry) for name, entry in described.items() if name != "__metadata__"),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    available = size - 8 - len(header)
    position = 0
    for tensor in tensors:
        if tensor.end > available:
            raise CorruptModel(
                f"{where} is cut short: tensor {tensor.name[:120]!r} ends at byte {tensor.end} of its data, "
                f"which has {available}",
                expected=f"a file of at least {8 + len(header) + tensor.end} bytes, not {size}",
                do=_AGAIN,
            )
        if tensor.begin != position:
            raise CorruptModel(
                f"{where}: tensors overlap or leave a gap at byte {position} of its data",
                expected=f"tensor {tensor.name[:120]!r} there, not at byte {tensor.begin}",
                do=_AGAIN,
            )
        position = tensor.end
    if position != available:
        raise CorruptModel(f"{where} has {available} bytes of data", expected=f"{position}, by its header", do=_AGAIN)
    return tuple(tensors)


def check_index(directory: Path, files: Mapping[str, Collection[str]]) -> None:
    """See that every file and tensor that the model's index names is there; a model of one file needs no index.

    Args:
        directory: the model's.
        files: the names of the tensors in each file that is there.

    Raises:
        CorruptModel: one is not; it is named.
    """
    path = directory / WEIGHTS_INDEX
    if not path.is_file():
        return
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptModel(f"{path} has no weight_map", expected="a file's name for each tensor", do=_AGAIN)
    promised = [(str(name), tensor) for tensor, name in cast("dict[str, Any]", weight_map).items()]
    if missing := {name: tensor for name, tensor in promised if name not in files}:
        name, tensor = min(missing.items())
        raise CorruptModel(
            f"{directory / name[:128]} is missing (it holds {tensor[:120]!r}; {len(missing)} missing in all)",
            expected=f"every file that {WEIGHTS_INDEX} names",
            do="fetch the missing files, or pull the model again",
        )
    held = {name: frozenset(tensors) for name, tensors in files.items()}
    for name, tensor in promised:
        if tensor not in held[name]:
            raise CorruptModel(
                f"{directory / name} lacks the tensor {tensor[:120]!r} that {WEIGHTS_INDEX} promises", do=_AGAIN
            )


def _tensor(where: str, name: str, entry: Any) -> TensorHeader:
    match entry:
        case {"dtype": str() as dtype, "shape": list() as axes, "data_offsets": [begin, end]}:
            shape = tuple(cast("list[Any]", axes))
            if (
                dtype in _BYTES
                and len(shape) <= _MAX_AXES
                and all(type(axis) is int and 0 <= axis < 2**48 for axis in shape)
                # JSON's true is an int to Python.
                and all(type(offset) is int for offset in (begin, end))
                and 0 <= begin <= end < 2**62
            ):
                if end - begin == prod(shape) * _BYTES[dtype]:
                    return TensorHeader(name, dtype, shape, begin, end)
                raise CorruptModel(
                    f"{where}: tensor {name[:120]!r} has {end - begin} bytes for {dtype}{list(shape)}",
                    expected=f"{prod(shape) * _BYTES[dtype]}, by type and shape",
                    do=_AGAIN,
                )
        case _:
            pass
    raise CorruptModel(
        f"{where}: tensor {name[:120]!r} is described by {str(entry)[:120]}",
        expected="a type that MLX reads, a shape and a place",
        do=_AGAIN,
    )
