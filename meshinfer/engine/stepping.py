"""One seat's steps: what came is checked, the caches are brought up to date, the layers run.

The last look before MLX, which checks nothing: an id outside the vocabulary or a row that is not there
would be read from foreign memory. So whatever a neighbour sent is compared with what this stage expects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from meshinfer.base.errors import BadInput, ProtocolError
from meshinfer.engine.buffers import from_bytes, spec_of, to_bytes
from meshinfer.engine.cache_table import CacheTable
from meshinfer.engine.loader import Seat
from meshinfer.engine.structure import ArraySpec
from meshinfer.wire.frames import Tensor, TensorSpec
from meshinfer.wire.steps import StepControl

# mlx-lm frees MLX's spare buffers so often while it decodes; each time costs some allocations after it.
_STEPS_PER_CLEARING = 512


class Stepper:
    """A seat that runs steps, on the thread that loaded it.

    Args:
        seat: what was loaded.
        max_rows: sessions at once.
        max_tokens: of one step, rows × length.
    """

    def __init__(self, seat: Seat, *, max_rows: int, max_tokens: int) -> None:
        self.stage = seat.stage
        self.vocab_size = seat.vocab_size
        self.caches = CacheTable(seat.stage, max_rows)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._steps = 0

    @property
    def tolerates_padding(self) -> bool:
        """Whether prompts of different length may be read in one step, the shorter padded on the right.

        Keys and values of padding are masked and rolled away. A recurrent state has seen it; models must undo
        that themselves, and of mlx-lm 0.32.2's nemotron_h does not: two prompts of 11 and 2 tokens together
        give the second one wrong tokens, without an error (test_pipeline_batching has the case).
        """
        return all(isinstance(cache, KVCache | RotatingKVCache) for cache in self.stage.make_cache())

    @property
    def max_payload_bytes(self) -> int:
        """Of one step's tensors, as the stage before may send them (in its own float type: 4 bytes at most)."""
        carried = self.stage.carried_shapes(1, self._max_tokens)
        return 4 * self._max_tokens + sum(4 * math.prod(spec.shape) for spec in carried)

    def run(self, control: StepControl, tokens: mx.array | None, carried: Sequence[mx.array] = ()) -> Any:
        """Apply the step's operations, then run it; returns when it is computed.

        Returns:
            On the last stage logits [rows, vocabulary] of a step that samples, else None. On the others the
            carried arrays; () if nothing runs.

        Raises:
            ProtocolError: the step cannot be what the head meant; nothing more of it was done.
        """
        self.caches.apply(control.operations)
        if tokens is None:
            mx.clear_cache()  # sessions have ended: give their memory back
            return None if self.stage.is_last else ()
        rows, length = tokens.shape
        cache = self.caches.cache_for(control.cache, rows, length)
        try:
            outputs: Any = self.stage(tokens, carried, cache)
        except BadInput as error:
            raise ProtocolError(str(error)) from error
        state = self.stage.state_arrays(cache)
        if not self.stage.is_last:
            mx.eval(outputs, state)
        elif control.samples:
            outputs = outputs[:, -1, :]
            mx.eval(outputs, state)
        else:  # the prompts' logits are nobody's business, and the head is the largest matrix
            outputs = None
            mx.eval(state)
        self._steps += 1
        if not control.samples or self._steps % _STEPS_PER_CLEARING == 0:
            mx.clear_cache()
        return outputs

    def clear(self) -> None:
        """Free every cache."""
        self.caches.clear()
        mx.clear_cache()

    def accept(self, control: StepControl, tensors: Sequence[Tensor]) -> tuple[mx.array | None, tuple[mx.array, ...]]:
        """Token ids and carried arrays of a step that came from the stage before.

        Raises:
            ProtocolError: they do not fit the step, the vocabulary or this stage.
        """
        if control.cache == 0:
            if tensors or control.rows:
                raise ProtocolError("tensors in a step that runs nothing", expected="operations only")
            return None, ()
        if not tensors:
            raise ProtocolError("a step without token ids", expected="int32 [rows, length] first")
        ids, *carried = tensors
        self._check_ids(control, ids)
        arrays = tuple(from_bytes(ArraySpec(t.spec.dtype, t.spec.shape), t.data) for t in (ids, *carried))
        expected = self.stage.carried_shapes(*ids.spec.shape)
        if [array.shape for array in arrays[1:]] != [spec.shape for spec in expected]:
            raise ProtocolError(
                f"carried arrays {[t.spec.shape for t in carried]}", expected=str([spec.shape for spec in expected])
            )
        return arrays[0], arrays[1:]

    def _check_ids(self, control: StepControl, ids: Tensor) -> None:
        if ids.spec.dtype != "int32" or len(ids.spec.shape) != 2:
            raise ProtocolError(f"token ids as {ids.spec}", expected="int32 [rows, length]")
        rows, length = ids.spec.shape
        if rows != len(control.rows) or not 1 <= rows <= self._max_rows or not 1 <= rows * length <= self._max_tokens:
            raise ProtocolError(
                f"a step of {rows} × {length} tokens for {len(control.rows)} sessions",
                expected=f"at most {self._max_rows} rows and {self._max_tokens} tokens",
            )
        if any(count > length for _, _, count in control.rows) or (control.samples and length != 1):
            raise ProtocolError(f"rows {control.rows} in a step of {length} tokens, sampling: {control.samples}")
        view = ids.data.cast("i")
        if min(view) < 0 or max(view) >= self.vocab_size:
            raise ProtocolError(
                f"token ids from {min(view)} to {max(view)}", expected=f"ids of the vocabulary: below {self.vocab_size}"
            )


def as_tensors(arrays: Sequence[mx.array]) -> tuple[Tensor, ...]:
    """Evaluated arrays as a frame's tensors, without a copy where they lie in one piece."""
    specs = [spec_of(array) for array in arrays]
    return tuple(
        Tensor(TensorSpec(spec.dtype, spec.shape), to_bytes(array)) for spec, array in zip(specs, arrays, strict=True)
    )
