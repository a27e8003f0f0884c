"""One seat's steps: what came is checked, the caches are brought up to date, the layers run.

The last look before MLX, which checks nothing: an id outside the vocabulary or a row that is not there
would be read from foreign memory. So whatever a neighbour sent is compared with what this stage expects:
the shapes, the ids, and of each session the position at which its caches stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, RotatingKVCache

from meshinfer.base.errors import BadInput, ProtocolError
from meshinfer.engine.buffers import from_bytes, spec_of, to_bytes
from meshinfer.engine.cache_table import CacheTable, cut_entry
from meshinfer.engine.keeping import Keeper, Trace
from meshinfer.engine.loader import Seat
from meshinfer.engine.replay_log import ReplayLog, Rows
from meshinfer.engine.structure import ArraySpec
from meshinfer.wire.frames import Tensor, TensorSpec
from meshinfer.wire.steps import Kept, Part, StepControl

# mlx-lm frees MLX's spare buffers so often while it decodes; each time costs some allocations after it.
_STEPS_PER_CLEARING = 512


class Stepper:
    """A seat that runs steps, on the thread that loaded it.

    Args:
        seat: what was loaded.
        max_rows: sessions at once.
        max_tokens: of one step, rows × length.
        context_tokens: of one session.
    """

    def __init__(self, seat: Seat, *, max_rows: int, max_tokens: int, context_tokens: int) -> None:
        self.stage = seat.stage
        self.vocab_size = seat.vocab_size
        self.caches = CacheTable(seat.stage, max_rows)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._context_tokens = context_tokens
        self._steps = 0
        stage = seat.stage
        self._produced = () if stage.is_last else stage.structure.carried_arrays[stage.end]
        self._seat, self._seats = 0, 1
        self._can_log = ReplayLog.can_log(self._produced)
        self._cache_token_bytes = 0
        """Of a token's keys and values in this stage; 0 until a step has run."""
        self.sessions = Keeper(max_rows, context_tokens)
        self.recomputed_tokens = 0
        """Since the start, for sessions that came back."""

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
        step = 4 * self._max_tokens + sum(4 * math.prod(spec.shape) for spec in carried)
        return max(step, 4 * self._context_tokens)  # a session that is recalled brings all its ids

    def take_place(self, seat: int, seats: int) -> None:
        """Be that one of so many seats, from the next step on."""
        self._seat, self._seats = seat, seats

    def rehearse(self, tokens: int) -> None:
        """Read so many tokens as a step would, and forget them."""
        self.stage.rehearse(tokens, self.stage.make_cache())
        mx.clear_cache()

    def step(
        self, control: StepControl, tokens: mx.array | None, carried: Sequence[mx.array] = ()
    ) -> tuple[StepControl, Any]:
        """This seat's part in a step, of whichever kind it is.

        Returns:
            The control part for the next stage, and what goes with it (see `run`).

        Raises:
            ProtocolError: the step cannot be what the head meant.
        """
        if control.recalls:
            assert tokens is not None
            return replace(control, kept=(*control.kept, self.recall(control, tokens))), ()
        if control.parts:
            assert tokens is not None
            outputs = self.restore(control, control.parts[self._seat], tokens, carried)
            next_part = control.parts[self._seat + 1] if self._seat + 1 < self._seats else "compute"
            return control, outputs if next_part == "compute" else ()  # else the next stage has no use for them
        return control, self.run(control, tokens, carried)

    def run(self, control: StepControl, tokens: mx.array | None, carried: Sequence[mx.array] = ()) -> Any:
        """Apply the step's operations, then run it; returns when it is computed.

        Returns:
            On the last stage logits [rows, vocabulary] of a step that samples, else None. On the others the
            carried arrays; () if nothing runs.

        Raises:
            ProtocolError: the step cannot be what the head meant; nothing more of it was done.
        """
        self._follow(control)
        if tokens is None:
            mx.clear_cache()  # sessions have ended: give their memory back
            return None if self.stage.is_last else ()
        length = tokens.shape[1]
        numbers = [number for number, _, _ in control.rows]
        cache = self.caches.cache_for(control.cache, numbers, length)
        for number, position, _ in control.rows:
            trace = self.sessions.running(number)
            if trace is not None and position != len(trace.tokens):
                raise ProtocolError(f"session {number} at {position} tokens", expected=f"{len(trace.tokens)}")
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
        self.caches.ran(control.cache, numbers, length)
        self._note(control, tokens, outputs, cache)
        self._steps += 1
        if not control.samples or self._steps % _STEPS_PER_CLEARING == 0:
            mx.clear_cache()
        return outputs

    def recall(self, control: StepControl, tokens: mx.array) -> Kept:
        """What was kept of the session whose tokens these are becomes a numbered cache; or an empty one does.

        Raises:
            ProtocolError: the step cannot be what the head meant.
        """
        self._follow(control)
        number, trace = self._one_session(control)
        entry, trace.caches = trace.caches, None
        good = trace.shared_length(self._ids(tokens)) if entry else 0
        if entry is None or not (good == entry.length or entry.lowest <= good):
            entry, good = self.caches.fresh(), 0
        cut_entry(entry, good, self.caches.fresh)
        trace.cut(good)
        self.caches.adopt(control.cache, entry, number)
        self.sessions.bound_logs(self._cache_token_bytes)  # nothing is promised that does not fit
        trace.promised = good > 0 and trace.log is not None
        return Kept(good, entry.lowest, replays=trace.promised)

    def restore(self, control: StepControl, part: Part, tokens: mx.array, carried: Sequence[mx.array] = ()) -> Any:
        """This stage's part in bringing a session back.

        Returns:
            The carried arrays if it computes or replays, and is not the last stage; of that one, logits
            [1, vocabulary] if the step samples; else nothing.

        Raises:
            ProtocolError: it does not have, or does not lack, what the head says.
        """
        self._follow(control)
        number, trace = self._one_session(control)
        ((_, position, count),) = control.rows
        ids, held = self._ids(tokens), len(trace.tokens)
        entry = self.caches.single(control.cache, number)
        if part == "compute":
            if held < position or (entry.length != held):
                raise ProtocolError(f"session {number} computes from {position}", expected=f"from {held} at most")
            self.caches.cut(control.cache, position)
            trace.cut(position)
            cache = entry.full()
            outputs: Any = self.stage(tokens, carried, cache)
            if self.stage.is_last:
                outputs = outputs[:, -1, :] if control.samples else ()
            mx.eval(outputs, self.stage.state_arrays(cache))
            entry.length += count
            self._note(control, tokens, outputs, cache)
            mx.clear_cache()
            return outputs
        if trace.tokens[position : position + count] != ids:
            raise ProtocolError(
                f"session {number} has other tokens at {position} to {position + count}", expected="those it has here"
            )
        if part == "skip":
            return ()
        if trace.log is None or trace.log.length < position + count:
            raise ProtocolError(f"session {number} replays {position + count} tokens", expected="as many as were kept")
        return tuple(trace.log.read(position, position + count))

    def keep_sessions(self) -> None:
        """No session can go on: free every cache but what is good if a session is opened again."""
        self.sessions.keep(self.caches.take_apart(self.sessions.positions()))
        mx.clear_cache()

    def clear(self) -> None:
        """Free every cache."""
        self.caches.clear()
        self.sessions = Keeper(self._max_rows, self._context_tokens)
        mx.clear_cache()

    def _follow(self, control: StepControl) -> None:
        """What the head says beside the step itself."""
        self.sessions.end(control.ended)
        for number, length in self.caches.apply(control.operations).items():
            if trace := self.sessions.running(number):
                trace.cut(length)
        self.sessions.begin(control.started)

    def _note(self, control: StepControl, tokens: mx.array, outputs: Any, cache: Any) -> None:
        """Write down what the step's sessions hold now."""
        ids: Any = tokens.tolist()
        taken: Rows | None = None
        for row, (number, position, count) in enumerate(control.rows):
            trace = self.sessions.running(number)
            if trace is None:
                continue
            if not control.parts:
                trace.promised = False  # it is in the batch: nobody asks any more
            if not control.samples and (control.parts or trace.computed_before):
                self.recomputed_tokens += count
            if position == 0 and self._can_log:
                trace.log = ReplayLog(self._produced)
            trace.tokens += ids[row][:count]
            if trace.log is not None:
                taken = taken or Rows(self._produced, outputs, tokens.shape[1])
                trace.log.append(taken, row, count)
        if self._can_log:  # tokens without a log take room from the others' logs too
            if self._cache_token_bytes == 0:
                self._cache_token_bytes = sum(_token_bytes(own) for own in self.stage.own_caches(cache))
            self.sessions.bound_logs(self._cache_token_bytes)

    def _one_session(self, control: StepControl) -> tuple[int, Trace]:
        numbers = [number for number, _, _ in control.rows]
        trace = self.sessions.running(numbers[0]) if len(numbers) == 1 else None
        if trace is None:
            raise ProtocolError(f"sessions {numbers} are brought back", expected="one that has started")
        return numbers[0], trace

    @staticmethod
    def _ids(tokens: mx.array) -> list[int]:
        rows: Any = tokens.tolist()
        return rows[0]

    def accept(self, control: StepControl, tensors: Sequence[Tensor]) -> tuple[mx.array | None, tuple[mx.array, ...]]:
        """Token ids and carried arrays of a step that came from the stage before.

        Raises:
            ProtocolError: they do not fit the step, the vocabulary or this stage.
        """
        if (control.parts and len(control.parts) != self._seats) or len(control.kept) != control.recalls * self._seat:
            raise ProtocolError(
                f"{len(control.parts)} parts and {len(control.kept)} words of what was kept, at seat {self._seat}",
                expected=f"a part for each of {self._seats} seats, or a word of each of those before",
            )
        if control.cache == 0:
            if tensors or control.rows or control.recalls or control.parts:
                raise ProtocolError("tensors in a step that runs nothing", expected="operations only")
            return None, ()
        if not tensors:
            raise ProtocolError("a step without token ids", expected="int32 [rows, length] first")
        ids, *carried = tensors
        self._check_ids(control, ids)
        arrays = tuple(from_bytes(ArraySpec(t.spec.dtype, t.spec.shape), t.data) for t in (ids, *carried))
        computes = control.parts[self._seat] == "compute" if control.parts else not control.recalls
        expected = self.stage.carried_shapes(*ids.spec.shape) if computes else ()
        if [array.shape for array in arrays[1:]] != [spec.shape for spec in expected]:
            raise ProtocolError(
                f"carried arrays {[t.spec.shape for t in carried]}", expected=str([spec.shape for spec in expected])
            )
        return arrays[0], arrays[1:]

    def _check_ids(self, control: StepControl, ids: Tensor) -> None:
        if ids.spec.dtype != "int32" or len(ids.spec.shape) != 2:
            raise ProtocolError(f"token ids as {ids.spec}", expected="int32 [rows, length]")
        rows, length = ids.spec.shape
        most = self._context_tokens if control.recalls else self._max_tokens
        if rows != len(control.rows) or not 1 <= rows <= self._max_rows or not 1 <= rows * length <= most:
            raise ProtocolError(
                f"a step of {rows} × {length} tokens for {len(control.rows)} sessions",
                expected=f"at most {self._max_rows} rows and {most} tokens",
            )
        if any(count > length for _, _, count in control.rows) or (control.samples and length != 1):
            raise ProtocolError(f"rows {control.rows} in a step of {length} tokens, sampling: {control.samples}")
        alone = control.recalls or control.parts
        if alone and (control.recalls * control.samples or [count for _, _, count in control.rows] != [length]):
            raise ProtocolError(f"rows {control.rows} in a step of {length} tokens", expected="one session, whole")
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


def _token_bytes(cache: Any) -> int:
    """What one token of one sequence takes in a cache that grows with the context; 0 for other kinds."""
    if isinstance(cache, CacheList):
        return sum(_token_bytes(part) for part in cache.caches)
    if not isinstance(cache, KVCache | BatchKVCache) or cache.keys is None:
        return 0
    arrays: Any = (cache.keys, cache.values)
    return sum(array.shape[1] * array.shape[3] * array.dtype.size for array in arrays)
