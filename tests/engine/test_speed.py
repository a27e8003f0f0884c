"""A probe measures what a seat would run, within its time, and its report crosses to the agent whole."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
from tiny_models import write_model

from meshinfer.base.errors import BadInput
from meshinfer.base.ids import ModelId
from meshinfer.engine.describe import describe_model
from meshinfer.engine.loader import parameters_of
from meshinfer.engine.memory_trial import LEFT_SHARE, STEPS, Pressure, try_memory
from meshinfer.engine.platform import prepare_process
from meshinfer.engine.speed import _stage, measure_speeds
from meshinfer.wire.speed_probe import LayerShape, MeasuredKind, MemoryTrial, SpeedReport, packing_of

SMALL = LayerShape(hidden=256, intermediate=512, heads=4, kv_heads=2, vocabulary=1000)
GIB = 2**30


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4g32", "q4g64", "q8g64", "q6g128", "mxfp4", "nvfp4"])
def test_every_kind_gives_numbers_that_can_be_divided_by(kind: str) -> None:
    """Even with no time at all: each run happens once."""
    (measured,) = measure_speeds([(kind, SMALL)], prepare_process(), seconds=0.0)
    assert measured.kind == kind
    assert measured.samples == 1
    numbers = astuple(measured.speed)
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert measured.speed.stream_bytes_per_second > 0
    assert measured.speed.flops_per_second > 0


def test_packed_weights_on_a_cpu_cost_each_row_and_each_pass() -> None:
    """Where the cost model would think that two sessions cost as much as one, and short chunks as little as their sums."""
    platform = prepare_process()
    if not platform.computes_float32:
        pytest.skip("a CPU's way")
    (measured,) = measure_speeds([("q4g32", LayerShape.parse("576x1536x9x3x1000"))], platform, seconds=1.0)
    speed = measured.speed
    assert 0 < speed.row_bytes_per_second < 4 * speed.stream_bytes_per_second
    assert 0 < speed.pass_bytes_per_second < 2 * speed.stream_bytes_per_second


def test_the_time_is_shared_among_kinds() -> None:
    """A clock that jumps a second at each look: every kind still gets its turn, and few looks are taken."""
    looks = iter(range(10_000))
    kinds = [(kind, SMALL) for kind in ("float32", "q4g64")]
    measured = measure_speeds(kinds, prepare_process(), seconds=5.0, now=lambda: float(next(looks)))
    assert [one.kind for one in measured] == ["float32", "q4g64"]
    assert next(looks) < 80


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(BadInput, match="no kind of weights"):
        measure_speeds([("q9g1", SMALL)], prepare_process(), seconds=0.0)


# --- memory ---------------------------------------------------------------------------------------


def trial(asked: int, pressures: list[Pressure] | None = None, refuse_after: int = 10**9) -> MemoryTrial:
    blocks = 0

    def allocate(_size: int) -> object:
        nonlocal blocks
        if blocks >= refuse_after:
            raise RuntimeError("[malloc] Unable to allocate")
        blocks += 1
        return object()

    steps = iter(pressures or [])
    calm = Pressure(total=32 * GIB, available=20 * GIB, swapped=0)
    return try_memory(asked, allocate, lambda: next(steps, calm), lambda: 0.0)


def test_what_nothing_stands_against_is_usable() -> None:
    assert trial(10 * GIB) == MemoryTrial(10 * GIB, 10 * GIB)
    assert trial(7) == MemoryTrial(7, 7)
    assert trial(0) == MemoryTrial(0, 0)


def test_the_first_refusal_ends_it() -> None:
    result = trial(STEPS * GIB // 4, refuse_after=3)
    assert result == MemoryTrial(STEPS * GIB // 4, 3 * GIB // 4, "refused")
    assert result.usable_bytes == 3 * GIB // 4


def test_a_machine_that_swaps_or_runs_short_is_left_alone() -> None:
    calm = Pressure(32 * GIB, 20 * GIB, swapped=GIB)
    swaps = Pressure(32 * GIB, 20 * GIB, swapped=2 * GIB)
    short = Pressure(32 * GIB, int(LEFT_SHARE * 32 * GIB), swapped=GIB)
    for bad in (swaps, short):
        result = trial(STEPS * GIB // 4, [calm, calm, calm, bad])
        assert (result.stopped_by, result.usable_bytes) == ("pressure", GIB // 2)


def test_a_slow_machine_is_not_written_full() -> None:
    looks = iter(range(100))
    calm = Pressure(32 * GIB, 20 * GIB, 0)
    result = try_memory(GIB, lambda _size: object(), lambda: calm, lambda: next(looks) / 4)
    assert result.stopped_by == "time"
    assert result.got_bytes < GIB
    assert result.usable_bytes == GIB


def test_the_engine_gives_real_blocks_and_takes_them_back() -> None:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert try_memory(64 * 2**20, pressure=lambda: Pressure(32 * GIB, 20 * GIB, 0)).got_bytes > 0
    assert mx.get_peak_memory() > before
    assert mx.get_active_memory() == before


# --- the process ----------------------------------------------------------------------------------


def job(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-P", "-m", "meshinfer.runner", "speed", *arguments]
    return subprocess.run(command, capture_output=True, timeout=120, check=False)


def test_the_job_answers_in_one_line() -> None:
    done = job(
        "--kinds", "float32,q4g64", "--shapes", f"{SMALL},{SMALL}", "--seconds", "0", "--memory-bytes", "1000000"
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=SpeedReport)
    assert [measured.kind for measured in report.kinds] == ["float32", "q4g64"]
    assert report.memory is not None
    assert report.memory.usable_bytes == 1_000_000


@pytest.mark.parametrize("arguments", [("--kinds", "nonsense"), ("--kinds", "float32", "--shapes", "7x7")])
def test_a_wrong_question_is_answered_with_what_is_wrong(arguments: tuple[str, ...]) -> None:
    done = job("--seconds", "0", *arguments)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "bad_input"


# --- kinds ----------------------------------------------------------------------------------------


def test_a_card_names_how_its_weights_lie(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", "llama", mx.bfloat16)
    card = describe_model(tmp_path / "plain", ModelId("t/plain"))
    assert (card.weight_kind, card.head_kind) == ("bfloat16", "bfloat16")
    for mode, bits, kind in (("affine", 4, "q4g32"), ("affine", 8, "q8g32"), ("mxfp4", 4, "mxfp4")):
        quantization = {"group_size": 32, "bits": bits, "mode": mode}
        write_model(tmp_path / kind, "llama", mx.bfloat16, quantization=quantization)
        card = describe_model(tmp_path / kind, ModelId("t/quantised"))
        assert (card.weight_kind, card.head_kind) == (kind, kind)


def test_the_real_small_model_is_of_four_bits_with_a_head_of_eight(smollm2: Path) -> None:
    card = describe_model(smollm2, ModelId("smollm2"))
    assert (card.weight_kind, card.head_kind) == ("q4g32", "q8g32")
    assert str(LayerShape.of(card)) == "576x1536x9x3x49152"


def test_made_up_layers_weigh_what_real_ones_do(smollm2: Path) -> None:
    card = describe_model(smollm2, ModelId("smollm2"))
    made_up = _stage(packing_of(card.weight_kind), LayerShape.of(card), 1, mx.float32, prepare_process())
    assert made_up.layer_bytes == card.layers[0].weights.resident(computes_float32=True)
    assert parameters_of(made_up.stage.model)


def test_a_report_survives_its_journey() -> None:
    (measured,) = measure_speeds([("float32", SMALL)], prepare_process(), seconds=0.0)
    assert isinstance(measured, MeasuredKind)
    report = SpeedReport((measured,), MemoryTrial(10, 5, "refused"), 1.0)
    assert msgspec.json.decode(msgspec.json.encode(report), type=SpeedReport) == report
