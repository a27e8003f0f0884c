"""The caches of a stage's layers, by the numbers that the head gave them, and the cache log applied to them.

The head never sees a cache: it batches with handles (`engine.batching`), and what is done to a handle
travels with the next step (`wire.steps.CacheOperation`). Every stage, the head's own among them, applies
the same operations in the same order to its own caches, so all stages agree on rows and lengths.

MLX checks no index: a row that is not there would be read from whatever lies beyond. So each operation is
checked here against what the table holds, before MLX sees it.

When a pipeline breaks, the table is taken apart: a cache of its own for each session, at the position that the
session had reached. Such caches can be put back under a new number and join a batch again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as caches

from meshinfer.base.errors import ProtocolError
from meshinfer.engine.stage import Cache, Stage, state_of
from meshinfer.engine.structure import arrays_in
from meshinfer.wire.steps import CacheOperation


@dataclass(slots=True)
class Entry:
    """One numbered cache: the distinct caches of the stage's layers, shadows too."""

    distinct: list[Any]
    pattern: list[int]
    """For each place of the model's own list, which of `distinct` stands there."""
    rows: int = 1
    batched: bool = False
    """A batch of sequences; else a single one, of mlx-lm's other classes."""
    prepared: list[int] = field(default_factory=list[int])
    """Tokens that each row of the next step has, padding included, between `prepare` and `finalize`."""
    prepared_run: int = 0
    """How many of them have run."""
    sessions: list[int] = field(default_factory=lambda: [0])
    """Whose each row is; 0 until a step has said it."""
    length: int = 0
    """Tokens in it, if it is of one sequence."""

    def full(self) -> Cache:
        return [self.distinct[place] for place in self.pattern]

    @property
    def lowest(self) -> int:
        """To how many tokens it can be cut back, other than by starting again."""
        return 0 if all(_is_plain(own) and own.is_trimmable() for own in self.distinct) else self.length

    @property
    def size_bytes(self) -> int:
        return sum(own.nbytes for own in self.distinct if not own.empty())


class CacheTable:
    """All and only caches that the head has not freed."""

    def __init__(self, stage: Stage, max_rows: int) -> None:
        self._stage = stage
        self._max_rows = max_rows
        # A session has one cache while it waits, and one of a batch; a batch that splits is there twice.
        self._max_entries = 4 * max_rows + 8
        self._entries: dict[int, Entry] = {}

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

    def cache_for(self, number: int, sessions: Sequence[int], length: int) -> Cache:
        """The cache that a step of `length` tokens of each of `sessions` may run on.

        Raises:
            ProtocolError: there is none that fits.
        """
        entry = self._entry(number)
        if not entry.batched or entry.rows != len(sessions):
            raise ProtocolError(
                f"a step of {len(sessions)} rows on cache {number}", expected=f"{entry.rows} of a batch"
            )
        if any(own not in (0, given) for own, given in zip(entry.sessions, sessions, strict=True)):
            raise ProtocolError(f"a step of sessions {sessions} on cache {number}", expected=f"{entry.sessions}")
        if any(length > prepared for prepared in entry.prepared):
            raise ProtocolError(f"{length} tokens on cache {number}", expected=f"those prepared: {entry.prepared}")
        return entry.full()

    def ran(self, number: int, sessions: Sequence[int], length: int) -> None:
        """A step of `length` tokens ran on a batch."""
        entry = self._entry(number)
        entry.sessions = list(sessions)
        entry.prepared_run += length if entry.prepared else 0

    # --- sessions that come back ----------------------------------------------------------------

    def fresh(self) -> Entry:
        """An empty cache of one sequence, not in the table."""
        return _as_entry(self._stage.make_cache())

    def adopt(self, number: int, entry: Entry, session: int) -> None:
        """Put a cache of one sequence into the table.

        Raises:
            ProtocolError: the number is not new, or there is no place.
        """
        entry.sessions = [session]
        self._add(number, entry)

    def single(self, number: int, session: int) -> Entry:
        """The cache of one sequence, which must be that session's.

        Raises:
            ProtocolError: there is none.
        """
        entry = self._entry(number)
        if entry.batched or entry.sessions != [session]:
            raise ProtocolError(f"session {session} on cache {number}", expected="a cache that it was recalled into")
        return entry

    def cut(self, number: int, length: int) -> None:
        """Forget what a cache of one sequence holds beyond `length` tokens.

        Raises:
            ProtocolError: it holds less, or cannot be cut back so far.
        """
        entry = self._entry(number)
        if entry.batched or not (length in (0, entry.length) or entry.lowest <= length < entry.length):
            raise ProtocolError(
                f"cache {number} is cut to {length} tokens",
                expected=f"{entry.lowest} to {entry.length}, of one sequence",
            )
        cut_entry(entry, length, self.fresh)

    def take_apart(self, positions: Mapping[int, int]) -> dict[int, Entry]:
        """Empty the table.

        Args:
            positions: of each session, how many tokens its caches must hold.

        Returns:
            A cache of its own for each of these sessions whose caches hold just that, and can be taken out of a batch.
        """
        entries, self._entries = list(self._entries.values()), {}
        found: dict[int, Entry] = {}
        for entry in entries:
            rows = [row for row, number in enumerate(entry.sessions) if number in positions and number not in found]
            for single in _take_rows(entry, rows, positions):
                (number,) = single.sessions
                if single.length == positions[number]:
                    found[number] = single
        return found

    # --- the log --------------------------------------------------------------------------------

    def apply(self, operations: Sequence[CacheOperation]) -> dict[int, int]:
        """Do what the head did to its handles.

        Returns:
            Sessions whose caches were cut, and to how many tokens.

        Raises:
            ProtocolError: an operation that cannot be; those before it are done.
        """
        touched: set[int] = set()
        cut: dict[int, int] = {}
        for operation in operations:
            self._apply(operation)
            touched.add(operation.cache)
            if operation.kind == "cut":
                cut[self._entries[operation.cache].sessions[0]] = operation.rows[0]
        # Evaluated at once: a lazy `filter` would keep the rows that it drops in memory.
        mx.eval([self._stage.state_arrays(self._entries[n].full()) for n in touched if n in self._entries])
        return cut

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
                sessions = [session for source in sources for session in source.sessions]
                self._add(number, Entry(merged, sources[0].pattern, len(sources), batched=True, sessions=sessions))
            case "copy":
                self._add(number, copy.deepcopy(self._source(operation)))
            case "extend":
                entry, source = self._batch(number), self._source(operation)
                if source is entry or not source.batched or entry.prepared or source.prepared:
                    raise ProtocolError(f"cache {number} cannot be extended by {operation.sources}")
                self._check_rows(entry.rows + source.rows)
                for own, other in zip(entry.distinct, source.distinct, strict=True):
                    own.extend(other)
                entry.rows += source.rows
                entry.sessions += source.sessions
            case "filter":
                entry = self._batch(number)
                if not operation.rows or len(operation.rows) > entry.rows or max(operation.rows) >= entry.rows:
                    raise ProtocolError(f"cache {number} keeps {operation.rows}", expected=f"of its {entry.rows} rows")
                for own in entry.distinct:
                    own.filter(list(operation.rows))
                entry.rows = len(operation.rows)
                entry.sessions = [entry.sessions[row] for row in operation.rows]
            case "prepare":
                entry = self._batch(number)
                lengths, padding = list(operation.rows), list(operation.padding)
                if not len(lengths) == len(padding) == entry.rows:
                    raise ProtocolError(f"cache {number} prepares {len(lengths)} rows", expected=f"{entry.rows}")
                for own in entry.distinct:
                    own.prepare(lengths=lengths, right_padding=padding)
                entry.prepared = [length + more for length, more in zip(lengths, padding, strict=True)]
                entry.prepared_run = 0
            case "finalize":
                entry = self._batch(number)
                if not entry.prepared:
                    raise ProtocolError(f"cache {number} is finalized", expected="to be prepared before")
                for own in entry.distinct:
                    own.finalize()
                entry.prepared = []
            case "cut":
                if len(operation.rows) != 1:
                    raise ProtocolError(f"cache {number} is cut to {operation.rows}", expected="one length")
                self.cut(number, operation.rows[0])
            case "free":
                self._entry(number)
                del self._entries[number]

    def _add(self, number: int, entry: Entry) -> None:
        if number in self._entries or number == 0 or len(self._entries) >= self._max_entries:
            raise ProtocolError(
                f"a cache {number} beside {len(self._entries)}", expected=f"a new number, at most {self._max_entries}"
            )
        self._check_rows(entry.rows)
        self._entries[number] = entry

    def _check_rows(self, rows: int) -> None:
        if rows > self._max_rows:
            raise ProtocolError(f"a batch of {rows} rows", expected=f"at most the {self._max_rows} of the placement")

    def _entry(self, number: int) -> Entry:
        if number not in self._entries:
            raise ProtocolError(f"cache {number}", expected="one that there is")
        return self._entries[number]

    def _batch(self, number: int) -> Entry:
        entry = self._entry(number)
        if not entry.batched:
            raise ProtocolError(f"cache {number} is of one sequence", expected="a batch")
        return entry

    def _source(self, operation: CacheOperation) -> Entry:
        if len(operation.sources) != 1:
            raise ProtocolError(f"{operation.kind} from {len(operation.sources)} caches", expected="one")
        return self._entry(operation.sources[0])


def _as_entry(full: Cache) -> Entry:
    """A model's own list of caches, in which foreign layers' places alias others."""
    places: dict[int, int] = {}
    distinct: list[Any] = []
    for cache in full:
        if id(cache) not in places:
            places[id(cache)] = len(distinct)
            distinct.append(cache)
    return Entry(distinct, [places[id(cache)] for cache in full])


def cut_entry(entry: Entry, length: int, fresh: Callable[[], Entry]) -> None:
    """Cut a cache of one sequence back, which must be possible; to 0 always is."""
    if length == entry.length:
        return
    if length == 0:
        entry.distinct = fresh().distinct
    for own in entry.distinct:
        if length:
            own.trim(entry.length - length)
    entry.length = length


_PLAIN = (caches.KVCache, caches.RotatingKVCache, caches.BatchKVCache, caches.BatchRotatingKVCache)
"""Keys and values by position. A recurrent state (`ArraysCache`) has no positions: it is good for the one that its
session had reached, and cannot be cut."""


def _parts(cache: Any) -> Sequence[Any]:
    return cache.caches if isinstance(cache, caches.CacheList) else (cache,)


def _is_plain(cache: Any) -> bool:
    return all(type(part) in _PLAIN for part in _parts(cache))


def _can_be_taken(cache: Any) -> bool:
    """mlx-lm's own kinds, all filled: of others it is not known what a row of a batch is."""
    return all(
        (type(part) in _PLAIN and not part.empty())
        or (type(part) is caches.ArraysCache and all(array is not None for array in part.cache))
        for part in _parts(cache)
    )


def _take_rows(entry: Entry, rows: Sequence[int], positions: Mapping[int, int]) -> list[Entry]:
    """Caches of one sequence for some rows of an entry, which is of no use afterwards; [] where that cannot be."""
    if not rows or not all(_can_be_taken(own) for own in entry.distinct):
        return []
    if not entry.batched:
        return [entry]
    plain = all(_is_plain(own) for own in entry.distinct)
    if entry.prepared and (set(entry.prepared) != {entry.prepared_run} or not plain):
        return []  # in the middle of what was prepared: where each row's padding stands only mlx-lm knows
    singles = [Entry([], entry.pattern, sessions=[entry.sessions[row]]) for row in rows]
    for place, own in enumerate(entry.distinct):
        if entry.prepared:
            own.finalize()
        taken = [own.extract(row) for row in rows]
        mx.eval([array for single in taken for array in arrays_in(state_of(single))])
        entry.distinct[place] = None  # layer by layer: never more than one layer is there twice
        for single, cache in zip(singles, taken, strict=True):
            single.distinct.append(cache)
    for single in singles:
        position = positions[single.sessions[0]]
        parts = [part for cache in single.distinct for part in _parts(cache)]
        single.length = position if all(getattr(part, "offset", position) == position for part in parts) else 0
    return [single for single in singles if single.length]
