"""A pipeline in one process that loses stages: real head, stages and tail, function calls for channels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map
from tiny_models import VOCABULARY, make_model

from meshinfer.base.ids import InstanceId, ModelId, NodeId, SessionId
from meshinfer.engine import loader
from meshinfer.engine.stage import Stage
from meshinfer.engine.stepping import Stepper, as_tensors
from meshinfer.engine.structure import Structure
from meshinfer.pipeline.channel import Channel
from meshinfer.pipeline.errors import PipelineBroken
from meshinfer.pipeline.head import Head, max_step_tokens
from meshinfer.pipeline.tail import Tail
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.frames import Frame
from meshinfer.wire.records import OpenSession, RunnerRecord, Sampling, Token
from meshinfer.wire.runner_control import LoadSeat
from meshinfer.wire.steps import StepAnswer, StepControl

INSTANCE = InstanceId("0123456789abcdef")
CHUNK, CONCURRENCY, CONTEXT = 8, 4, 256


def sharp_model(name: str) -> nn.Module:
    """`make_model` with matrices so large that a single wrong key changes tokens; a test sees to that."""
    model = make_model(name)
    larger: Any = tree_map(lambda w: 3 * w if w.ndim > 1 else w, model.parameters())
    model.update(larger)
    mx.eval(model.parameters())
    return model


@dataclass(frozen=True)
class Loss:
    """A seat is lost in a step, counted over all epochs from 1, after so many seats have run it."""

    step: int
    victim: int
    reach: int


def wanted(number: int, prompt: Sequence[int], count: int, sampling: Sampling) -> OpenSession:
    return OpenSession(SessionId(f"{number:032x}"), INSTANCE, 1, tuple(prompt), 0, count, (), sampling)


class Origin:
    """Opens sessions, and opens them again; a stand-in for its channel to the head."""

    peer = "origin"

    def __init__(self, records: Sequence[OpenSession]) -> None:
        self.records = {record.session_id: record for record in records}
        self.emitted: dict[str, list[int]] = {record.session_id: [] for record in records}
        self.ended: set[str] = set()

    def send(self, _frame: Frame) -> bool:
        return True

    def hear(self, _origin: str, record: RunnerRecord) -> bool:
        if isinstance(record, Token):
            emitted = self.emitted[record.session_id]
            if record.index < len(emitted):
                assert emitted[record.index] == record.token_id, "a token has changed"
            else:
                assert record.index == len(emitted), "a token is missing"
                emitted.append(record.token_id)
            if record.finish:
                self.ended.add(record.session_id)
        return True

    def unfinished(self, epoch: int) -> list[OpenSession]:
        """As an origin asks for them on that epoch."""
        return [
            replace(
                record,
                epoch=epoch,
                token_ids=(*record.token_ids, *self.emitted[key]),
                emitted=len(self.emitted[key]),
                max_new_tokens=record.max_new_tokens - len(self.emitted[key]),
                resumed=epoch > 1,
            )
            for key, record in self.records.items()
            if key not in self.ended
        ]


class FragilePipeline:
    """A tiny model over three seats, in one process."""

    def __init__(self, name: str, losses: Sequence[Loss] = ()) -> None:
        self.name = name
        self.structure = structure = Structure.probe(sharp_model(name))
        self.edges = [0, structure.cut_points[0], structure.cut_points[-1], structure.layer_count]
        self.losses = {loss.step: loss for loss in losses}
        seats = tuple(Seat(NodeId(f"node{i}"), a, b) for i, (a, b) in enumerate(itertools.pairwise(self.edges)))
        placement = Placement(
            ModelId("tiny"), "digest", structure.layer_count, "pipeline", "libp2p", CONTEXT, CONCURRENCY, seats
        )
        self.load = LoadSeat("", INSTANCE, 1, placement, 0, "127.0.0.1", CHUNK, 0)
        self.steps = 0
        self.log: list[StepControl] = []
        self.keeps = True
        """False: stages forget everything when the pipeline breaks."""
        self.meddle: Callable[[StepControl], StepControl] = lambda control: control
        """What the network makes of a step's control part."""
        self.stages = [self.new_stage(seat) for seat in range(3)]

    def new_stage(self, seat: int) -> Stepper:
        start, end = self.edges[seat : seat + 2]
        stage = Stage(sharp_model(self.name), start, end, self.structure)
        stepper = Stepper(
            loader.Seat(stage, self.name, VOCABULARY, 0),
            max_rows=CONCURRENCY,
            max_tokens=max_step_tokens(self.load),
            context_tokens=CONTEXT,
        )
        stepper.take_place(seat, 3)
        return stepper

    def run(self, records: Sequence[OpenSession]) -> list[list[int]]:
        """The answers to `records`, whatever is lost on the way."""
        origin = Origin(records)
        while True:
            lost = self._epoch(origin)
            if lost is None:
                return [origin.emitted[record.session_id] for record in records]
            for seat, stepper in enumerate(self.stages):
                if seat == lost:
                    self.stages[seat] = self.new_stage(seat)
                elif self.keeps:
                    stepper.keep_sessions()
                else:
                    stepper.clear()
            self.load = replace(self.load, epoch=self.load.epoch + 1)

    def _epoch(self, origin: Origin) -> int | None:
        """Which seat was lost, or None if all is done."""
        self.tail = Tail(origin.hear, VOCABULARY, CONCURRENCY)
        self.head = Head(self.load, self.stages[0], self._run_step, lambda _seconds: False)
        for stepper in self.stages:
            stepper.sessions.count_down(0.0)
        for record in origin.unfinished(self.load.epoch):
            self.head.open(record, cast("Channel", origin))
        try:
            while self.head.has_work:
                self.head.turn()
        except PipelineBroken as broken:
            return broken.seat
        return None

    def _run_step(self, step: int, control: StepControl, tokens: Any) -> None:
        self.steps += 1
        self.log.append(control)
        loss = self.losses.get(self.steps)
        ids = () if tokens is None else as_tensors([tokens])
        outputs: Any = ()
        carried: Any = ()
        for seat, stepper in enumerate(self.stages):
            if loss is not None and seat == loss.reach:
                raise PipelineBroken("activations", loss.victim, "lost")
            if seat > 0:
                control = decode(StepControl, encode(self.meddle(control)), 1 << 20)
                tokens, carried = stepper.accept(control, (*ids, *as_tensors(outputs)))
            control, outputs = stepper.step(control, tokens, carried)
        given: Any = [] if tokens is None else tokens.tolist()
        answer = self.tail.finish_step(control, given, outputs)
        if loss is not None:
            raise PipelineBroken("samples", loss.victim, "lost")
        self.head.answered(step, decode(StepAnswer, encode(answer), 1 << 20))

    def assert_free(self) -> None:
        """No session holds a byte."""
        for stepper in self.stages:
            assert (stepper.caches.count, stepper.caches.size_bytes, stepper.sessions.size_bytes) == (0, 0, 0)
