"""The caches of a stage's layers, by the numbers that the head gave them, and the cache log applied to them.

The head never sees a cache: it batches with handles (`engine.batching`), and what is done to a handle
travels with the next step (`wire.steps.CacheOperation`). Every stage, the head's own among them, applies
the same operations in the same order to its own caches, so all stages agree on rows and lengths.

MLX checks no index: a row that is not there would be read from whatever lies beyond. So each operation is
checked here against what the table holds, before MLX sees it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from meshinfer.base.errors import ProtocolError
from meshinfer.engine.stage import Cache, Stage
from meshinfer.wire.steps import CacheOperation


@dataclass(slots=True)
class _Entry:
    """One numbered cache: the distinct caches of the stage's layers, shadows too."""

    distinct: list[Any]
    pattern: list[int]
    """For each place of the model's own list, which of `distinct` stands there."""
    rows: int = 1
    batched: bool = False
    """A batch of sequences; else a single one, of mlx-lm's other classes."""
    prepared: list[int] = field(default_factory=list[int])
    """Tokens that each row of the next step has, padding included, between `prepare` and `finalize`."""

    def full(self) -> Cache:
        return [self.distinct[place] for place in self.pattern]


class CacheTable:
    """All and only caches that the head has not freed."""

    def __init__(self, stage: Stage, max_rows: int) -> None:
        self._stage = stage
        self._max_rows = max_rows
        # A session has one cache while it waits, and one of a batch; a batch that splits is there twice.
        self._max_entries = 4 * max_rows + 8
        self._entries: dict[int, _Entry] = {}

    @property
    def count(self) -> int:
        return len(self._entries)

    @property
    def rows(self) -> int:
        """Sequences with a cache that has begun to fill."""
        return sum(entry.rows for entry in self._entries.values() if entry.batched)

    @property
    def size_bytes(self) -> int:
        """What the stage's own layers hold."""
        return sum(
            cache.nbytes
            for entry in self._entries.values()
            for cache in self._stage.own_caches(entry.full())
            if not cache.empty()
        )

    def clear(self) -> None:
        self._entries.clear()

    def cache_for(self, number: int, rows: int, length: int) -> Cache:
        """The cache that a step of `rows` × `length` tokens may run on.

        Raises:
            ProtocolError: there is none that fits.
        """
        entry = self._entry(number)
        if not entry.batched or entry.rows != rows:
            raise ProtocolError(f"a step of {rows} rows on cache {number}", expected=f"a batch of {entry.rows}")
        if any(length > prepared for prepared in entry.prepared):
            raise ProtocolError(f"{length} tokens on cache {number}", expected=f"those prepared: {entry.prepared}")
        return entry.full()

    def apply(self, operations: Sequence[CacheOperation]) -> None:
        """Do what the head did to its handles.

        Raises:
            ProtocolError: an operation that cannot be; those before it are done.
        """
        touched: set[int] = set()
        for operation in operations:
            self._apply(operation)
            touched.add(operation.cache)
        # Evaluated at once: a lazy `filter` would keep the rows that it drops in memory.
        mx.eval([self._stage.state_arrays(self._entries[n].full()) for n in touched if n in self._entries])

    def _apply(self, operation: CacheOperation) -> None:
        number = operation.cache
        match operation.kind:
            case "new":
                self._add(number, _as_entry(self._stage.make_cache()))
            case "merge":
                sources = [self._entry(source) for source in operation.sources]
                if not sources or any(source.batched for source in sources):
                    raise ProtocolError(f"cache {number} cannot be merged from {operation.sources}")
                merged = [same[0].merge(list(same)) for same in zip(*(s.distinct for s in sources), strict=True)]
                self._add(number, _Entry(merged, sources[0].pattern, len(sources), batched=True))
            case "copy":
                source = self._source(operation)
                self._add(number, _Entry(copy.deepcopy(source.distinct), source.pattern, source.rows, source.batched))
            case "extend":
                entry, source = self._batch(number), self._source(operation)
                if source is entry or not source.batched or entry.prepared or source.prepared:
                    raise ProtocolError(f"cache {number} cannot be extended by {operation.sources}")
                self._check_rows(entry.rows + source.rows)
                for own, other in zip(entry.distinct, source.distinct, strict=True):
                    own.extend(other)
                entry.rows += source.rows
            case "filter":
                entry = self._batch(number)
                if not operation.rows or len(operation.rows) > entry.rows or max(operation.rows) >= entry.rows:
                    raise ProtocolError(f"cache {number} keeps {operation.rows}", expected=f"of its {entry.rows} rows")
                for own in entry.distinct:
                    own.filter(list(operation.rows))
                entry.rows = len(operation.rows)
            case "prepare":
                entry = self._batch(number)
                lengths, padding = list(operation.rows), list(operation.padding)
                if not len(lengths) == len(padding) == entry.rows:
                    raise ProtocolError(f"cache {number} prepares {len(lengths)} rows", expected=f"{entry.rows}")
                for own in entry.distinct:
                    own.prepare(lengths=lengths, right_padding=padding)
                entry.prepared = [length + more for length, more in zip(lengths, padding, strict=True)]
            case "finalize":
                entry = self._batch(number)
                if not entry.prepared:
                    raise ProtocolError(f"cache {number} is finalized", expected="to be prepared before")
                for own in entry.distinct:
                    own.finalize()
                entry.prepared = []
            case "free":
                self._entry(number)
                del self._entries[number]

    def _add(self, number: int, entry: _Entry) -> None:
        if number in self._entries or number == 0 or len(self._entries) >= self._max_entries:
            raise ProtocolError(
                f"a cache {number} beside {len(self._entries)}", expected=f"a new number, at most {self._max_entries}"
            )
        self._check_rows(entry.rows)
        self._entries[number] = entry

    def _check_rows(self, rows: int) -> None:
        if rows > self._max_rows:
            raise ProtocolError(f"a batch of {rows} rows", expected=f"at most the {self._max_rows} of the placement")

    def _entry(self, number: int) -> _Entry:
        if number not in self._entries:
            raise ProtocolError(f"cache {number}", expected="one that there is")
        return self._entries[number]

    def _batch(self, number: int) -> _Entry:
        entry = self._entry(number)
        if not entry.batched:
            raise ProtocolError(f"cache {number} is of one sequence", expected="a batch")
        return entry

    def _source(self, operation: CacheOperation) -> _Entry:
        if len(operation.sources) != 1:
            raise ProtocolError(f"{operation.kind} from {len(operation.sources)} caches", expected="one")
        return self._entry(operation.sources[0])


def _as_entry(full: Cache) -> _Entry:
    """A model's own list of caches, in which foreign layers' places alias others."""
    places: dict[int, int] = {}
    distinct: list[Any] = []
    for cache in full:
        if id(cache) not in places:
            places[id(cache)] = len(distinct)
            distinct.append(cache)
    return _Entry(distinct, [places[id(cache)] for cache in full])
