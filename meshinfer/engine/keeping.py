"""What a stage knows of its sessions, and what it keeps of them when the pipeline breaks.

    started ──▶ running ──ended──▶ (gone)
                   │ the pipeline broke              ▲ lapsed, or another session needs the place
                   ▼                                 │
                 kept ──────────────────────────────▶┘
                   │ its origin opens it again, here
                   ▼
                running

Beside its caches a running session has a *trace*: the tokens whose keys and values are in the caches, and
the stage's outputs for them (`engine.replay_log`), for a stage after this one that may be lost. What is
kept is known by the session's id and believed by its tokens: caches are good exactly as far as the tokens
of the session that is opened again are the same ones.

**Bounds.** Nothing here takes memory that was not promised. A kept session stands in the place of one that
could run: running and kept ones together are never more than the placement's concurrency. Replay logs live
in what the reserved contexts leave: (concurrency × context − tokens held) × bytes of keys and values of a
token; when that is full, the longest logs go, and a lost neighbour's session costs a recomputation here.
A log that was promised to the head stays until its session has joined the batch: it fitted when it was
promised (else there was no promise), and beside it others grow by a step a turn at most, for the turns that its
session takes to come back. By so much, and never by more than the promised logs themselves, may all of it
exceed the bound; with the next step after the joining it is within it again.
Time: kept sessions go KEPT_SECONDS after the pipeline was whole again. For the first HOLD_SECONDS of them the head holds
their places: it lets in nothing new that would push one out. (A head that was lost itself does not know of them. A later
stage may then lose what it kept, of a session whose every token the new head has to compute in any case.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshinfer.base.errors import ProtocolError
from meshinfer.base.ids import SessionId
from meshinfer.engine.cache_table import Entry
from meshinfer.engine.replay_log import ReplayLog
from meshinfer.wire.steps import SessionStart

KEPT_SECONDS = 20.0
"""From the repair on. Origins open their sessions again within a second or two of it, but some may have to wait for
room. Raising it holds promised memory longer after a client has gone."""

HOLD_SECONDS = 3.0
"""From the repair on: origins wait up to a second before they ask again, then dial. For a client that went meanwhile a
new request may wait so long."""


@dataclass(slots=True)
class Trace:
    """What is known of one session."""

    session_id: SessionId
    computed_before: bool = False
    """All that it starts with: tokens came of it already."""
    tokens: list[int] = field(default_factory=list[int])
    """Of the positions that its caches hold."""
    log: ReplayLog | None = None
    """Outputs for all of `tokens`; None on the last stage, and where they were not kept from the start."""
    promised: bool = False
    """The head was told that the log can be replayed, and the session has not joined the batch since."""
    caches: Entry | None = None
    """While it does not run: since the pipeline broke, until it is recalled."""

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        if self.log is not None:
            self.log.cut(length)

    def shared_length(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, are those that the caches hold."""
        pairs = zip(self.tokens, tokens, strict=False)
        differing = (position for position, (own, given) in enumerate(pairs) if own != given)
        return next(differing, min(len(self.tokens), len(tokens)))


class Keeper:
    """The sessions of one stage.

    Args:
        max_sessions: running and kept; the placement's concurrency.
        context_tokens: reserved for each.
    """

    def __init__(self, max_sessions: int, context_tokens: int) -> None:
        self._max_sessions = max_sessions
        self._capacity_tokens = max_sessions * context_tokens
        self._running: dict[int, Trace] = {}
        """By number; all and only sessions that a step has started and none has ended."""
        self._kept: dict[SessionId, Trace] = {}
        """Since the pipeline broke, the longest kept first; each with its caches."""
        self._whole_since: float | None = None
        """When the pipeline came to be whole again; None while it is broken."""

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Of what would not be here if nothing were kept."""
        traces = (*self._running.values(), *self._kept.values())
        caches = sum(trace.caches.size_bytes for trace in traces if trace.caches)
        return caches + sum(trace.log.size_bytes for trace in traces if trace.log)

    def keeps(self, session_id: SessionId) -> bool:
        return session_id in self._kept

    def places_held(self, now: float) -> int:
        """For sessions that may be opened again any moment."""
        if self._whole_since is None or now >= self._whole_since + HOLD_SECONDS:
            return 0
        return len(self._kept)

    def running(self, number: int) -> Trace | None:
        return self._running.get(number)

    def begin(self, started: Sequence[SessionStart]) -> None:
        """Sessions start, or come back.

        Raises:
            ProtocolError: one more than may run, or one that runs already.
        """
        for start in started:
            if start.number in self._running or len(self._running) >= self._max_sessions:
                raise ProtocolError(f"{len(self._running)} sessions and {start.number}", expected="a new one that fits")
            before = self._kept.pop(start.session_id, None)
            trace = before if before and start.resumed else Trace(start.session_id)
            trace.computed_before = start.resumed and start.emitted > 0
            self._running[start.number] = trace
        while self._kept and len(self._kept) + len(self._running) > self._max_sessions:
            del self._kept[next(iter(self._kept))]

    def end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._running.pop(number, None)

    def positions(self) -> dict[int, int]:
        """Of each session that runs, how many tokens its caches hold."""
        return {number: len(trace.tokens) for number, trace in self._running.items() if trace.caches is None}

    def keep(self, caches: Mapping[int, Entry]) -> None:
        """The pipeline is broken.

        Args:
            caches: by number, of those sessions whose caches could be had.
        """
        self._whole_since = None
        for number, trace in self._running.items():
            trace.promised = False
            trace.caches = trace.caches or caches.get(number)
            if trace.caches is not None:
                self._kept[trace.session_id] = trace
        self._running.clear()

    def count_down(self, now: float) -> None:
        """The pipeline is whole again."""
        self._whole_since = now

    def lapse(self, now: float) -> bool:
        """Forget what nobody came back for; whether there was anything."""
        if not self._kept or self._whole_since is None or now < self._whole_since + KEPT_SECONDS:
            return False
        self._kept.clear()
        return True

    def bound_logs(self, token_bytes: int) -> None:
        """Drop the longest logs until the rest have room, but none that is promised.

        Args:
            token_bytes: of keys and values of a token.
        """
        traces = [*self._running.values(), *self._kept.values()]
        room = (self._capacity_tokens - sum(len(trace.tokens) for trace in traces)) * token_bytes
        sizes = {id(trace): trace.log.size_bytes for trace in traces if trace.log}
        free = [trace for trace in traces if not trace.promised]
        for trace in sorted(free, key=lambda trace: sizes.get(id(trace), 0), reverse=True):
            if sum(sizes.values()) <= room:
                return
            trace.log = None
            sizes.pop(id(trace), None)
