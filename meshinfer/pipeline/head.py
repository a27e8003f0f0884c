"""The head's part: sessions come in, and the pipeline is kept busy with steps.

    waiting ──room──► running ──the last stage says so──► gone
       │    ──room──► coming back ──► running              │
       └──────cancelled, its origin lost, refused──────────┘

Who waits is let in in the order of coming, but after a repair all come at once, in any order. So what has begun goes
first: its client has read a part of it. It takes the place of one of which nothing has come yet, if need be (that one
waits again), and for what was kept here of others a place is held, for as long as they may take to come back.

Which sessions run together is mlx-lm's decision (`engine.batching`); it asks for one forward after the
other. Each becomes a *step*, with the next number, and every step is answered by the last stage, in order.
A chunk of prompts need not be waited for: as many steps as there are stages may be on their way, so that
all of them work at once on a long prompt. A step that samples is waited for, since the next one starts
from its tokens.

A session that its origin had open before is recalled: the stages say what they kept of it, and it is
brought back with what is missing (`pipeline.resuming`), a chunk a turn beside the running ones, before it
joins the batch.

A failed session is that session's failure. A lost neighbour is everyone's: `PipelineBroken`.
"""

from __future__ import annotations

import logging
import time
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from meshinfer.base.errors import ProtocolError
from meshinfer.engine.batching import Batcher, CacheHandle, Forward
from meshinfer.engine.stepping import Stepper
from meshinfer.pipeline.channel import Channel
from meshinfer.pipeline.errors import PipelineBroken
from meshinfer.pipeline.patience import Patience
from meshinfer.pipeline.resuming import Return, plan_return
from meshinfer.planning.memory import PROMPTS_AT_ONCE
from meshinfer.wire.frames import Frame, FrameKind
from meshinfer.wire.records import RUNNER_RECORDS, OpenSession, Prefilled, RunnerRecord, SessionFailed
from meshinfer.wire.runner_control import LoadSeat
from meshinfer.wire.steps import MAX_STARTED, Kept, SessionStart, StepAnswer, StepControl

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Sessions that wait for room; as many as an origin accepts requests. A new one is told queue_full beyond that..."""
MAX_RETURNING = 4 * MAX_WAITING
"""...and one that was open before beyond this: all that ran and waited here, and what comes from three lost instances of
the model beside. Its origin asks again until its deadline, so what this bounds is memory, some 40 bytes a token each."""


@dataclass(slots=True)
class _Session:
    number: int
    record: OpenSession
    channel: Channel
    """Of its origin."""
    has_begun: bool
    """Tokens of it came, or this stage kept something of it."""


def _rank(session: _Session) -> int:
    """Lower ones go first: what has begun, then what was open before, then what is new."""
    return 0 if session.has_begun else 1 if session.record.resumed else 2


@dataclass(slots=True)
class _Returning:
    """A session that was recalled, and has not joined the batch."""

    cache: CacheHandle
    """That its pieces run on, on every stage."""
    plan: Return | None = None
    """None until the stages have said what they kept."""
    done: int = 0
    """Pieces that have been asked for."""
    next_token: int | None = None
    """If the last piece sampled, once it is answered."""

    @property
    def is_next(self) -> bool:
        """Something can be done for it now: all that it depends on has been answered."""
        if self.plan is None:
            return False
        sampled = self.done == len(self.plan.pieces) > 0 and self.plan.pieces[-1].samples
        return not sampled or self.next_token is not None


@dataclass(slots=True)
class _Pending:
    """A step on its way."""

    step: int
    control: StepControl
    sent_at: float
    was_idle: bool
    """Nothing else was on its way when it was sent."""

    @property
    def chunk_tokens(self) -> int:
        return 0 if self.control.samples or self.control.recalls else sum(count for _, _, count in self.control.rows)


class Head:
    """The sessions of an instance, at its first stage.

    Args:
        load: what this instance is.
        stepper: this stage's layers, of which the head only asks what may come in and what is kept.
        run_step: starts a step: runs this stage's layers and passes it on. With one stage, `answered` is
            called before it returns.
        wait: handles one thing that other seats sent, which may call `answered`; False if nothing came in
            that many seconds. Both raise PipelineBroken.
    """

    def __init__(
        self,
        load: LoadSeat,
        stepper: Stepper,
        run_step: Callable[[int, StepControl, Any], None],
        wait: Callable[[float], bool],
    ) -> None:
        self._load = load
        self._stepper = stepper
        self._run_step = run_step
        self._wait = wait
        self._max_running = load.placement.concurrency
        self._stages = len(load.placement.seats)
        self._waiting: deque[_Session] = deque()
        """By rank; of one rank in the order of coming."""
        self._running: dict[int, _Session] = {}
        """By number; all and only sessions that are in the batcher, or on their way into it."""
        self._returning: dict[int, _Returning] = {}
        """By number; those of the running ones that are on their way."""
        self._numbers = 0
        self._started: list[SessionStart] = []
        """Running, and no step has told the last stage of them yet."""
        self._ended: list[int] = []
        """Ended, and no step has told the stages yet."""
        self._step = 0
        self._pending: deque[_Pending] = deque()
        """Not answered yet, in order."""
        self._answered_at = 0.0
        self._finished: list[int] = []
        """The last stage said so, and they are still in the batcher."""
        self._tokens: list[int] = []
        """Of the step that samples, once it is answered; in the order of its rows."""
        self._patience = Patience(self._stages)
        self._batcher = Batcher(
            self._forward,
            self._take_tokens,
            max_rows=self._max_running,
            # One, where a model's state does not tolerate padding.
            prompts_at_once=min(PROMPTS_AT_ONCE, self._max_running) if stepper.tolerates_padding else 1,
            chunk_tokens=load.prefill_chunk_tokens,
        )

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """A turn would do something."""
        can_let_in = bool(self._waiting) and self._has_place_for(self._waiting[0])
        return bool(self._running or can_let_in or self._ended or self._batcher.has_operations)

    def expect(self, seconds_per_token: float) -> None:
        """This stage needs so long for a token of a prompt; of the others nothing is known before their first answer."""
        self._patience.expect(seconds_per_token)

    # --- sessions -------------------------------------------------------------------------------

    def open(self, record: OpenSession, channel: Channel) -> None:
        """An origin wants this session; it is told if it cannot be."""
        if refusal := self._refusal(record):
            _send(channel, SessionFailed(record.session_id, *refusal))
            return
        self._numbers += 1
        has_begun = record.emitted > 0 or (record.resumed and self._stepper.sessions.keeps(record.session_id))
        session = _Session(self._numbers, record, channel, has_begun)
        insort_right(self._waiting, session, key=_rank)

    def cancel(self, session_id: str, channel: Channel) -> None:
        """Its origin does not want it any more; an unknown one has ended already."""
        self._end_where(lambda s: s.channel is channel and s.record.session_id == session_id)

    def origin_lost(self, channel: Channel) -> None:
        """Nobody is there any more for the sessions of this channel."""
        self._end_where(lambda session: session.channel is channel)

    def fail_all(self, code: str, what: str) -> None:
        """Tell every origin that its sessions end here."""
        for session in (*self._waiting, *self._running.values()):
            _send(session.channel, SessionFailed(session.record.session_id, code, what))
        self._waiting.clear()
        self._running.clear()

    def _refusal(self, record: OpenSession) -> tuple[str, str] | None:
        """(code, what) if this session cannot be."""
        placement = self._load.placement
        if (record.instance_id, record.epoch) != (self._load.instance_id, self._load.epoch):
            return "refused", (
                f"instance {record.instance_id} epoch {record.epoch} was asked for; "
                f"here is {self._load.instance_id} epoch {self._load.epoch}"
            )
        prompt, asked = len(record.token_ids), record.max_new_tokens
        if prompt + asked > placement.context_tokens:
            return "bad_input", (
                f"a prompt of {prompt} tokens and {asked} new ones are {prompt + asked}; "
                f"expected at most {placement.context_tokens}, for which this instance has reserved memory"
            )
        greatest = max((*record.token_ids, *(token for token, _ in record.sampling.logit_bias)))
        if greatest >= self._stepper.vocab_size:
            return "bad_input", f"token id {greatest}; expected ids of the vocabulary, below {self._stepper.vocab_size}"
        if record.emitted > prompt:
            return "bad_input", f"{record.emitted} emitted tokens among {prompt}; expected no more than there are"
        known = (session.record.session_id for session in (*self._waiting, *self._running.values()))
        if record.session_id in known:
            # Not its client's fault: its origin has lost a channel, and this side of it has not ended yet.
            return "refused", f"session {record.session_id} is open already; expected it once the old one has ended"
        if len(self._waiting) >= (MAX_RETURNING if record.resumed else MAX_WAITING):
            return "queue_full", f"{len(self._running)} sessions run and {len(self._waiting)} wait"
        return None

    def _end_where(self, matches: Callable[[_Session], bool]) -> None:
        self._waiting = deque(session for session in self._waiting if not matches(session))
        self._end([session.number for session in self._running.values() if matches(session)])

    def _end(self, numbers: list[int]) -> None:
        """Sessions that the last stage does not know to have ended."""
        self._batcher.remove(numbers)
        untold = {start.number for start in self._started}
        self._started = [start for start in self._started if start.number not in numbers]
        self._ended += [number for number in numbers if number not in untold]
        for number in numbers:
            self._returning.pop(number, None)
            del self._running[number]

    # --- steps ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """One turn of the batch, or what is left to tell the stages when nothing runs.

        Raises:
            PipelineBroken: no session can go on.
        """
        self._let_in()
        self._bring_back()
        if self._batcher.count:
            self._batcher.advance()
        elif self._pending and self._returning and not self._can_bring_back:
            self._wait_for_answer()
        self._batcher.remove(self._finished)
        for number in self._finished:
            self._returning.pop(number, None)
            self._running.pop(number, None)
        self._ended += self._finished
        self._finished = []
        if not self._running and (self._ended or self._batcher.has_operations):
            # No step will follow that could bring it: the caches must not wait for the next request.
            self._issue(StepControl(), None)
            while self._pending:
                self._wait_for_answer()

    def _let_in(self) -> None:
        while self._waiting and len(self._started) < MAX_STARTED:
            first = self._waiting[0]
            if not self._has_place_for(first) and not (first.has_begun and self._make_place()):
                return
            self._admit(self._waiting.popleft())

    def _has_place_for(self, session: _Session) -> bool:
        held = 0 if session.has_begun else self._stepper.sessions.places_held(time.monotonic())
        return len(self._running) + held < self._max_running

    def _make_place(self) -> bool:
        """Let the youngest session that has not begun wait again; False if there is none."""
        if all(session.has_begun for session in self._running.values()):
            return False
        while self._pending:  # its first token may be on its way
            self._wait_for_answer()
        young = [session for session in self._running.values() if not session.has_begun]
        if not young:
            return False
        self._end([young[-1].number])
        self._numbers += 1  # to the stages it will be another one
        again = replace(young[-1], number=self._numbers)
        insort_left(self._waiting, again, key=_rank)
        return True

    def answered(self, step: int, answer: StepAnswer) -> None:
        """The last stage's answer.

        Raises:
            ProtocolError: it does not answer the step that has been on its way longest.
        """
        if not self._pending or step != self._pending[0].step:
            raise ProtocolError(f"an answer to step {step}", expected=f"to {[p.step for p in self._pending][:1]}")
        pending = self._pending.popleft()
        now = time.monotonic()
        own_seconds = now - max(pending.sent_at, self._answered_at)
        control = pending.control
        if control.cache and not control.recalls and not control.parts:  # others say nothing of these
            self._patience.observe(pending.chunk_tokens, own_seconds, was_idle=pending.was_idle)
        self._answered_at = now
        rows = control.rows
        if control.recalls:
            self._recalled(rows[0], answer.kept)
            return
        if control.samples:
            if [token.session for token in answer.tokens] != [number for number, _, _ in rows]:
                raise ProtocolError(f"tokens of {len(answer.tokens)} sessions", expected=f"of the step's {len(rows)}")
            if max(token.token_id for token in answer.tokens) >= self._stepper.vocab_size:
                raise ProtocolError(
                    "a token that is not in the vocabulary", expected=f"below {self._stepper.vocab_size}"
                )
            self._tokens = [token.token_id for token in answer.tokens]
            if control.parts and (returning := self._returning.get(rows[0][0])):
                returning.next_token = self._tokens[0]
            for token in answer.tokens:
                if session := self._running.get(token.session):
                    session.has_begun = True
                if token.finish:
                    self._finished.append(token.session)
                if token.finish == "origin_lost":
                    self._tell(token.session, "peer_lost", "the origin has no channel to the last stage")
        for number, position, count in () if control.samples else rows:
            if session := self._running.get(number):
                total = len(session.record.token_ids)
                _send(session.channel, Prefilled(session.record.session_id, position + count, total))

    def _admit(self, session: _Session) -> None:
        record = session.record
        self._running[session.number] = session
        self._started.append(
            SessionStart(
                number=session.number,
                session_id=record.session_id,
                origin=session.channel.peer,
                prompt_tokens=len(record.token_ids),
                emitted=record.emitted,
                max_new_tokens=record.max_new_tokens,
                stop_token_ids=record.stop_token_ids,
                sampling=record.sampling,
                resumed=record.resumed,
            )
        )
        if not record.resumed:
            self._batcher.insert(session.number, record.token_ids)
            return
        self._returning[session.number] = returning = _Returning(self._batcher.set_aside())
        row = (session.number, 0, len(record.token_ids))
        self._ask(StepControl(cache=returning.cache.number, rows=(row,), recalls=True), record.token_ids)

    def _recalled(self, row: tuple[int, int, int], kept: Sequence[Kept]) -> None:
        number, _, tokens = row
        plan = plan_return(kept, self._stages, tokens, self._load.prefill_chunk_tokens)
        if returning := self._returning.get(number):
            returning.plan = plan
            log.info("session %d comes back at %d of %d tokens: %s", number, plan.position, tokens, kept)

    @property
    def _can_bring_back(self) -> bool:
        return any(returning.is_next for returning in self._returning.values())

    def _bring_back(self) -> None:
        """The next piece of the first session that is on its way; or it joins the batch."""
        for number, returning in self._returning.items():
            if (plan := returning.plan) is None or not returning.is_next or number in self._finished:
                continue
            token_ids = self._running[number].record.token_ids
            if returning.next_token is not None:
                token_ids = (*token_ids, returning.next_token)
            if returning.done < len(plan.pieces):
                piece = plan.pieces[returning.done]
                returning.done += 1
                row = (number, piece.start, piece.end - piece.start)
                control = StepControl(
                    cache=returning.cache.number, rows=(row,), samples=piece.samples, parts=piece.parts
                )
                self._ask(control, token_ids[piece.start : piece.end])
            else:
                self._batcher.insert(number, token_ids, returning.cache, plan.position)
                del self._returning[number]
            return

    def _forward(self, forward: Forward) -> None:
        control = StepControl(cache=forward.cache, rows=forward.rows, samples=forward.samples)
        self._issue(control, forward.tokens)
        if not forward.samples:
            self._wait_for_room()

    def _ask(self, control: StepControl, token_ids: Sequence[int]) -> None:
        """A step of one session's own."""
        self._issue(control, mx.array([list(token_ids)], mx.int32))
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        while len(self._pending) > self._stages:
            self._wait_for_answer()

    def _take_tokens(self) -> list[int]:
        while self._pending:
            self._wait_for_answer()
        return self._tokens

    def _issue(self, control: StepControl, tokens: Any) -> None:
        """Start the next step; it brings the stages what they do not know yet."""
        brought = self._batcher.take_operations()
        started, self._started = tuple(self._started), []
        ended, self._ended = tuple(self._ended), []
        control = replace(control, operations=brought, started=started, ended=ended)
        self._step += 1
        pending = _Pending(self._step, control, time.monotonic(), was_idle=not self._pending)
        self._pending.append(pending)
        self._run_step(self._step, control, tokens)
        pending.sent_at = time.monotonic()

    def _wait_for_answer(self) -> None:
        oldest = self._pending[0]
        allowed = self._patience.allowance(oldest.chunk_tokens)
        left = max(oldest.sent_at, self._answered_at) + allowed - time.monotonic()
        if left <= 0 or not self._wait(left):
            raise PipelineBroken(
                "samples", self._stages - 1, f"step {oldest.step} was not answered within {allowed:.1f} s"
            )

    def _tell(self, number: int, code: str, what: str) -> None:
        if session := self._running.get(number):
            _send(session.channel, SessionFailed(session.record.session_id, code, what))


def max_step_tokens(load: LoadSeat) -> int:
    """Tokens of the largest step that this instance's head may ask for."""
    concurrency = load.placement.concurrency
    return max(concurrency, min(PROMPTS_AT_ONCE, concurrency) * load.prefill_chunk_tokens)


def _send(channel: Channel, record: RunnerRecord) -> None:
    channel.send(Frame(FrameKind.RECORD, 0, 0, RUNNER_RECORDS.encode(record)))
