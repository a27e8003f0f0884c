"""Whatever stage is lost, whenever: the answers are those of a run without a loss, and little is computed again."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import cast

import pytest
from resume_kit import CONCURRENCY, CONTEXT, FragilePipeline, Loss, Origin, wanted
from tiny_models import VOCABULARY

from meshinfer.base.errors import ProtocolError
from meshinfer.base.ids import SessionId
from meshinfer.engine import stepping
from meshinfer.engine.cache_table import Entry
from meshinfer.engine.keeping import KEPT_SECONDS, Keeper
from meshinfer.engine.replay_log import ReplayLog
from meshinfer.pipeline.channel import Channel as PipelineChannel
from meshinfer.pipeline.head import MAX_RETURNING, MAX_WAITING, Head
from meshinfer.pipeline.resuming import plan_return
from meshinfer.pipeline.tail import Tail
from meshinfer.testing import chaos_agents
from meshinfer.wire.frames import Frame
from meshinfer.wire.records import RUNNER_RECORDS, OpenSession, RunnerRecord, Sampling, SessionFailed
from meshinfer.wire.steps import Kept, SessionStart, StepControl

GREEDY = Sampling(seed=0, temperature=0)
SEEDED = Sampling(seed=7, temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.4)
SESSIONS = (
    wanted(1, [5, 6, 7], 14, GREEDY),
    wanted(2, list(range(1, 30)), 12, SEEDED),
    wanted(3, [9] * 17, 10, replace(SEEDED, seed=8)),
    wanted(4, [90], 13, GREEDY),
    wanted(5, list(range(60, 40, -1)), 9, GREEDY),
)
"""One more than run at once."""
FAMILIES = (
    "llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "gemma3n", "falcon_h1", "lfm2", "rwkv7", "nemotron_h",
    "qwen3_next",
)  # fmt: skip
RECURRENT = ("falcon_h1", "lfm2", "rwkv7", "nemotron_h", "qwen3_next")


@cache
def without_loss(name: str, records: Sequence[OpenSession] = SESSIONS) -> tuple[list[list[int]], FragilePipeline]:
    pipeline = FragilePipeline(name)
    return pipeline.run(records), pipeline


def first_steps(name: str) -> dict[str, int]:
    """Numbers of the steps in which things happen, without a loss."""
    log = without_loss(name)[1].log
    sampling = [number for number, control in enumerate(log, 1) if control.samples]
    return {"prefill": 2, "first token": sampling[0], "token k": sampling[len(sampling) // 2], "late": sampling[-3]}


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["head", "middle", "last"])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_survive_the_loss_of_any_stage(name: str, victim: int):
    answers, whole = without_loss(name)
    cases = list(itertools.product(first_steps(name).values(), (victim, 3)))
    for when, reach in cases if name == "llama" else random.Random(name + str(victim)).sample(cases, 2):
        pipeline = FragilePipeline(name, [Loss(when, victim, reach)])
        assert pipeline.run(SESSIONS) == answers, f"lost at step {when} of {len(whole.log)} after {reach} seats"
        pipeline.assert_free()


def test_answers_survive_one_loss_after_the_other():
    answers, _ = without_loss("llama")
    rng = random.Random(5)
    for _ in range(6):
        # Some fall into the steps that bring sessions back.
        steps = [1, 2, 3]
        while len(steps) < 7:
            steps.append(steps[-1] + rng.choice([1, 2, 3, 9]))
        losses = [Loss(step, rng.randrange(3), rng.randrange(4)) for step in steps]
        pipeline = FragilePipeline("llama", losses)
        assert pipeline.run(SESSIONS) == answers, losses
        pipeline.assert_free()


# --- what it costs --------------------------------------------------------------------------------


def recomputed(pipeline: FragilePipeline) -> list[int]:
    return [stage.recomputed_tokens for stage in pipeline.stages]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_only_the_lost_stage_computes_again(victim: int):
    """A session of 100 tokens: the others replay what they sent on, or do nothing."""
    long = (wanted(1, [(7 * n) % VOCABULARY for n in range(100)], 6, GREEDY),)
    answers = FragilePipeline("llama").run(long)
    pipeline = FragilePipeline("llama", [Loss(16, victim, victim)])
    assert pipeline.run(long) == answers
    costs = recomputed(pipeline)
    assert costs.pop(victim) >= 100
    assert costs == [0, 0]
    forgetful = FragilePipeline("llama", [Loss(16, victim, victim)])
    forgetful.keeps = False
    assert forgetful.run(long) == answers
    assert min(recomputed(forgetful)) >= 100


def test_a_broken_channel_costs_nothing():
    answers, _ = without_loss("llama")
    pipeline = FragilePipeline("llama", [Loss(first_steps("llama")["late"], victim=-1, reach=1)])
    assert pipeline.run(SESSIONS) == answers
    assert recomputed(pipeline) == [0, 0, 0]


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "gemma3n", *RECURRENT])
@pytest.mark.parametrize("reach", [0, 1, 2])
def test_what_cannot_be_cut_back_is_good_all_the_same(name: str, reach: int):
    """A window that has wrapped, a recurrent state: stages before the loss are a token ahead of those behind it."""
    answers, _ = without_loss(name)
    pipeline = FragilePipeline(name, [Loss(first_steps(name)["late"], reach, reach)])
    assert pipeline.run(SESSIONS) == answers
    costs = recomputed(pipeline)
    # Behind the loss nothing is computed again; before it, where nothing can be replayed, all that was lost.
    assert costs[reach + 1 :] == [0] * (2 - reach)
    assert costs[reach] > 0


def test_without_a_log_the_stage_before_computes_again():
    """The log may take what the reserved contexts leave; here they leave nothing."""
    answers, _ = without_loss("llama")
    pipeline = FragilePipeline("llama", [Loss(first_steps("llama")["late"], 2, 2)])
    for stage in pipeline.stages:
        stage.sessions._capacity_tokens = 0
    assert pipeline.run(SESSIONS) == answers
    assert min(recomputed(pipeline)) == max(recomputed(pipeline)) > 0


# --- what is kept, and how long -------------------------------------------------------------------


def broken(loss: Loss) -> FragilePipeline:
    """A pipeline whose sessions have just been lost."""
    pipeline = FragilePipeline("llama", [loss])
    pipeline.new_stage = lambda _seat: (_ for _ in ()).throw(InterruptedError)  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        pipeline.run(SESSIONS)
    for stage in pipeline.stages:
        stage.keep_sessions()
    return pipeline


def test_kept_sessions_lapse_and_make_room():
    first = broken(Loss(12, 0, 3)).stages[1]
    assert first.sessions.kept == CONCURRENCY
    assert first.caches.size_bytes == 0 < first.sessions.size_bytes
    assert not first.sessions.lapse(1e9)  # the pipeline is not whole yet
    first.sessions.count_down(100.0)
    assert not first.sessions.lapse(100.0 + KEPT_SECONDS - 1)
    assert first.sessions.lapse(100.0 + KEPT_SECONDS)
    assert (first.sessions.kept, first.sessions.size_bytes) == (0, 0)


def test_chaos_on_real_agents_waits_as_long_as_sessions_are_kept():
    assert chaos_agents.KEPT_SECONDS == KEPT_SECONDS


def test_a_new_session_takes_the_place_of_a_kept_one():
    pipeline = broken(Loss(12, 0, 3))
    pipeline.load = replace(pipeline.load, epoch=2)
    pipeline.stages[0].take_place(0, 3)
    strangers = [wanted(10 + n, [n + 1] * 20, 5, GREEDY) for n in range(2)]
    strangers = [replace(record, epoch=2) for record in strangers]
    answers = [FragilePipeline("llama").run([replace(record, epoch=1)])[0] for record in strangers]
    del pipeline.losses[12]
    assert pipeline.run(strangers) == answers
    assert pipeline.stages[1].sessions.kept == CONCURRENCY - 2


def test_logs_stay_within_what_the_contexts_leave():
    pipeline = FragilePipeline("llama")
    sessions = pipeline.stages[0].sessions
    token_bytes = 2 * 2 * 8 * 4  # keys and values of one layer's two heads of eight; the log takes as much
    most = 0

    def look(control: StepControl) -> StepControl:
        nonlocal most
        most = max(most, sessions.size_bytes)
        assert sessions.size_bytes <= (CONCURRENCY * CONTEXT - sum(sessions.positions().values())) * token_bytes
        return control

    pipeline.meddle = look
    pipeline.run([wanted(number, [number] * (CONTEXT - 20), 10, GREEDY) for number in range(1, 5)])
    assert most > 100 * token_bytes


@pytest.mark.parametrize(
    ("lengths", "counts", "step"),
    [((178, 197, 186, 200), (16, 15, 7, 15), 27), ((198, 190, 199, 176), (19, 13, 19, 10), 36)],
)
def test_a_promised_replay_is_given_however_full_the_contexts_are(
    lengths: Sequence[int], counts: Sequence[int], step: int
):
    """Others' steps fill the room, and drop no log that the head still counts on (the first is a run that once broke)."""
    records = [
        wanted(number, [(number + 7 * k) % 90 + 1 for k in range(length)], count, GREEDY)
        for number, (length, count) in enumerate(zip(lengths, counts, strict=True), 1)
    ]
    pipeline = FragilePipeline("llama", [Loss(step, 1, 1)])
    assert pipeline.run(records) == FragilePipeline("llama").run(records)
    assert any("replay" in control.parts for control in pipeline.log)
    pipeline.assert_free()


def test_the_longest_logs_go_but_none_that_is_promised():
    keeper = Keeper(3, 10)
    keeper.begin([SessionStart(n, SessionId(f"{n:032x}"), "origin", 9, 0, 1, (), GREEDY) for n in (1, 2, 3)])
    traces = [trace for n in (1, 2, 3) if (trace := keeper.running(n))]
    for trace, length in zip(traces, (9, 4, 6), strict=True):
        trace.tokens, trace.log = [1] * length, ReplayLog(())
        trace.log._data = [bytearray(10 * length)]
    traces[0].promised = True

    def logged(token_bytes: int) -> list[bool]:
        keeper.bound_logs(token_bytes)  # 11 of 30 tokens are left
        return [trace.log is not None for trace in traces]

    assert logged(18) == [True, True, True]  # 190 of 198 bytes
    assert logged(12) == [True, True, False]  # 130 of 132
    assert logged(1) == [True, False, False]
    traces[0].promised = False
    assert logged(1) == [False, False, False]


def listener(heard: list[RunnerRecord]) -> PipelineChannel:
    """The channel of an origin that keeps what it is told in `heard`."""

    class Channel(Origin):
        def send(self, frame: Frame) -> bool:
            heard.append(RUNNER_RECORDS.decode(frame.control, 1 << 20))
            return True

    return cast("PipelineChannel", Channel([]))


def test_a_session_that_is_open_still_may_be_asked_for_again():
    """Its origin lost the channel before this head did: that is no fault of the request, and is tried again."""
    heard: list[RunnerRecord] = []
    pipeline, record = FragilePipeline("llama"), SESSIONS[0]
    head = Head(pipeline.load, pipeline.stages[0], pipeline._run_step, lambda _seconds: False)
    old, new = listener(heard), listener(heard)
    head.open(record, old)
    head.open(replace(record, resumed=True), new)
    assert [(r.session_id, r.code) for r in heard if isinstance(r, SessionFailed)] == [(record.session_id, "refused")]
    head.origin_lost(old)
    head.open(replace(record, resumed=True), new)
    assert (len(heard), head.waiting) == (1, 1)


# --- who goes first -------------------------------------------------------------------------------


class Crowd(FragilePipeline):
    """Eight ask where four may run; stage 1 or the head is lost; those that ask again do so in the order of `first`."""

    def __init__(self, lost: int, first: Callable[[OpenSession], int]) -> None:
        super().__init__("llama", [Loss(14, lost, 2)])
        self.first = first
        self.begun: dict[str, int] = {}
        """Session → tokens that were out before the loss."""
        self.next_token_after: dict[str, int] = {}
        """Session → steps from the repair on."""

    def _epoch(self, origin: Origin) -> int | None:
        if self.load.epoch == 1:
            return super()._epoch(origin)
        records = sorted(origin.unfinished(self.load.epoch), key=self.first)
        self.begun = {record.session_id: record.emitted for record in records if record.emitted}
        before, steps = {key: len(tokens) for key, tokens in origin.emitted.items()}, self.steps
        self.tail = Tail(origin.hear, VOCABULARY, CONCURRENCY)
        self.head = Head(self.load, self.stages[0], self._run_step, lambda _seconds: False)
        for stepper in self.stages:
            stepper.sessions.count_down(math.inf)
        while records or self.head.has_work:
            if records:  # one a turn, as they come over their channels
                self.head.open(records.pop(0), cast("PipelineChannel", origin))
            self.head.turn()
            for key, tokens in origin.emitted.items():
                if len(tokens) > before[key]:
                    self.next_token_after.setdefault(key, self.steps - steps)
        return None


CROWD = tuple(wanted(number, [number] * (20 if number <= CONCURRENCY else 100), 30, GREEDY) for number in range(1, 9))
"""Those that have to wait have prompts so long that none of them has begun before all have asked."""


@pytest.mark.parametrize("lost", [0, 1], ids=["head", "middle"])
@pytest.mark.parametrize("first", ["running", "waiting"])
def test_answers_that_have_begun_go_on_first_whoever_asks_first(lost: int, first: str):
    answers, _ = without_loss("llama", CROWD)
    pipeline = Crowd(lost, lambda record: (record.emitted == 0) == (first == "running"))
    assert pipeline.run(CROWD) == answers
    assert len(pipeline.begun) == CONCURRENCY
    last_begun = max(pipeline.next_token_after[key] for key in pipeline.begun)
    assert last_begun < min(after for key, after in pipeline.next_token_after.items() if key not in pipeline.begun)
    costs = recomputed(pipeline)
    assert costs.pop(lost) > 0
    if lost == 1:
        assert costs == [0, 0], "a stage computes again what it kept"
    pipeline.assert_free()


def test_a_place_is_held_for_what_was_kept_as_long_as_it_may_take_to_come_back():
    pipeline = broken(Loss(12, 0, 3))
    stepper = pipeline.stages[1]  # has kept four, and is the head of what follows
    stepper.take_place(0, 3)
    head = Head(pipeline.load, stepper, pipeline._run_step, lambda _seconds: False)
    origin = cast("PipelineChannel", Origin([]))
    stepper.sessions.count_down(math.inf)
    head.open(wanted(10, [1, 2], 5, GREEDY), origin)
    assert (head.waiting, head.has_work) == (1, False)
    head.open(replace(SESSIONS[1], resumed=True), origin)
    assert head.has_work
    head.cancel(SESSIONS[1].session_id, origin)
    assert not head.has_work
    stepper.sessions.count_down(-math.inf)
    assert head.has_work


def test_a_crowd_that_waits_sends_no_answer_away_that_has_begun():
    heard: list[RunnerRecord] = []
    pipeline, channel = FragilePipeline("llama"), listener(heard)
    head = Head(pipeline.load, pipeline.stages[0], pipeline._run_step, lambda _seconds: False)
    crowd = [wanted(number, [1, 2], 5, GREEDY) for number in range(MAX_WAITING + 1)]
    for record in crowd:
        head.open(record, channel)
    assert [(r.session_id, r.code) for r in heard if isinstance(r, SessionFailed)] == [
        (crowd[-1].session_id, "queue_full")
    ]
    begun = wanted(1000, [1, 2, 3], 5, GREEDY)
    for number in range(MAX_RETURNING):
        head.open(replace(begun, session_id=SessionId(f"{1000 + number:032x}"), emitted=1, resumed=True), channel)
    assert head.waiting == MAX_RETURNING, "also what has begun is bounded"
    assert len(heard) == 1 + MAX_WAITING
    assert [session.record.emitted for session in head._waiting][: CONCURRENCY + 1] == [1] * (CONCURRENCY + 1)


# --- what is found out ----------------------------------------------------------------------------


def test_other_tokens_under_the_same_id_get_no_other_text():
    """What is kept is believed by its tokens, not by the session's name."""
    other = wanted(1, [5, 6, 8, 9], 6, GREEDY)
    expected = FragilePipeline("llama").run([other])
    pipeline = broken(Loss(12, 0, 3))
    pipeline.load = replace(pipeline.load, epoch=2)
    assert pipeline.run([replace(other, epoch=2, resumed=True)]) == expected
    assert any(control.rows and control.rows[0][1] == 2 for control in pipeline.log[12:])  # two are the same


def tampered(change: str) -> FragilePipeline:
    """The first step of that kind, after a loss, is changed on its way from the head to the next stage."""
    pipeline = FragilePipeline("llama", [Loss(first_steps("llama")["late"], 1, 1)])
    done: list[str] = []

    def meddle(control: StepControl) -> StepControl:
        if done or not (control.parts or control.recalls):
            return control
        ((number, position, count),) = control.rows
        if change == "kept" and control.recalls:
            control = replace(control, kept=())
        elif change == "position" and control.parts:
            control = replace(control, rows=((number, position + 1, count),))
        elif change == "session" and control.parts:
            control = replace(control, rows=((number + 1, position, count),))
        elif change == "parts" and control.parts:
            control = replace(control, parts=control.parts[:2])
        elif change == "skip" and control.parts:
            control = replace(control, parts=("skip", "skip", "skip"))
        elif change == "cache" and control.parts:
            control = replace(control, cache=control.cache + 100)
        else:
            return control
        done.append(change)
        return control

    pipeline.meddle = meddle
    return pipeline


@pytest.mark.parametrize("change", ["kept", "position", "session", "parts", "skip", "cache"])
def test_a_head_that_says_something_else_is_not_followed(change: str):
    with pytest.raises(ProtocolError):
        tampered(change).run(SESSIONS)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "gemma3n"])
def test_a_wrong_position_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch):
    """A mutation: one token is cut too much, and the stage does not notice."""
    real = stepping.cut_entry

    def one_short(entry: Entry, length: int, fresh: Callable[[], Entry]) -> None:
        real(entry, max(0, length - 1), fresh)
        entry.length = length

    answers, _ = without_loss(name)
    monkeypatch.setattr(stepping, "cut_entry", one_short)
    step = first_steps(name)["token k"]
    assert any(FragilePipeline(name, [Loss(step, victim, 3)]).run(SESSIONS) != answers for victim in range(3))


# --- the plan -------------------------------------------------------------------------------------


def kept_cases() -> list[tuple[list[Kept], int, int]]:
    rng = random.Random(3)
    cases: list[tuple[list[Kept], int, int]] = []
    for _ in range(3000):
        tokens = rng.randrange(1, 40)
        stages: list[Kept] = []
        for _ in range(rng.randrange(1, 6)):
            position = rng.choice([0, rng.randint(0, tokens), tokens - 1, tokens])
            stages.append(Kept(position, rng.choice([0, position]), rng.random() < 0.6))
        cases.append((stages, tokens, rng.randrange(1, 12)))
    return cases


def test_a_plan_brings_every_stage_to_one_position_with_what_it_has():
    """Played through: nobody gets activations that nobody has, nobody cuts what it cannot, chunks are bounded."""
    for kept, tokens, chunk in kept_cases():
        plan = plan_return(kept, len(kept), tokens, chunk)
        assert plan.position <= tokens
        held = [stage.position for stage in kept]
        logs = [stage.position if stage.replays else 0 for stage in kept]
        for piece in plan.pieces:
            assert 0 < piece.end - piece.start <= chunk
            for index, part in enumerate(piece.parts):
                if part == "compute":
                    assert held[index] == piece.start or kept[index].lowest <= piece.start or piece.start == 0
                    assert held[index] >= piece.start
                    assert index == 0 or piece.parts[index - 1] in ("compute", "replay")
                    held[index] = piece.end
                else:
                    assert held[index] >= piece.end
                if part == "replay":
                    assert logs[index] >= piece.end
                    assert piece.parts[index + 1] == "compute"
            assert piece.samples == (piece.end == tokens)
            assert not piece.samples or (piece.parts[-1] == "compute" and piece.end - piece.start == 1)
        assert any(piece.samples for piece in plan.pieces) == (plan.position == tokens)
        for index, stage in enumerate(kept):
            assert held[index] >= plan.position
            assert held[index] == plan.position or stage.lowest <= plan.position or plan.position == 0


def test_a_plan_computes_nothing_that_all_have():
    assert plan_return([Kept(9, 0, True)] * 3, 3, 9, 4).pieces == ()
    assert plan_return([Kept(8, 8), Kept(9, 0, True), Kept(9, 3)], 3, 9, 4).pieces == ()
    plan = plan_return([Kept(10, 0, True), Kept(0), Kept(8)], 3, 10, 100)
    assert [piece.parts for piece in plan.pieces] == [("replay", "compute", "skip"), ("replay", "compute", "compute")]


@pytest.mark.parametrize("kept", [[Kept(3)], [Kept(11), Kept(0)], [Kept(3, 4), Kept(0)]])
def test_stages_that_cannot_have_said_that_are_not_believed(kept: list[Kept]):
    with pytest.raises(ProtocolError):
        plan_return(kept, 2, 10, 4)
