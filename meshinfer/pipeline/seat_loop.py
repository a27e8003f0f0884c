"""A seat at work: the loop of the one MLX thread of a runner.

    origins ──records──► head ──steps──► stage ──steps──► … ──steps──► last stage ──records──► origins
                          ▲                                               │
                          └───────────────────answers─────────────────────┘

Every seat runs its layers (`engine.stepping`); the first one also has the sessions (`pipeline.head`), the
last one also takes the tokens (`pipeline.tail`); with one seat it is the same process, and steps and
answers are function calls. Whatever other threads bring comes through the mailbox.

A channel between seats that breaks ends the instance: every session is told, caches are freed but for what
is good if a session is opened again (`engine.keeping`), the other seats' channels are closed so that the
news runs along the pipeline, and the agent is told. The process stays, for its agent to decide: it ends it,
or lets the loaded layers go on as a seat of the next epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshinfer.base.errors import ProtocolError
from meshinfer.base.threads import pause
from meshinfer.engine.memory import read_memory
from meshinfer.engine.stepping import Stepper, as_tensors
from meshinfer.pipeline.channel import Channel
from meshinfer.pipeline.errors import PipelineBroken
from meshinfer.pipeline.head import Head
from meshinfer.pipeline.mailbox import Arrived, Broken, Mail, Mailbox, Opened
from meshinfer.pipeline.progress import Progress
from meshinfer.pipeline.tail import Tail
from meshinfer.transport.arrivals import Arrival
from meshinfer.transport.certificates import fingerprint
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.frames import MAX_CONTROL_BYTES, Frame, FrameKind, Tensor
from meshinfer.wire.messages import ChannelRole
from meshinfer.wire.records import (
    MAX_RECORD_BYTES,
    ORIGIN_RECORDS,
    RUNNER_RECORDS,
    OpenSession,
    RunnerRecord,
    SessionFailed,
)
from meshinfer.wire.runner_control import ChannelLost, Linked, LinkSample, LoadSeat, OriginGone, Rebind, RunnerMessage
from meshinfer.wire.steps import StepAnswer, StepControl

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""Between two looks at the memory when there is nothing to do; as often as heartbeats go out."""
MAIL_PER_TURN = 64
"""So that a flood of requests cannot keep the running sessions from their turn."""
REFRESH_SECONDS = 0.2
"""Counting the caches' bytes takes about 0.1 ms for 30 layers: not after every step."""
REASON_FIRST_SECONDS = 0.1
"""Between telling whom it dialled in vain and closing its other channels: a close is at the neighbour's in a millisecond,
gossip takes some more, and whoever repairs the instance before it knows the reason makes it again as it was."""
REHEARSED_TOKENS = 16
"""Of the step that each runner runs for nobody before its first one: a token of a longer step takes less, so how long any
may take is known. Ten layers of the small model take 0.11 s for it, and 0.04 s for one token (a core of a server)."""


class _Rebound(Exception):
    """Unwinds whatever is being done, a step that waits for its answer too."""

    def __init__(self, message: Rebind) -> None:
        self.message = message
        super().__init__()


class SeatLoop:
    """One seat of an instance, at work.

    Args:
        load: what to be.
        stepper: the loaded layers.
        mailbox: what other threads bring.
        progress: what heartbeats tell.
        tell: sends to the agent, without waiting.
    """

    def __init__(
        self,
        load: LoadSeat,
        stepper: Stepper,
        mailbox: Mailbox,
        progress: Progress,
        tell: Callable[[RunnerMessage], None],
    ) -> None:
        self._load = load
        self._stepper = stepper
        self._mailbox = mailbox
        self._progress = progress
        self._tell = tell
        self._last_seat = len(load.placement.seats) - 1
        index, last = load.seat_index, self._last_seat
        stepper.take_place(index, last + 1)
        self._head = Head(load, stepper, self._run_step, self._wait) if index == 0 else None
        concurrency = load.placement.concurrency
        self._tail = Tail(self._send_record, stepper.vocab_size, concurrency) if index == last else None
        self._needed: dict[tuple[ChannelRole, int, bool], str] = {}
        """Channels to other seats that this one needs: (role, seat, dialled by us)."""
        if last > 0:
            if index > 0:
                self._needed["activations", index - 1, False] = "steps in"
            if index < last:
                self._needed["activations", index + 1, True] = "steps out"
            if index == last:
                self._needed["samples", 0, True] = "answers out"
            if index == 0:
                self._needed["samples", last, False] = "answers in"
        self._seats: dict[str, Channel] = {}
        """Open channels to other seats, by their name in `_needed`."""
        self._origins: dict[str, Channel] = {}
        """Open channels to origins, by the fingerprint of their certificates."""
        self._step = 0
        """The last one that came."""
        self._broken = ""
        """Why this instance cannot go on; empty while it can."""
        self._refreshed_at = 0.0

    @property
    def _is_linked(self) -> bool:
        """Every channel that it needs is open, or was."""
        return len(self._seats) == len(self._needed)

    def run(self) -> Rebind:
        """Work until the agent wants these layers to be another epoch's seat; nothing is held for this one then."""
        if self._is_linked:
            self._linked()
        self._progress.be_idle()
        try:
            while True:
                self._work()
        except _Rebound as rebound:
            self._drop_sessions(f"the instance goes on as epoch {rebound.message.epoch}")
            self._stepper.keep_sessions()  # meanwhile the origins are told
            for seat in self._seats.values():
                seat.end("its epoch is over")
            for origin in self._origins.values():
                origin.finish("its epoch is over")  # each is told first that its sessions are over
            return rebound.message

    def _work(self) -> None:
        head = self._head
        try:
            handled = 0
            busy = head is not None and head.has_work
            while handled < MAIL_PER_TURN and (mail := self._mailbox.take(0 if busy or handled else IDLE_SECONDS)):
                self._handle(mail)
                handled += 1
            if head is not None and head.has_work:
                head.turn()
        except PipelineBroken as error:
            self._break(error)
        except ProtocolError as error:  # of its own step: what comes from others is looked at in `_receive`
            self._break(PipelineBroken("activations", self._load.seat_index, f"its own step failed: {error}"))
            # What it believes of its sessions is wrong somewhere: from nothing they come back for certain.
            self._stepper.clear()
        self._refresh()

    # --- what comes -----------------------------------------------------------------------------

    def _wait(self, timeout_seconds: float) -> bool:
        """For the head, in the middle of a step: let the other seats' mail be handled, not the origins'."""
        mail = self._mailbox.take(timeout_seconds, seats_only=True)
        if mail is not None:
            self._handle(mail)
        return mail is not None

    def _handle(self, mail: Mail) -> None:
        match mail:
            case Opened(channel):
                self._start(channel)
            case Broken("origin", _, reason, channel):
                if channel is not None:
                    self._origin_lost(channel, reason)
            case Broken(role, seat, reason, channel, unanswered):
                if channel is None or channel in self._seats.values():
                    raise PipelineBroken(role, seat, reason, unanswered=unanswered)
            case Arrived(channel, frame):
                if channel in self._seats.values() or self._origins.get(channel.peer) is channel:
                    self._receive(channel, frame)
            case OriginGone(certificate_der):
                if (origin := self._origins.get(fingerprint(certificate_der))) is not None:
                    origin.end("its node has vanished")
            case Rebind():
                raise _Rebound(mail)

    def _start(self, channel: Channel) -> None:
        def deliver(frame: Frame) -> None:
            self._mailbox.put(Arrived(channel, frame))

        def on_end(reason: str) -> None:
            self._mailbox.put(Broken(channel.role, channel.seat, reason, channel))

        def on_arrival(arrival: Arrival) -> None:
            self._tell(LinkSample(channel.seat, arrival.half_bytes, arrival.half_seconds))

        name = self._needed.get((channel.role, channel.seat, channel.dialled))
        if channel.role == "origin":
            if (before := self._origins.get(channel.peer)) is not None:
                before.end("the same origin has opened another")
            self._origins[channel.peer] = channel
        elif name is None or name in self._seats or self._broken:
            channel.end(f"seat {self._load.seat_index} has no place for it")
            return
        else:
            self._seats[name] = channel
        if name == "steps in":
            channel.start(self._stepper.max_payload_bytes, deliver, on_end, on_arrival)
        else:
            channel.start(0, deliver, on_end)
        if name is not None and self._is_linked:
            self._linked()

    def _linked(self) -> None:
        self._stepper.sessions.count_down(time.monotonic())
        self._tell(Linked(self._load.epoch))
        if not self._progress.prompt_tokens:  # while origins are told that it is ready: no pause is longer for it
            self._rehearse()
        if self._head is not None:
            self._head.expect(self._progress.prompt_seconds / self._progress.prompt_tokens)

    def _rehearse(self) -> None:
        self._refresh()  # by how many bytes it holds, its agent judges how long this may take
        self._progress.begin_step(REHEARSED_TOKENS)
        self._stepper.rehearse(REHEARSED_TOKENS)
        self._progress.end_step(decode=False)

    def _receive(self, channel: Channel, frame: Frame) -> None:
        try:
            if channel.role == "origin":
                self._receive_record(channel, frame)
            elif self._broken:
                return
            elif channel.role == "activations":
                self._receive_step(frame)
            else:
                assert self._head is not None
                self._check_epoch(frame)
                self._head.answered(frame.step, decode(StepAnswer, frame.control, MAX_CONTROL_BYTES[frame.kind]))
        except ProtocolError as error:
            channel.end(f"what came is not right: {error}")
            if channel.role != "origin":
                raise PipelineBroken(channel.role, channel.seat, str(error)) from error

    def _receive_record(self, channel: Channel, frame: Frame) -> None:
        record = ORIGIN_RECORDS.decode(frame.control, MAX_RECORD_BYTES)
        if isinstance(record, OpenSession):
            if self._head is not None and self._is_linked and not self._broken:
                self._head.open(record, channel)
            else:
                code = "peer_lost" if self._broken else "refused"
                what = self._broken or f"seat {self._load.seat_index} takes no sessions; expected the head, linked"
                channel.send(_record_frame(SessionFailed(record.session_id, code, what[:2048])))
        elif self._head is not None and not self._broken:
            self._head.cancel(record.session_id, channel)

    def _receive_step(self, frame: Frame) -> None:
        self._check_epoch(frame)
        if frame.step != self._step + 1:
            raise ProtocolError(f"step {frame.step}", expected=f"step {self._step + 1}")
        self._step = frame.step
        control = decode(StepControl, frame.control, MAX_CONTROL_BYTES[frame.kind])
        self._progress.begin_step(_tokens_of(control))
        tokens, carried = self._stepper.accept(control, frame.tensors)
        self._compute(frame.step, control, tokens, carried, frame.control, frame.tensors[:1])

    def _check_epoch(self, frame: Frame) -> None:
        if frame.epoch != self._load.epoch:
            raise ProtocolError(f"a frame of epoch {frame.epoch}", expected=f"epoch {self._load.epoch}")

    # --- what is done ---------------------------------------------------------------------------

    def _run_step(self, step: int, control: StepControl, tokens: Any) -> None:
        """The head's own layers."""
        self._progress.begin_step(_tokens_of(control))
        if self._last_seat == 0:
            self._compute(step, control, tokens, (), b"", ())
        else:
            self._compute(step, control, tokens, (), encode(control), () if tokens is None else as_tensors([tokens]))

    def _compute(
        self,
        step: int,
        control: StepControl,
        tokens: Any,
        carried: Sequence[Any],
        encoded: bytes,
        token_tensor: tuple[Tensor, ...],
    ) -> None:
        """Run the layers and pass on what comes out."""
        said, outputs = self._stepper.step(control, tokens, carried)
        if said is not control:
            encoded = encode(said)
        if self._tail is None:
            frame = Frame(FrameKind.STEP, self._load.epoch, step, encoded, (*token_tensor, *as_tensors(outputs)))
            self._seats["steps out"].send(frame)
        else:
            answer = self._tail.finish_step(said, [] if tokens is None else tokens.tolist(), outputs)
            self._progress.tokens = self._tail.tokens
            if self._head is not None:
                self._head.answered(step, answer)
            else:
                self._seats["answers out"].send(Frame(FrameKind.ANSWER, self._load.epoch, step, encode(answer)))
        self._progress.end_step(decode=control.samples)
        self._refresh()

    def _send_record(self, origin: str, record: RunnerRecord) -> bool:
        channel = self._origins.get(origin)
        return channel is not None and channel.send(_record_frame(record))

    # --- what ends ------------------------------------------------------------------------------

    def _origin_lost(self, channel: Channel, reason: str) -> None:
        log.info("an origin's channel ended: %s", reason)
        if self._origins.get(channel.peer) is channel:
            del self._origins[channel.peer]
        if self._head is not None and not self._broken:
            self._head.origin_lost(channel)

    def _break(self, error: PipelineBroken) -> None:
        """No session of this instance can go on."""
        if self._broken:
            return
        self._broken = str(error)
        self._progress.be_idle()  # a step that could not be passed on
        log.warning("the pipeline is broken: %s", error)
        self._tell(ChannelLost(self._load.epoch, error.role, error.seat, error.reason[:512], error.unanswered))
        self._drop_sessions(self._broken)
        if error.unanswered:
            pause(REASON_FIRST_SECONDS)
        for channel in self._seats.values():
            channel.end("the pipeline is broken")
        self._stepper.keep_sessions()  # takes some milliseconds: the news goes first

    def _drop_sessions(self, why: str) -> None:
        for part in (self._head, self._tail):
            if part is not None:
                part.fail_all("peer_lost", why[:2048])
        if self._head is not None:
            # What was on its way never comes back; nothing of the old batch may be looked at again.
            self._head = Head(self._load, self._stepper, self._run_step, self._wait)
        self._progress.busy_since = None
        self._refreshed_at = 0.0

    def _refresh(self) -> None:
        """Bring the counters up to date, if it is time."""
        now = time.monotonic()
        if now - self._refreshed_at < REFRESH_SECONDS:
            return
        self._refreshed_at = now
        self._stepper.sessions.lapse(now)
        progress = self._progress
        progress.recomputed_tokens = self._stepper.recomputed_tokens
        progress.kept_bytes = self._stepper.sessions.size_bytes
        progress.active_bytes = read_memory().active
        progress.cache_bytes = self._stepper.caches.size_bytes
        if self._head is not None:
            progress.sessions, progress.waiting = self._head.running, self._head.waiting
        elif self._tail is not None:
            progress.sessions = self._tail.sessions
        else:
            progress.sessions = self._stepper.caches.rows


def _tokens_of(control: StepControl) -> int:
    """Of prompts."""
    return 0 if control.recalls or control.samples else sum(count for _, _, count in control.rows)


def _record_frame(record: RunnerRecord) -> Frame:
    return Frame(FrameKind.RECORD, 0, 0, RUNNER_RECORDS.encode(record))
