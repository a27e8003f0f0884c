"""Quantised products on a CPU, many rows at once: unpack the weights, then let BLAS multiply.

MLX's CPU kernel for packed weights handles one row as fast as it can, and a hundred rows at a hundred
times that. BLAS is far better at many rows but wants plain float32, which takes eight times the memory of
4-bit weights. So for more than a few rows (a prefill) the weights of one product are unpacked for that
product alone, and forgotten: SmolLM2 4-bit, 128 tokens of prefill: 10.9 tokens/s packed, 177 this way
(273 with weights that are plain all the time, at five times the memory). The values are exactly the same; only
the order of summation differs, as between any two BLAS routines.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

UNPACK_FROM_ROWS = 4
"""Unpacking costs as much as 2.5 rows of the packed kernel (measured: 0.23 s against 0.09 s a row)."""

_BLOCK_ELEMENTS = 2**24
"""Unpacked at once: 64 MiB. Larger blocks are no faster; a whole matrix of an 8B model would take 235 MB."""


def unpack_for_many_rows(model: nn.Module) -> None:
    """Let the model's quantised linear modules unpack when many rows come. For CPUs, where activations are float32."""
    for module in model.modules():
        if type(module) is nn.QuantizedLinear and module.mode == "affine":
            module.__class__ = _UnpackingLinear


class _UnpackingLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        if x.size < UNPACK_FROM_ROWS * x.shape[-1]:
            return super().__call__(x)
        outputs, inputs = self.weight.shape[0], self.weight.shape[-1] * 32 // self.bits
        step = max(1, _BLOCK_ELEMENTS // inputs)
        blocks = [x @ self._unpacked(start, start + step).T for start in range(0, outputs, step)]
        y = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=-1)
        return y + self["bias"] if "bias" in self else y

    def _unpacked(self, start: int, end: int) -> mx.array:
        """Rows `[start, end)` of the weight, plain."""
        packed = (self[name][start:end] for name in ("weight", "scales", "biases"))
        return mx.dequantize(*packed, group_size=self.group_size, bits=self.bits)
