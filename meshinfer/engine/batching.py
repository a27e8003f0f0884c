"""Continuous batching at the head: mlx-lm's own `BatchGenerator`, over a model and caches that are elsewhere.

It decides which sequences run together, when prompts are read in chunks, and how rows come and go; we
change nothing of it. What it takes for a model hands each forward to the pipeline. What it takes for
caches are handles: whatever it does to one is logged, and the log travels with the next forward
(`wire.steps`). What it takes for a sampler waits for the tokens that the last stage took.

Two of its ways are worth knowing:
- A sequence's last prompt token always runs in a step of its own kind, the first one that samples. So
  whether a forward samples follows from its rows' positions.
- It looks one step ahead: it would notice the end of a sequence only after one forward more. We never let
  it decide: the last stage says when a sequence ends, and it is removed at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from meshinfer.wire.steps import CacheOperation

_NEVER = 2**31 - 1


@dataclass(slots=True)
class _Row:
    """One sequence in a batch."""

    session: int
    prompt_tokens: int
    position: int = 0
    """Tokens of it in the cache."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward that the pipeline is asked for."""

    cache: int
    rows: tuple[tuple[int, int, int], ...]
    """(session, tokens in its cache, tokens of it in this forward)."""
    samples: bool
    tokens: mx.array
    """[rows, length], int32; rows that are shorter are padded on the right."""


class Batcher:
    """Sequences in, forwards out.

    Args:
        forward: runs one through the pipeline; may return before it is through.
        take_tokens: waits for the tokens of the forward that was asked for last, one for each row.
        prompts_at_once: prompts that are read in one forward; a short one need not wait for a long one.
        chunk_tokens: of each prompt in one forward.
    Whatever these two raise comes out of `advance`; the batcher is of no use then.
    """

    def __init__(
        self,
        forward: Callable[[Forward], None],
        take_tokens: Callable[[], Sequence[int]],
        *,
        max_rows: int,
        prompts_at_once: int,
        chunk_tokens: int,
    ) -> None:
        self._model = _PipelineModel(forward)
        self._take_tokens = take_tokens
        self._uids: dict[int, int] = {}
        """Session → the generator's number for it; all and only sequences that were not removed."""
        self._generator = BatchGenerator(
            self._model,  # pyright: ignore[reportArgumentType] - it only calls it
            max_tokens=_NEVER,
            sampler=self._sample,
            completion_batch_size=max_rows,
            prefill_batch_size=prompts_at_once,
            prefill_step_size=chunk_tokens,
        )

    @property
    def count(self) -> int:
        """Sequences that were inserted and not removed."""
        return len(self._uids)

    def insert(
        self, session: int, token_ids: Sequence[int], cache: CacheHandle | None = None, position: int = 0
    ) -> None:
        """Let a sequence join with the next `advance`; the caller keeps to `max_rows`.

        Args:
            session: whose it is.
            token_ids: all of them.
            cache: of `set_aside`, if the stages have some of it already; else it begins with an empty one.
            position: how many tokens every stage holds there, or more, which are cut.
        """
        handle = cache or self._model.log.new_handle([])
        handle.rows = [_Row(session, len(token_ids), position)]
        if cache is not None:
            self._model.log.add(CacheOperation("cut", cache.number, rows=(position,)))
        left, before = list(token_ids[position:]), list(token_ids[:position])
        (self._uids[session],) = self._generator.insert([left], caches=[[handle]], all_tokens=[before])

    def set_aside(self) -> CacheHandle:
        """A cache that a step will fill by itself, before its sequence is inserted; forgotten with its last reference."""
        return self._model.log.new_handle([], None)

    def remove(self, sessions: Sequence[int]) -> None:
        """End sequences, wherever they are; their caches are freed by the next operations."""
        uids = [self._uids.pop(session) for session in sessions if session in self._uids]
        if uids:
            self._generator.remove(uids)

    def advance(self) -> None:
        """One turn: a token for each running sequence, then one chunk of the prompts that are being read."""
        self._generator.next()

    @property
    def has_operations(self) -> bool:
        """Something was done to the caches that no step has brought to the stages yet."""
        return self._model.log.waiting

    def take_operations(self) -> tuple[CacheOperation, ...]:
        """What was done to the caches since this was last asked; the next step must bring it."""
        return self._model.log.take()

    def _sample(self, _logits: mx.array) -> mx.array:
        return mx.array(list(self._take_tokens()), mx.int32)


class _PipelineModel:
    """What the generator takes for a model."""

    def __init__(self, forward: Callable[[Forward], None]) -> None:
        self.log = _CacheLog()
        self._forward = forward

    def __call__(self, tokens: mx.array, cache: list[CacheHandle]) -> mx.array:
        (handle,) = cache
        rows, samples = handle.advance(tokens.shape[1])
        self._forward(Forward(handle.number, rows, samples, tokens.astype(mx.int32)))
        # Nobody looks at them: tokens are taken where the real ones are. They only need the right form.
        return mx.zeros((*tokens.shape, 1))


class _CacheLog:
    """Operations that no step has brought to the stages yet, in order."""

    def __init__(self) -> None:
        self._operations: list[CacheOperation] = []
        self._numbers = itertools.count(1)

    @property
    def waiting(self) -> bool:
        return bool(self._operations)

    def take(self) -> tuple[CacheOperation, ...]:
        taken, self._operations = tuple(self._operations), []
        return taken

    def add(self, operation: CacheOperation) -> None:
        self._operations.append(operation)

    def new_handle(
        self, rows: list[_Row], kind: Literal["new", "merge", "copy"] | None = "new", sources: tuple[int, ...] = ()
    ) -> CacheHandle:
        number = next(self._numbers)
        if kind is not None:
            self.add(CacheOperation(kind, number, sources))
        return CacheHandle(self, number, rows)


class CacheHandle:
    """What the generator takes for a cache: the methods of mlx-lm's caches that it calls, and no other."""

    state: Any = ()
    """Nothing to evaluate here."""

    def __init__(self, log: _CacheLog, number: int, rows: list[_Row]) -> None:
        self.log = log
        self.number = number
        self.rows = rows
        self._unpadded: list[int] = []
        """True lengths of the rows' next tokens, between `prepare` and `finalize`."""

    def advance(self, length: int) -> tuple[tuple[tuple[int, int, int], ...], bool]:
        """Count `length` tokens more in each row: (session, position, count) of each, and whether they sample."""
        counts = self._unpadded or [length] * len(self.rows)
        rows = tuple((row.session, row.position, count) for row, count in zip(self.rows, counts, strict=True))
        for row, count in zip(self.rows, counts, strict=True):
            row.position += count
        samples = {row.position >= row.prompt_tokens for row in self.rows}
        assert len(samples) == 1, "a forward mixes prompts and answers"
        return rows, samples.pop()

    @staticmethod
    def merge(handles: list[CacheHandle]) -> CacheHandle:
        rows = [replace(row) for handle in handles for row in handle.rows]
        return handles[0].log.new_handle(rows, "merge", tuple(handle.number for handle in handles))

    def __deepcopy__(self, _memo: Any) -> CacheHandle:
        return self.log.new_handle([replace(row) for row in self.rows], "copy", (self.number,))

    def extend(self, other: CacheHandle) -> None:
        self.rows += other.rows
        self.log.add(CacheOperation("extend", self.number, (other.number,)))

    def filter(self, keep: Sequence[int]) -> None:
        self.rows = [self.rows[index] for index in keep]
        self.log.add(CacheOperation("filter", self.number, rows=tuple(keep)))

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]) -> None:
        self._unpadded = list(lengths)
        self.log.add(CacheOperation("prepare", self.number, rows=tuple(lengths), padding=tuple(right_padding)))

    def finalize(self) -> None:
        self._unpadded = []
        self.log.add(CacheOperation("finalize", self.number))

    def __del__(self) -> None:
        self.log.add(CacheOperation("free", self.number))
