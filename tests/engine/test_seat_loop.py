"""The loop of a runner: what ends a session, a channel, an epoch, and neither the process nor its loaded layers; and
what its agent hears of a rehearsal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from resume_kit import FragilePipeline, sharp_model, wanted
from tiny_models import VOCABULARY

from meshinfer.base.errors import ProtocolError
from meshinfer.engine import loader
from meshinfer.engine.stage import Stage
from meshinfer.engine.stepping import Stepper
from meshinfer.pipeline.channel import Channel
from meshinfer.pipeline.mailbox import Arrived, Mailbox, Opened
from meshinfer.pipeline.progress import Progress
from meshinfer.pipeline.seat_loop import SeatLoop
from meshinfer.topology.placement import Seat
from meshinfer.transport.certificates import fingerprint
from meshinfer.wire.frames import Frame, FrameKind
from meshinfer.wire.records import (
    ORIGIN_RECORDS,
    RUNNER_RECORDS,
    OpenSession,
    RunnerRecord,
    Sampling,
    SessionFailed,
    Token,
)
from meshinfer.wire.runner_control import ChannelLost, Heartbeat, OriginGone, Rebind, RunnerMessage
from meshinfer.wire.steps import StepControl


class OriginChannel:
    """Where its records end: here."""

    role, seat, dialled = "origin", -1, False

    def __init__(self, peer: str = "origin") -> None:
        self.peer = peer
        self.records: list[RunnerRecord] = []
        self.ends: list[str] = []

    def start(self, *_given: Any) -> None: ...

    def end(self, reason: str) -> None:
        self.ends.append(reason)

    def finish(self, _reason: str) -> None: ...

    def send(self, frame: Frame) -> bool:
        self.records.append(RUNNER_RECORDS.decode(frame.control, 1 << 20))
        return True


def one_seat() -> tuple[FragilePipeline, Stepper]:
    """All of a tiny model on one seat, and what it was loaded as."""
    pipeline = FragilePipeline("llama")
    layers = pipeline.structure.layer_count
    placement = replace(pipeline.load.placement, seats=(Seat(pipeline.load.placement.seats[0].node_id, 0, layers),))
    pipeline.load = replace(pipeline.load, placement=placement)
    stage = Stage(sharp_model("llama"), 0, layers, pipeline.structure)
    stepper = Stepper(loader.Seat(stage, "llama", VOCABULARY, 0), max_rows=4, max_tokens=64, context_tokens=256)
    return pipeline, stepper


def test_a_step_of_its_own_that_cannot_be_ends_the_epoch_and_not_the_process(monkeypatch: pytest.MonkeyPatch):
    pipeline, stepper = one_seat()
    load, mailbox, said = pipeline.load, Mailbox(), list[RunnerMessage]()
    real = stepper.step

    def wrong(control: StepControl, *given: Any) -> Any:
        if control.samples:
            raise ProtocolError("session 1 replays 8 tokens", expected="as many as were kept")
        return real(control, *given)

    def open_session(record: OpenSession) -> OriginChannel:
        origin = OriginChannel()
        channel = cast("Channel", origin)
        mailbox.put(Opened(channel))
        mailbox.put(Arrived(channel, Frame(FrameKind.RECORD, 0, 0, ORIGIN_RECORDS.encode(record))))
        return origin

    def work_until(loop: SeatLoop, origin: OriginChannel, kind: type[Any]) -> Any:
        for _ in range(100):
            loop._work()
            if found := [record for record in origin.records if isinstance(record, kind)]:
                return found[-1]
        raise AssertionError(origin.records)

    record = wanted(1, [5, 6, 7], 3, Sampling(seed=0, temperature=0))
    loop = SeatLoop(load, stepper, mailbox, Progress(), said.append)
    monkeypatch.setattr(stepper, "step", wrong)
    failure = work_until(loop, open_session(record), SessionFailed)
    assert (failure.code, "as many as were kept" in failure.what) == ("peer_lost", True)
    assert [(m.role, m.seat) for m in said if isinstance(m, ChannelLost)] == [("activations", 0)]
    assert (stepper.caches.count, stepper.sessions.kept, stepper.sessions.size_bytes) == (0, 0, 0)

    # The agent lets the same layers go on as the next epoch's.
    monkeypatch.setattr(stepper, "step", real)
    rebind = Rebind(2, load.placement, 0)
    mailbox.put(rebind)
    assert loop.run() == rebind
    again = SeatLoop(replace(load, epoch=2), stepper, mailbox, Progress(), said.append)
    origin = open_session(replace(record, epoch=2, resumed=True))
    while not cast("Token", work_until(again, origin, Token)).finish:
        pass
    assert [r.index for r in origin.records if isinstance(r, Token)] == [0, 1, 2]


def test_an_origin_that_is_back_keeps_its_new_channel():
    """Its agent took it for gone, and then offered it another channel: it opens before the runner has read its mail."""
    pipeline, stepper = one_seat()
    mailbox = Mailbox()
    loop = SeatLoop(pipeline.load, stepper, mailbox, Progress(), list[RunnerMessage]().append)
    before, after = (OriginChannel(fingerprint(b"of the origin")) for _ in range(2))
    mailbox.put(Opened(cast("Channel", before)))
    loop._work()
    mailbox.put(OriginGone(b"of the origin"))
    mailbox.put(Opened(cast("Channel", after)))
    loop._work()
    assert before.ends
    assert not after.ends


def test_its_agent_knows_how_much_it_holds_while_it_rehearses(monkeypatch: pytest.MonkeyPatch):
    pipeline, stepper = one_seat()
    mailbox, progress, beats = Mailbox(), Progress(), list[Heartbeat]()
    real = stepper.rehearse

    def rehearse(tokens: int) -> None:
        beats.append(progress.heartbeat())
        real(tokens)

    monkeypatch.setattr(stepper, "rehearse", rehearse)
    mailbox.put(Rebind(2, pipeline.load.placement, 0))
    SeatLoop(pipeline.load, stepper, mailbox, progress, list[RunnerMessage]().append).run()
    assert [beat.active_bytes > 0 for beat in beats] == [True]
