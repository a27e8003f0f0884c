"""Arrays to bytes and back: where activations leave MLX and enter it.

Out: `to_bytes` evaluates an array and shows its memory without a copy. In: `from_bytes` copies once
into an array (0.4 ms for 4 MiB of fp32; a decode step's activation is some KiB), because a buffer that
MLX might still be reading must not be received into, and on CUDA memory is not shared at all.

Nothing here trusts a length: the bytes must be exactly what dtype and shape say. Bytes are little-endian,
as on every machine that MLX runs on.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from meshinfer.base.errors import ProtocolError
from meshinfer.engine.structure import ArraySpec, dtype_name

# How bytes are seen before they become an array: the buffer protocol knows no bfloat16, so 16-bit floats
# travel as integers of their size.
_FORMATS: dict[str, tuple[mx.Dtype, mx.Dtype, str]] = {
    "float32": (mx.float32, mx.float32, "f"),
    "bfloat16": (mx.bfloat16, mx.uint16, "H"),
    "float16": (mx.float16, mx.uint16, "H"),
    "int32": (mx.int32, mx.int32, "i"),
    "uint32": (mx.uint32, mx.uint32, "I"),
    "uint8": (mx.uint8, mx.uint8, "B"),
}
DTYPES = tuple(_FORMATS)
"""What may cross a channel, by MLX's names."""


def byte_count(spec: ArraySpec) -> int:
    """Bytes of an array of this dtype and shape.

    Raises:
        ProtocolError: a dtype that does not cross channels.
    """
    return math.prod(spec.shape) * _format(spec.dtype)[0].size


def spec_of(array: mx.array) -> ArraySpec:
    return ArraySpec(dtype_name(array.dtype), tuple(array.shape))


def to_bytes(array: mx.array) -> memoryview:
    """The array's memory, evaluated and row-major, without a copy if it is so already. Read it, never write it."""
    _, carrier, _ = _format(dtype_name(array.dtype))
    flat = mx.contiguous(array).reshape(-1).view(carrier)
    mx.eval(flat)
    return memoryview(flat).cast("B")  # pyright: ignore[reportArgumentType] - arrays have the buffer protocol


def from_bytes(spec: ArraySpec, data: bytes | bytearray | memoryview) -> mx.array:
    """The array in `data`, copied.

    Raises:
        ProtocolError: not as many bytes as dtype and shape say.
    """
    dtype, _, code = _format(spec.dtype)
    if len(data) != byte_count(spec):
        raise ProtocolError(f"{len(data)} bytes for {spec.dtype}{list(spec.shape)}", expected=str(byte_count(spec)))
    typed: Any = memoryview(data).cast(code)  # pyright: ignore[reportCallIssue, reportArgumentType] - one of _FORMATS
    return mx.array(typed).view(dtype).reshape(spec.shape)


def _format(name: str) -> tuple[mx.Dtype, mx.Dtype, str]:
    if name not in _FORMATS:
        raise ProtocolError(f"an array of {name[:32]}", expected=f"one of {', '.join(DTYPES)}")
    return _FORMATS[name]
