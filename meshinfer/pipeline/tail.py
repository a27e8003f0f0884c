"""The last stage's part: logits become tokens, tokens go to their origins.

It alone decides what a token is and when a session ends; the head follows its answers. A token is a
function of the logits and of (seed, index) only, so a session gives the same text alone, in company, and
after it was resumed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshinfer.base.errors import MeshinferError, ProtocolError
from meshinfer.engine.sampling import Draw, Drawn, draw_tokens, remembers
from meshinfer.wire.records import RunnerRecord, SessionFailed, Token
from meshinfer.wire.steps import SampledToken, SessionStart, StepAnswer, StepControl

SendRecord = Callable[[str, RunnerRecord], bool]
"""Send a record to the origin of that fingerprint; False if it has no channel here."""


@dataclass(slots=True)
class _Session:
    """One session whose tokens are taken here."""

    start: SessionStart
    index: int
    """Of the next token among the emitted ones."""
    remembers: bool
    seen: list[int] = field(default_factory=list[int])
    """Its tokens so far, if its penalties ask for them; else empty."""

    @property
    def draw(self) -> Draw:
        start = self.start
        return Draw(start.sampling, self.index, self.seen, start.prompt_tokens - start.emitted)


class Tail:
    """The sessions of an instance, at its last stage."""

    def __init__(self, send: SendRecord, vocab_size: int, max_sessions: int) -> None:
        self._send = send
        self._vocab_size = vocab_size
        self._max_sessions = max_sessions
        self._sessions: dict[int, _Session] = {}
        """All and only sessions that have started and not ended."""
        self.tokens = 0
        """Taken since the start."""

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def finish_step(self, control: StepControl, token_ids: Sequence[Sequence[int]], logits: Any) -> StepAnswer:
        """What a step that went through all stages gives.

        Args:
            control: of the step.
            token_ids: what went in, a row for each of the step's; padding too.
            logits: [rows, vocabulary] if the step samples, else None.

        Raises:
            ProtocolError: the step speaks of sessions that are not here.
        """
        for number in control.ended:
            self._sessions.pop(number, None)
        self._begin(control.started)
        rows = [self._row(number) for number, _, _ in control.rows]
        for row, ids, (_, position, count) in zip(rows, token_ids, control.rows, strict=True):
            if row.remembers:
                if position > len(row.seen):
                    raise ProtocolError(f"tokens at {position}", expected=f"the next ones, at {len(row.seen)}")
                row.seen[position : position + count] = ids[:count]  # a session that was recalled has brought all
        if not control.samples:
            return StepAnswer(kept=control.kept)
        drawn = self._draw(rows, logits)
        return StepAnswer(tuple(self._emit(row, token) for row, token in zip(rows, drawn, strict=True)))

    def fail_all(self, code: str, what: str) -> None:
        """End every session here."""
        for session in self._sessions.values():
            self._send(session.start.origin, SessionFailed(session.start.session_id, code, what))
        self._sessions.clear()

    def _begin(self, started: Sequence[SessionStart]) -> None:
        for start in started:
            ids = [token for token, _ in start.sampling.logit_bias]
            if max(ids, default=0) >= self._vocab_size or start.emitted > start.prompt_tokens:
                raise ProtocolError(f"session {start.session_id} with a bias for token {max(ids, default=0)}")
            if start.number in self._sessions or len(self._sessions) >= self._max_sessions:
                raise ProtocolError(f"{len(self._sessions)} sessions and one more", expected="a new one that fits")
            self._sessions[start.number] = _Session(start, start.emitted, remembers(start.sampling))

    def _row(self, number: int) -> _Session:
        if number not in self._sessions:
            raise ProtocolError(f"a row of session {number}", expected="one that has started and not ended")
        return self._sessions[number]

    def _draw(self, rows: Sequence[_Session], logits: Any) -> list[Drawn | MeshinferError]:
        try:
            return list(draw_tokens(logits, [row.draw for row in rows], self._vocab_size))
        except MeshinferError as error:
            if len(rows) == 1:
                return [error]
        # Somebody's logits are not numbers: that session fails, the others go on.
        return [self._draw([row], logits[index : index + 1])[0] for index, row in enumerate(rows)]

    def _emit(self, session: _Session, drawn: Drawn | MeshinferError) -> SampledToken:
        start = session.start
        if isinstance(drawn, MeshinferError):
            self._send(start.origin, SessionFailed(start.session_id, drawn.code, str(drawn)[:2048]))
            del self._sessions[start.number]
            return SampledToken(start.number, 0, "failed")
        finish = ""
        if drawn.token_id in start.stop_token_ids:
            finish = "stop"
        elif session.index + 1 - start.emitted >= start.max_new_tokens:
            finish = "length"
        token = Token(start.session_id, session.index, drawn.token_id, finish, drawn.logprob, drawn.top_logprobs)
        session.index += 1
        self.tokens += 1
        heard = self._send(start.origin, token)
        if finish or not heard:
            del self._sessions[start.number]
        return SampledToken(start.number, drawn.token_id, finish if heard else "origin_lost")
