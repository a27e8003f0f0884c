"""A runner serves whoever was meant, outlives strangers and liars, and does not outlive its agent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from pipeline_kit import (
    EPOCH,
    INSTANCE,
    LAYERS,
    PATIENCE,
    PipelineUnderTest,
    RunnerUnderTest,
    plain_greedy,
    session,
    write_tiny_llama,
)

from meshinfer.base.errors import PeerLost, Refused
from meshinfer.base.ids import ModelId, NodeId
from meshinfer.testing.machine_faults import hang, why_not_hang
from meshinfer.topology.placement import Placement, Seat
from meshinfer.transport.certificates import make_certificate
from meshinfer.transport.origin import open_origin_channel
from meshinfer.transport.tls import Listener, SecureSocket, dial
from meshinfer.wire.codec import encode
from meshinfer.wire.frames import Frame, FrameKind, Tensor, TensorSpec, encode_frame
from meshinfer.wire.records import Prefilled, Token
from meshinfer.wire.runner_control import (
    ChannelLost,
    DialChannel,
    Heartbeat,
    Linked,
    Listening,
    Loaded,
    Loading,
    LoadSeat,
    Rebind,
    RunnerFailed,
    StopRunner,
)
from meshinfer.wire.steps import CacheOperation, StepControl

IN_VAIN = 0.5

StartPipeline = Callable[..., PipelineUnderTest]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def runner() -> Iterator[RunnerUnderTest]:
    runner = RunnerUnderTest()
    yield runner
    runner.close()


@pytest.fixture
def start_pipeline() -> Iterator[StartPipeline]:
    """Starts pipelines whose processes end with the test, also one that fails."""
    with contextlib.ExitStack() as ends:

        def start(model: Path, cuts: Sequence[int] = ()) -> PipelineUnderTest:
            pipeline = PipelineUnderTest(model, cuts)
            ends.callback(pipeline.close)
            return pipeline

        yield start


def load_message(model: Path, seats: int = 1, index: int = 0) -> LoadSeat:
    cuts = [0, LAYERS] if seats == 1 else [0, 3, LAYERS]
    placement = Placement(
        ModelId("tiny"), "digest", LAYERS, "pipeline", "libp2p", 256, 4,
        tuple(Seat(NodeId(f"node{i}"), cuts[i], cuts[i + 1]) for i in range(seats)),
    )  # fmt: skip
    return LoadSeat(str(model), INSTANCE, EPOCH, placement, index, "127.0.0.1", 16, 0)


def test_every_runner_knows_its_pace_before_its_first_session(start_pipeline: StartPipeline, model: Path):
    """So that its agent and its head know how long a first step may take; and nothing of that step is kept."""
    pipeline = start_pipeline(model, (2, 4))
    for runner in pipeline.runners:
        beat: Heartbeat = runner.wait_for(Heartbeat, lambda beat: beat.prompt_tokens > 0)
        assert beat.prompt_seconds > 0
        assert (beat.step_seconds, beat.sessions, beat.cache_bytes, beat.busy_seconds) == (0.0, 0, 0, 0.0)
    origin = pipeline.origin()
    assert origin.ids(origin.open(session([1, 2], 8))) == plain_greedy(model, [1, 2], 8)


# --- strangers ------------------------------------------------------------------------------------


def test_strangers_on_its_port_leave_it_serving(start_pipeline: StartPipeline, model: Path):
    pipeline = start_pipeline(model)
    origin = pipeline.origin()
    expected = make_certificate()
    offer = pipeline.expect(0, "origin", -1, expected.der)
    for stranger in (
        lambda: dial(offer, make_certificate(), IN_VAIN),  # another certificate
        lambda: dial(replace(offer, token=os.urandom(32)), expected, IN_VAIN),  # another token
    ):
        with pytest.raises((PeerLost, Refused)):
            stranger()
    dial(offer, expected, PATIENCE).close()
    with pytest.raises((PeerLost, Refused)):
        dial(offer, expected, IN_VAIN)  # the same token again
    pipeline.expect(0, "origin", -1, make_certificate().der)
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\xff\xff" + bytes(300), b""):
        with socket.create_connection(("127.0.0.1", offer.port), PATIENCE) as plain:
            plain.sendall(garbage)
    assert origin.ids(origin.open(session([1, 2], 8))) == plain_greedy(model, [1, 2], 8)


def test_an_origin_that_talks_nonsense_is_shown_out(start_pipeline: StartPipeline, model: Path):
    pipeline = start_pipeline(model)
    origin = pipeline.origin()
    record = origin.open(session([1, 2], 200))
    origin.next_token(record)
    for nonsense in (
        os.urandom(100),
        b"MF\x02" + bytes(50),
        encode_frame(Frame(FrameKind.RECORD, 0, 0, b"\xc1"))[0],
        encode_frame(Frame(FrameKind.STEP, EPOCH, 1, encode(StepControl())))[0],
    ):
        liar = pipeline.dial(0, "origin", -1, make_certificate())
        liar.send_all(nonsense)
        assert liar.recv_into(memoryview(bytearray(1)), PATIENCE) == 0
        liar.close()
    assert len(origin.tokens(record)) == 199


async def test_an_agent_gets_tokens_straight_from_the_last_stage(start_pipeline: StartPipeline, model: Path):
    pipeline = await trio.to_thread.run_sync(start_pipeline, model, (3,))
    me = make_certificate()
    record = session([4, 4, 2], 9)
    with trio.fail_after(PATIENCE):
        last = await open_origin_channel(pipeline.expect(1, "origin", -1, me.der), me, timeout_seconds=PATIENCE)
        head = await open_origin_channel(pipeline.expect(0, "origin", -1, me.der), me, timeout_seconds=PATIENCE)
        await head.send(record)
        tokens = [await last.receive() for _ in range(9)]
        assert [t.token_id for t in tokens if isinstance(t, Token)] == plain_greedy(model, [4, 4, 2], 9)
        assert await head.receive() == Prefilled(record.session_id, 2, 3)
        await head.aclose()
        await last.aclose()


# --- neighbours -----------------------------------------------------------------------------------


class Neighbours:
    """The test is seat 0 of a pipeline whose seat 1 is a real runner."""

    def __init__(self, model: Path, runner: RunnerUnderTest) -> None:
        self.runner = runner
        self.certificate = make_certificate()
        self.listener = Listener("127.0.0.1", self.certificate, self._admit)
        runner.send(load_message(model, seats=2, index=1))
        listening: Listening = runner.wait_for(Listening)
        offer = PipelineUnderTest.expect_of(runner, "activations", 0, self.certificate.der)
        self.steps = dial(offer, self.certificate, PATIENCE)
        back = PipelineUnderTest.offer_of(self.listener, self.certificate, "samples", 1, listening.certificate_der)
        runner.send(DialChannel("samples", 0, back))
        runner.wait_for(Linked)

    def _admit(self, _expected: object, secure: SecureSocket) -> None:
        secure.send_all(b"\x01")
        self.answers = secure

    def send(self, frame: Frame) -> None:
        for piece in encode_frame(frame):
            self.steps.send_all(piece)


def step(
    control: StepControl | None = None, number: int = 1, epoch: int = EPOCH, ids: bytes | None = None, **shape: object
) -> Frame:
    """A prefill step of one row of two tokens, right unless something is changed."""
    new = (CacheOperation("new", 1), CacheOperation("merge", 2, (1,)))
    control = control or StepControl(new, 2, ((1, 0, 2),))
    ids_shape = shape.get("ids_shape", (1, 2))
    carried_shape = shape.get("carried_shape", (1, 2, 32))
    ids_spec = TensorSpec("int32", ids_shape)  # type: ignore[arg-type]
    carried_spec = TensorSpec(str(shape.get("dtype", "float32")), carried_shape)  # type: ignore[arg-type]
    tensors = (
        Tensor(ids_spec, memoryview(ids if ids is not None else bytes(ids_spec.size_bytes))),
        Tensor(carried_spec, memoryview(bytes(carried_spec.size_bytes))),
    )
    return Frame(FrameKind.STEP, epoch, number, encode(control), tensors)


MALFORMED: dict[str, Callable[[], Frame]] = {
    "stale epoch": lambda: step(epoch=EPOCH - 1),
    "a step left out": lambda: step(number=2),
    "an id beyond the vocabulary": lambda: step(ids=(10**6).to_bytes(4, "little") * 2),
    "another kind of frame": lambda: Frame(FrameKind.ANSWER, EPOCH, 1, b""),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_frame_closes_the_channel_and_not_the_process(model: Path, runner: RunnerUnderTest, name: str):
    neighbours = Neighbours(model, runner)
    neighbours.send(MALFORMED[name]())
    lost: ChannelLost = runner.wait_for(ChannelLost)
    assert (lost.role, lost.seat) == ("activations", 0)
    assert neighbours.steps.recv_into(memoryview(bytearray(1)), PATIENCE) == 0
    runner.wait_for(Heartbeat, lambda beat: beat.cache_bytes == 0 and beat.busy_seconds == 0)
    assert runner.process.poll() is None


# --- loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["head", "middle", "last"])
def test_a_killed_seat_is_told_at_once(start_pipeline: StartPipeline, model: Path, victim: int):
    pipeline = start_pipeline(model, (2, 4))
    origin = pipeline.origin()
    records = [origin.open(session([n], 400)) for n in range(3)]
    for record in records:
        origin.next_token(record)
    pipeline.runners[victim].kill()
    for record in records:
        assert origin.failure(record).code == "peer_lost"
    for index, survivor in enumerate(pipeline.runners):
        if index != victim:
            survivor.wait_for(ChannelLost)
            survivor.wait_for(Heartbeat, lambda beat: beat.cache_bytes == 0 and beat.sessions == 0)
    if victim == 1:
        lost: ChannelLost = pipeline.runners[0].wait_for(ChannelLost)
        # By its own channel; or by the last seat's, which has closed its own when it lost the same neighbour.
        assert (lost.role, lost.seat) in (("activations", 1), ("samples", 2))
        late = origin.open(session([5], 5))
        assert origin.failure(late).code == "peer_lost"


def test_a_stopped_seat_is_noticed_by_the_deadline(start_pipeline: StartPipeline, model: Path):
    pipeline = start_pipeline(model, (2, 4))
    origin = pipeline.origin()
    record = origin.open(session([1], 400))
    for _ in range(8):
        origin.next_token(record)
    pipeline.runners[1].kill(signal.SIGSTOP)
    lost: ChannelLost = pipeline.runners[0].wait_for(ChannelLost)
    assert (lost.role, lost.seat) == ("samples", 2)
    assert "was not answered within" in lost.reason
    assert origin.failure(record).code == "peer_lost"  # by the head's word, or the last seat's, which lost the head


# --- its agent ------------------------------------------------------------------------------------


def test_it_ends_with_its_agent(model: Path, runner: RunnerUnderTest):
    runner.send(load_message(model))
    runner.wait_for(Linked)
    runner.socket.shutdown(socket.SHUT_RDWR)
    assert runner.wait_exit() == 0


def test_a_process_that_waits_for_its_seat_stops_when_told(runner: RunnerUnderTest):
    runner.send(StopRunner())
    assert runner.wait_exit() == 0


def test_loaded_layers_go_on_in_the_next_epoch(start_pipeline: StartPipeline, model: Path):
    pipeline = start_pipeline(model, (3,))
    origin = pipeline.origin()
    left_behind = origin.open(session([1], 400))
    origin.next_token(left_behind)
    pipeline.runners[1].kill()
    assert origin.failure(left_behind).code == "peer_lost"
    pipeline.replace(1, model)
    origin = pipeline.origin()
    assert origin.failure(origin.open(session([1], 4))).code == "refused"  # of the old epoch
    again = session([1, 2, 3], 8, epoch=pipeline.epoch)
    assert origin.ids(origin.open(again)) == plain_greedy(model, [1, 2, 3], 8)
    assert sum(isinstance(message, Loaded) for message in pipeline.runners[0].messages) == 1


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["head", "middle", "last"])
def test_a_session_that_is_opened_again_is_computed_again_by_the_new_seat_only(
    start_pipeline: StartPipeline, model: Path, victim: int
):
    pipeline = start_pipeline(model, (2, 4))
    origin = pipeline.origin()
    prompt = [(5 * n) % 90 for n in range(70)]
    record = origin.open(session(prompt, 60))
    got = [origin.next_token(record).token_id for _ in range(8)]
    pipeline.runners[victim].kill()
    while isinstance(more := origin.next_record(record), Token):
        got.append(more.token_id)
    for index, survivor in enumerate(pipeline.runners):
        if index != victim:
            survivor.wait_for(Heartbeat, lambda beat: beat.kept_bytes > 0)
    pipeline.replace(victim, model)
    origin = pipeline.origin()
    again = session(
        [*prompt, *got], 60 - len(got), emitted=len(got), epoch=pipeline.epoch,
        session_id=record.session_id, resumed=True,
    )  # fmt: skip
    assert got + origin.ids(origin.open(again)) == plain_greedy(model, prompt, 60)
    for index, runner in enumerate(pipeline.runners):
        beat: Heartbeat = runner.wait_for(Heartbeat, lambda beat: beat.kept_bytes == beat.cache_bytes == 0)
        # A survivor may be a token behind what the origin has, where the lost seat was ahead of it.
        assert beat.recomputed_tokens <= 1 or (index == victim and beat.recomputed_tokens >= 70)


def test_a_running_session_ends_with_its_epoch(start_pipeline: StartPipeline, model: Path):
    pipeline = start_pipeline(model)
    origin = pipeline.origin()
    record = origin.open(session([1], 400))
    origin.next_token(record)
    pipeline.runners[0].send(Rebind(EPOCH + 1, pipeline.placement, 0))
    assert "epoch 8" in origin.failure(record).what
    pipeline.runners[0].wait_for(Heartbeat, lambda beat: beat.cache_bytes == 0)
    origin = pipeline.origin()
    again = session([9], 6, epoch=EPOCH + 1)
    assert origin.ids(origin.open(again)) == plain_greedy(model, [9], 6)


def test_it_stops_when_told(model: Path, runner: RunnerUnderTest):
    runner.send(load_message(model))
    runner.wait_for(Loading)
    loaded: Loaded = runner.wait_for(Loaded)
    assert 0 < loaded.active_bytes < loaded.resident_bytes
    runner.send(StopRunner())
    assert runner.wait_exit() == 0


def test_what_it_cannot_be_it_says(tmp_path: Path, runner: RunnerUnderTest):
    runner.send(load_message(tmp_path / "nowhere"))
    failed: RunnerFailed = runner.wait_for(RunnerFailed)
    assert failed.code == "corrupt_model"
    assert "nowhere" in failed.what
    assert runner.wait_exit() == 1


# --- short jobs -----------------------------------------------------------------------------------


def job(*arguments: str) -> tuple[int, dict[str, object]]:
    command = [sys.executable, "-m", "meshinfer.runner", *arguments]
    done = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_short_jobs_answer_in_one_line(model: Path, tmp_path: Path):
    code, card = job("describe", str(model), "tiny")
    assert (code, card["model_id"], len(card["layers"])) == (0, "tiny", LAYERS)  # type: ignore[arg-type]
    code, answer = job("convert-gguf", str(tmp_path / "none.gguf"), str(tmp_path / "out"))
    assert code == 1
    assert answer["error"]["what"]  # type: ignore[index]
    code, answer = job("accelerator")
    assert code == 0
    assert set(answer) == {"computes_float32", "accelerator", "device_memory_bytes", "blas"}


@pytest.mark.skipif(bool(why_not_hang()), reason=why_not_hang() or "it can")
def test_a_runner_that_hangs_in_a_step_says_so_in_its_heartbeats_and_may_go_on(
    start_pipeline: StartPipeline, model: Path
):
    pipeline = start_pipeline(model)
    origin, (runner,) = pipeline.origin(), pipeline.runners
    record = origin.open(session([1, 2], 500))
    origin.next_token(record)
    let_go = hang(runner.process.pid)
    first: Heartbeat = runner.wait_for(Heartbeat, lambda beat: beat.busy_seconds > 1)
    later: Heartbeat = runner.wait_for(Heartbeat, lambda beat: beat.busy_seconds > first.busy_seconds)
    assert later.steps == first.steps
    let_go()
    assert len(origin.tokens(record)) == 499
