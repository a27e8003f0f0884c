"""What a stage sent on for one session, so that it can be sent again to a stage that lost it.

Hidden size × bytes per element for each token: about as much as the caches of two layers of a model with
grouped queries. Written at each step, read only after a repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from meshinfer.engine.buffers import byte_count, from_bytes, spec_of, to_bytes
from meshinfer.engine.structure import ArraySpec, CarriedArray


class ReplayLog:
    """Outputs of positions `[0, length)`. `arrays` says what they are; see `can_log`."""

    def __init__(self, arrays: Sequence[CarriedArray]) -> None:
        self._arrays = tuple(arrays)
        self._specs: list[ArraySpec] = []
        """Of one token in each array, batch and length first; known from the first outputs."""
        self._data = [bytearray() for _ in arrays]
        self.length = 0

    @staticmethod
    def can_log(arrays: Sequence[CarriedArray]) -> bool:
        """Whether one session's part of them can be told apart."""
        return bool(arrays) and all(a.axes.count("batch") == a.axes.count("length") == 1 for a in arrays)

    @property
    def size_bytes(self) -> int:
        return sum(len(data) for data in self._data)

    def cut(self, length: int) -> None:
        """Forget what is beyond `length` tokens."""
        self.length = min(self.length, length)
        for data, spec in zip(self._data, self._specs, strict=False):
            del data[self.length * byte_count(spec) :]

    def append(self, rows: Rows, row: int, count: int) -> None:
        """`count` tokens more, those of `row` of a step."""
        self._specs = rows.token_specs
        for log, data, spec in zip(self._data, rows.data, rows.token_specs, strict=True):
            size = byte_count(spec)
            begin = row * rows.length * size
            log.extend(data[begin : begin + count * size])
        self.length += count

    def read(self, start: int, end: int) -> list[mx.array]:
        """The outputs of tokens `[start, end)`, as a step of one row would give them."""
        assert 0 <= start < end <= self.length
        arrays: list[mx.array] = []
        for carried, data, spec in zip(self._arrays, self._data, self._specs, strict=True):
            size = byte_count(spec)
            piece = memoryview(data)[start * size : end * size]
            flat = from_bytes(ArraySpec(spec.dtype, (1, end - start, *spec.shape)), piece)
            arrays.append(mx.transpose(flat, _inverse(_order(carried))))
        mx.eval(arrays)
        return arrays


class Rows:
    """Outputs of one step, ready to be taken apart by rows."""

    def __init__(self, arrays: Sequence[CarriedArray], outputs: Sequence[mx.array], length: int) -> None:
        self.length = length
        ordered: list[Any] = [
            output if (order := _order(carried)) == sorted(order) else mx.transpose(output, order)
            for carried, output in zip(arrays, outputs, strict=True)
        ]
        self.token_specs = [ArraySpec(spec_of(array).dtype, tuple(array.shape[2:])) for array in ordered]
        self.data = [to_bytes(array) for array in ordered]


def _order(carried: CarriedArray) -> list[int]:
    """Axes with batch and length first."""
    first = [carried.axes.index("batch"), carried.axes.index("length")]
    return [*first, *(axis for axis in range(len(carried.axes)) if axis not in first)]


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
