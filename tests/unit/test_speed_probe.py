"""A node measures itself when it is idle and something is unknown, tells its card, and learns from real runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.planning.cost import Stage, decode_time
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes
from meshinfer.planning.work import model_work
from meshinfer.serving.calibration import LEAST_STEPS
from meshinfer.serving.give_way import GiveWay
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.speed_book import FAILED_AGAIN_SECONDS
from meshinfer.serving.speed_probe import FINGERPRINT_SECONDS, LOOK_SECONDS, ProbePorts, SpeedProbe, step_seconds
from meshinfer.serving.speed_process import ProbeQuestion, _answer, machine_fingerprint
from meshinfer.testing.cards import MODEL_DIGEST, MODEL_ID, model_card
from meshinfer.topology.card import KindSpeed
from meshinfer.topology.placement import Placement, Seat
from meshinfer.topology.speed import NodeSpeed
from meshinfer.wire.runner_control import Heartbeat
from meshinfer.wire.speed_probe import LayerShape, MeasuredKind, MemoryTrial, SpeedReport

SPEED = NodeSpeed(1e9, 1e11, 1e-4, sampling_seconds=1e-4, layer_overhead_seconds=1e-4)
MEASURING_SECONDS = 5.0


async def at_once(work: Callable[[], object]) -> object:
    await trio.lowlevel.checkpoint()
    return work()


class Node:
    """A node that says what the test wants, and whose probes take five seconds."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.wanted = {"q4g64": LayerShape()}
        self.busy = False
        self.fingerprint = "m1"
        self.running: dict[SeatKey, tuple[Heartbeat, Placement, ModelCard | None]] = {}
        self.asked: list[ProbeQuestion] = []
        self.ended: list[str] = []
        self.error: MeshinferError | None = None
        self.memory: MemoryTrial | None = None
        self.card: tuple[KindSpeed, ...] = ()
        self.usable: list[int] = []
        self.give_way = GiveWay()

    async def ask(self, question: ProbeQuestion) -> SpeedReport:
        self.asked.append(question)
        end = "killed"
        try:
            await trio.sleep(MEASURING_SECONDS)
            end = "answered"
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.1)  # a killed process takes a moment to be gone
            self.ended.append(end)
        if self.error:
            raise self.error
        kinds = tuple(MeasuredKind(kind, SPEED, 0.01, 5) for kind, _ in question.kinds)
        return SpeedReport(kinds, self.memory if question.memory_bytes else None, MEASURING_SECONDS)

    async def wants(self) -> dict[str, LayerShape]:
        return self.wanted

    def probe(self) -> SpeedProbe:
        ports = ProbePorts(
            home=self.home,
            wanted=self.wants,
            at_work=lambda: self.busy,
            memory_to_try=lambda: 1000,
            publish_speeds=lambda speeds: setattr(self, "card", speeds),
            publish_memory=self.usable.append,
            running=lambda: self.running,
            fingerprint=lambda: self.fingerprint,
            ask=self.ask,
            computes_float32=False,
            in_thread=at_once,
        )
        return SpeedProbe(ports, self.give_way)

    @property
    def kinds(self) -> list[str]:
        return [told.kind for told in self.card]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def live(node: Node, seconds: float, during: Callable[[trio.Nursery], object] = lambda _nursery: None) -> None:
    """Let the node's probe run for so long."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.probe().run)
        during(nursery)
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()


async def test_the_card_learns_its_speeds_after_the_start(node: Node, autojump_clock) -> None:
    told: list[tuple[KindSpeed, ...]] = []

    async def watch() -> None:
        await trio.sleep(1)
        told.append(node.card)

    await live(node, 10, lambda nursery: nursery.start_soon(watch))
    assert told == [()], "the start waits for nothing"
    assert node.kinds == ["q4g64"]
    assert node.ended == ["answered"]


async def test_what_is_remembered_costs_no_process(node: Node, autojump_clock) -> None:
    await live(node, 10)
    node.asked.clear()
    node.card = ()
    await live(node, 1000)
    assert node.asked == []
    assert node.kinds == ["q4g64"]


async def test_a_new_model_of_another_kind_is_measured_by_itself(node: Node, autojump_clock) -> None:
    await live(node, 10)
    node.wanted = {"q8g64": LayerShape(), "q4g64": LayerShape()}
    await live(node, 10)
    assert [[kind for kind, _ in question.kinds] for question in node.asked] == [["q4g64"], ["q8g64"]]
    assert node.kinds == ["q4g64", "q8g64"]


async def test_a_changed_machine_is_measured_again(node: Node, autojump_clock) -> None:
    def unplug(nursery: trio.Nursery) -> None:
        async def later() -> None:
            await trio.sleep(20)
            node.fingerprint = "m2"

        nursery.start_soon(later)

    await live(node, 20 + FINGERPRINT_SECONDS + 20, unplug)
    assert len(node.asked) == 2
    assert node.kinds == ["q4g64"]


async def test_nothing_is_measured_beside_a_runner(node: Node, autojump_clock) -> None:
    node.busy = True

    def rest(nursery: trio.Nursery) -> None:
        async def later() -> None:
            await trio.sleep(100)
            assert node.asked == []
            node.busy = False

        nursery.start_soon(later)

    await live(node, 120, rest)
    assert node.ended == ["answered"]


async def test_a_runner_that_starts_ends_the_probe_and_waits_until_it_is_gone(node: Node, autojump_clock) -> None:
    async def start_runner() -> str:
        assert node.ended == ["killed"]
        await trio.sleep(3)  # its process takes a while; no probe begins meanwhile
        assert len(node.asked) == 1
        node.busy = True
        return "runner"

    def work(nursery: trio.Nursery) -> None:
        async def serve() -> None:
            await trio.sleep(2)
            began = trio.current_time()
            assert await node.give_way.start(start_runner) == "runner"
            assert trio.current_time() - began < 4
            await trio.sleep(60)
            assert len(node.asked) == 1
            assert node.card == ()
            node.busy = False

        nursery.start_soon(serve)

    await live(node, 100, work)
    assert node.ended == ["killed", "answered"]
    assert node.kinds == ["q4g64"]


async def test_a_runner_that_cannot_start_holds_up_no_probe(node: Node, autojump_clock) -> None:
    async def start_runner() -> None:
        raise OSError

    async def fail() -> None:
        with pytest.raises(OSError):
            await node.give_way.start(start_runner)

    await live(node, 20, lambda nursery: nursery.start_soon(fail))
    assert node.kinds == ["q4g64"]


async def test_an_agent_that_ends_ends_its_probe(node: Node, autojump_clock) -> None:
    await live(node, 2)
    assert node.ended == ["killed"]


async def test_a_probe_that_fails_is_repeated_later(node: Node, autojump_clock) -> None:
    node.error = MeshinferError("no engine")
    await live(node, FAILED_AGAIN_SECONDS[0])
    assert len(node.asked) == 1
    await live(node, 2 * FAILED_AGAIN_SECONDS[0])
    assert len(node.asked) == 3
    assert node.card == ()


async def test_memory_is_tried_once_and_a_refusal_outlives_a_restart(node: Node, autojump_clock) -> None:
    node.memory = MemoryTrial(1000, 600, "refused")
    await live(node, 10)
    node.wanted = {"q4g64": LayerShape(), "float32": LayerShape()}
    await live(node, 10)
    assert [question.memory_bytes for question in node.asked] == [1000, 0]
    assert node.usable == [600, 600]


async def test_a_home_that_cannot_be_written_is_no_reason_to_stop(node: Node, autojump_clock) -> None:
    node.home = node.home / "not there"
    await live(node, 10)
    assert node.kinds == ["q4g64"]


# --- real runs ------------------------------------------------------------------------------------

CARD = model_card((10**7,) * 8, weight_kind="q4g64", head_kind="q4g64", head_bytes=10**7)
KEY = SeatKey(InstanceId("0" * 16), 1, 0)


def beat(steps: int, seconds: float, sessions: int = 1, cache_bytes: int = 0) -> Heartbeat:
    """A step that takes `seconds`, and twice that on the wall's clock."""
    return Heartbeat(steps, 0.0, sessions, 0, 0, cache_bytes, 0, 2 * seconds, steps, computing_seconds=seconds)


def placement(end: int = 8) -> Placement:
    seats = (Seat(NodeId("a"), 0, end),)
    return Placement(MODEL_ID, MODEL_DIGEST, 8, "pipeline", "libp2p", 1024, 1, seats)


async def run_for(node: Node, seconds: float, measured: float, sessions: int = 1) -> None:
    """A runner on this node that takes `measured` seconds a step."""
    probe = node.probe()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.run)
        await trio.sleep(10)
        node.busy = True
        for look in range(int(seconds / LOOK_SECONDS)):
            node.running = {KEY: (beat(10 * (look + 1), measured, sessions), placement(), CARD)}
            await trio.sleep(LOOK_SECONDS)
        nursery.cancel_scope.cancel()


async def test_real_runs_refine_the_card(node: Node, autojump_clock) -> None:
    predicted = step_seconds(CARD, 0, 8, SPEED, SPEED, False, 0)
    await run_for(node, 60, 2 * predicted)
    (told,) = node.card
    assert told.speed.stream_bytes_per_second == pytest.approx(SPEED.stream_bytes_per_second / 2, rel=0.01)
    assert told.speed.layer_overhead_seconds == pytest.approx(2 * SPEED.layer_overhead_seconds, rel=0.01)


async def test_runs_as_predicted_are_no_news(node: Node, autojump_clock) -> None:
    await run_for(node, 60, 1.02 * step_seconds(CARD, 0, 8, SPEED, SPEED, False, 0))
    assert node.card == (KindSpeed("q4g64", SPEED),)


async def test_steps_of_several_sessions_say_nothing(node: Node, autojump_clock) -> None:
    await run_for(node, 60, 1.0, sessions=3)
    assert node.card == (KindSpeed("q4g64", SPEED),)


async def test_a_few_steps_say_nothing(node: Node, autojump_clock) -> None:
    await run_for(node, LOOK_SECONDS * (LEAST_STEPS // 10), 1.0)
    assert node.card == (KindSpeed("q4g64", SPEED),)


def test_a_step_is_its_bytes_and_overheads() -> None:
    speed = NodeSpeed(1e9, 1e11, 0.001, 0.002, 0.003, 2e9)
    card = model_card((10**7,) * 8, head_bytes=10**7, kv_elements_per_token=500)
    middle = step_seconds(card, 2, 4, speed, speed, False, cache_bytes=10**7)
    assert middle == pytest.approx(0.02 + 0.005 + 0.001 + 2 * 0.003, rel=1e-3)
    last = step_seconds(card, 6, 8, speed, NodeSpeed(5e8, 1e11, 0.0), False, cache_bytes=0)
    assert last == pytest.approx(0.02 + 0.001 + 2 * 0.003 + 0.02 + 0.002, rel=1e-3)


def test_a_step_of_a_mixture_reads_the_experts_that_it_visits() -> None:
    speed = NodeSpeed(1e9, 1e12, 0.0)
    mixture = LayerCard(TensorBytes(10**7), 0, experts=8, experts_per_token=2, expert=TensorBytes(10**6))
    card = replace(model_card((10**7,) * 4), layers=(mixture,) * 4)
    assert step_seconds(card, 1, 3, speed, speed, False, 0) == pytest.approx(2 * 4e-3)


@pytest.mark.parametrize("context", [100.0, 1000.0, 5000.0])
def test_steps_are_held_against_what_planners_predict(context: float) -> None:
    speed = NodeSpeed(1e9, 1e11, 0.001, 0.002, 0.003, 2e9)
    layers = (LayerCard(TensorBytes(10**7), 512, kv_tokens_limit=1024), LayerCard(TensorBytes(10**7), 512, 0, 4096))
    card = replace(model_card((10**7,) * 8), layers=layers * 4)
    work = model_work(card, computes_float32=False)
    held = sum(
        layer.cached_tokens(context) * layer.cache_bytes_per_token + layer.state_bytes for layer in work.layers[2:6]
    )
    predicted = decode_time(work, Stage(2, 6, (speed,)), 1, context).seconds
    assert step_seconds(card, 2, 6, speed, speed, False, int(held)) == pytest.approx(predicted, rel=1e-3)


# --- the process ----------------------------------------------------------------------------------


def test_the_same_machine_has_the_same_fingerprint() -> None:
    assert machine_fingerprint("CPU") == machine_fingerprint("CPU") != machine_fingerprint("GPU")


def test_settings_of_the_engine_are_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    one = machine_fingerprint("CPU")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert machine_fingerprint("CPU") != one


@pytest.mark.parametrize(
    ("code", "output", "words"),
    [
        (1, b'{"error": {"what": "no kind"}}', "no kind"),
        (1, b"", "last words"),
        (-9, b"half a li", "last words"),
        (0, b"not json", "last words"),
        (0, b'{"kinds": [{"kind": "q", "speed": {}}], "memory": null, "seconds": 1}', "last words"),
    ],
)
def test_a_probe_without_an_answer_says_why(code: int, output: bytes, words: str) -> None:
    with pytest.raises(MeshinferError, match=words):
        _answer(subprocess.CompletedProcess([], code, output, b"its last words"))
