"""What a safetensors file says of itself, read without any tensor library.

The format: eight bytes with the length of a JSON header (little endian), the header, then the
tensors' bytes. The header gives each tensor's dtype, shape and half-open byte range. The file is
sound exactly when the ranges fit dtype and shape, cover the data without hole or overlap, and end
where the file ends; so a truncated download is found by reading a few kilobytes of a file of many
gigabytes. A flipped bit inside a tensor is not: that is what the digests of the manifest are for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from meshinfer.base.errors import CorruptModel

MAX_HEADER_BYTES = 100_000_000
"""The reference reader's own bound."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


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
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(path, f"{size} bytes whose header claims {header_bytes}", "a whole safetensors header")
        text = file.read(header_bytes)
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is not JSON ({error})", "a safetensors header") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object", "a safetensors header")
    tensors = sorted(
        (_tensor(path, name, entry) for name, entry in header.items() if name != "__metadata__"),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            raise _corrupt(path, f"tensor {tensor.name!r} begins at {tensor.begin}", f"{position}, no hole or overlap")
        position = tensor.end
    if size != 8 + header_bytes + position:
        raise _corrupt(path, f"{size} bytes", f"{8 + header_bytes + position}, as its own header says")
    return tuple(tensors)


def _tensor(path: Path, name: str, entry: Any) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"tensor {name[:120]!r} is described wrongly", "dtype, shape, data_offsets") from error
    if dtype not in _BITS or any(type(number) is not int or number < 0 for number in numbers):
        raise _corrupt(path, f"tensor {name[:120]!r} has dtype {dtype[:16]!r}, shape {shape}", "a known dtype")
    expected = -(-prod(shape) * _BITS[dtype] // 8)
    if end - begin != expected:
        raise _corrupt(path, f"tensor {name[:120]!r} has {end - begin} bytes", f"{expected} for {dtype} {shape}")
    return TensorHeader(name, dtype, shape, begin, end)


def _corrupt(path: Path, what: str, expected: str) -> CorruptModel:
    return CorruptModel(
        f"{path.name} in {path.parent} is corrupt: {what}", expected=expected, do="fetch this file again"
    )
