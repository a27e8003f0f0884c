"""Batching over stages equals mlx-lm's batching over the whole, and lies about caches are found out before MLX."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from tiny_models import VOCABULARY, make_model

from meshinfer.base.errors import ProtocolError
from meshinfer.engine.batching import Batcher, Forward
from meshinfer.engine.loader import Seat
from meshinfer.engine.stage import Stage
from meshinfer.engine.stepping import Stepper, as_tensors
from meshinfer.engine.structure import Structure
from meshinfer.wire.frames import Tensor, TensorSpec
from meshinfer.wire.steps import CacheOperation, StepControl

FAMILIES = (
    "llama", "gemma3_text", "gpt_oss", "qwen3_moe", "mamba2", "rwkv7", "falcon_h1", "lfm2", "nemotron_h", "qwen3_next",
    "deepseek_v3",
)  # fmt: skip
EARLY = ([5, 6, 7], list(range(1, 24)), [90], list(range(40, 10, -1)))
LATE = ([3] * 11, [8, 1])
ROWS, CHUNK = 4, 8


def steppers(name: str, cuts: Sequence[int]) -> list[Stepper]:
    layer_count = Structure.probe(make_model(name)).layer_count
    edges = itertools.pairwise([0, *cuts, layer_count])
    return [
        Stepper(
            Seat(Stage(make_model(name), start, end), name, VOCABULARY, 0),
            max_rows=ROWS,
            max_tokens=ROWS * CHUNK,
            context_tokens=512,
        )
        for start, end in edges
    ]


class InOneProcess:
    """Head, stages and greedy last stage, one after the other."""

    def __init__(self, stages: list[Stepper]) -> None:
        self.stages = stages
        self.tokens: list[int] = []
        self.log: list[StepControl] = []
        at_once = 2 if stages[0].tolerates_padding else 1
        self.batcher = Batcher(
            self._forward, lambda: self.tokens, max_rows=ROWS, prompts_at_once=at_once, chunk_tokens=CHUNK
        )
        self.answers: dict[int, list[int]] = {}

    def _forward(self, forward: Forward) -> None:
        control = StepControl(self.batcher.take_operations(), forward.cache, forward.rows, forward.samples)
        self.log.append(control)
        outputs: Any = ()
        for stage in self.stages:
            tensors = as_tensors([forward.tokens, *outputs])
            outputs = stage.run(control, *stage.accept(control, tensors))
        if forward.samples:
            found: Any = mx.argmax(outputs, axis=-1).tolist()
            self.tokens = found
            for (session, _, _), token in zip(forward.rows, found, strict=True):
                self.answers.setdefault(session, []).append(token)

    def run(self, count: int) -> dict[int, list[int]]:
        waiting = list(enumerate(EARLY, 1))
        late = list(enumerate(LATE, len(EARLY) + 1))
        running: set[int] = set()
        for turn in itertools.count():
            if turn == 4:
                waiting += late
                late = []
            while waiting and len(running) < ROWS:
                session, prompt = waiting.pop(0)
                self.batcher.insert(session, prompt)
                running.add(session)
            self.batcher.advance()
            done = [session for session in running if len(self.answers.get(session, ())) >= count]
            self.batcher.remove(done)
            running -= set(done)
            if not (running or waiting or late):
                return {session: tokens[:count] for session, tokens in self.answers.items()}
        raise AssertionError


def whole(name: str, prompt: Sequence[int], count: int) -> list[int]:
    generator = BatchGenerator(make_model(name), max_tokens=count, prefill_step_size=CHUNK)
    generator.insert([list(prompt)])
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += [response.token for response in generator.next()[1]]
    generator.close()
    return tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_batches_over_stages_as_it_does_whole(name: str):
    cuts = Structure.probe(make_model(name)).cut_points
    pipeline = InOneProcess(steppers(name, (cuts[0], cuts[-1])))
    answers = pipeline.run(6)
    for session, prompt in enumerate((*EARLY, *LATE), 1):
        assert answers[session] == whole(name, prompt, 6), f"session {session}"
    rest = StepControl(pipeline.batcher.take_operations())
    for stage in pipeline.stages:
        stage.run(rest, None)
        assert (stage.caches.count, stage.caches.size_bytes) == (0, 0)


def test_padding_is_for_keys_and_values_only():
    tolerant = {name for name in FAMILIES if steppers(name, ())[0].tolerates_padding}
    assert tolerant == {"llama", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3"}


# --- what a neighbour may not say -----------------------------------------------------------------


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    return steppers("llama", (2,))[1]


NEW = (CacheOperation("new", 1), CacheOperation("new", 2), CacheOperation("merge", 3, (1, 2)))


@pytest.mark.parametrize(
    "lie",
    [
        (CacheOperation("new", 0),),
        (CacheOperation("new", 1), CacheOperation("new", 1)),
        tuple(CacheOperation("new", number) for number in range(1, 100)),
        (CacheOperation("merge", 9, (7,)),),
        (CacheOperation("merge", 9),),
        (*NEW, CacheOperation("merge", 9, (3,))),
        (*NEW, CacheOperation("filter", 3, rows=(2,))),
        (*NEW, CacheOperation("filter", 3, rows=(0, 1, 0))),
        (*NEW, CacheOperation("filter", 3)),
        (*NEW, CacheOperation("filter", 1, rows=(0,))),
        (*NEW, CacheOperation("extend", 3, (3,))),
        (*NEW, CacheOperation("extend", 3, (1,))),
        (*NEW, CacheOperation("extend", 3)),
        (*NEW, CacheOperation("copy", 4, (3,)), CacheOperation("extend", 3, (4,)), CacheOperation("extend", 3, (4,))),
        (*NEW, CacheOperation("prepare", 3, rows=(1,), padding=(0,))),
        (*NEW, CacheOperation("prepare", 3, rows=(1, 1), padding=(0,))),
        (*NEW, CacheOperation("finalize", 3)),
        (CacheOperation("free", 9),),
        (CacheOperation("copy", 9, (8,)),),
        (CacheOperation("cut", 9, rows=(0,)),),
        (*NEW, CacheOperation("cut", 3, rows=(0,))),
        (*NEW, CacheOperation("cut", 1, rows=(1,))),
        (*NEW, CacheOperation("cut", 1)),
    ],
)
def test_impossible_cache_operations_are_refused(stepper: Stepper, lie: tuple[CacheOperation, ...]):
    stepper.clear()
    with pytest.raises(ProtocolError):
        stepper.caches.apply(lie)


def tensor(dtype: str, *shape: int, fill: int = 0) -> Tensor:
    spec = TensorSpec(dtype, shape)
    data = fill.to_bytes(4, "little", signed=True) * (spec.size_bytes // 4)
    return Tensor(spec, memoryview(data))


TWO_ROWS = StepControl(NEW, 3, ((1, 0, 2), (2, 0, 2)))
IDS, CARRIED = tensor("int32", 2, 2), tensor("float32", 2, 2, 32)


@pytest.mark.parametrize(
    ("control", "tensors"),
    [
        (TWO_ROWS, ()),
        (TWO_ROWS, (IDS,)),
        (TWO_ROWS, (IDS, CARRIED, CARRIED)),
        (TWO_ROWS, (tensor("float32", 2, 2), CARRIED)),
        (TWO_ROWS, (tensor("int32", 4), CARRIED)),
        (TWO_ROWS, (tensor("int32", 2, 2, fill=VOCABULARY), CARRIED)),
        (TWO_ROWS, (tensor("int32", 2, 2, fill=-1), CARRIED)),
        (TWO_ROWS, (tensor("int32", 2, 0), tensor("float32", 2, 0, 32))),
        (TWO_ROWS, (tensor("int32", 2, 100), tensor("float32", 2, 100, 32))),
        (TWO_ROWS, (IDS, tensor("float32", 2, 2, 31))),
        (TWO_ROWS, (IDS, tensor("float32", 2, 1, 32))),
        (TWO_ROWS, (IDS, tensor("int32", 2, 2, 32))),
        (StepControl(NEW, 3, ((1, 0, 2),)), (IDS, CARRIED)),
        (StepControl(NEW, 3, ((1, 0, 3), (2, 0, 2))), (IDS, CARRIED)),
        (StepControl(NEW, 3, TWO_ROWS.rows, samples=True), (IDS, CARRIED)),
        (StepControl(NEW, 9, TWO_ROWS.rows), (IDS, CARRIED)),
        (StepControl(NEW, 1, ((1, 0, 2),)), (tensor("int32", 1, 2), tensor("float32", 1, 2, 32))),
        (StepControl(NEW), (IDS, CARRIED)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(stepper: Stepper, control: StepControl, tensors: tuple[Tensor, ...]):
    stepper.clear()
    with pytest.raises(ProtocolError):
        stepper.run(control, *stepper.accept(control, tensors))


def test_what_fits_runs(stepper: Stepper):
    stepper.clear()
    assert stepper.run(TWO_ROWS, *stepper.accept(TWO_ROWS, (IDS, CARRIED))) is None
    half = Tensor(TensorSpec("bfloat16", (2, 1, 32)), memoryview(bytes(128)))
    control = StepControl((), 3, ((1, 2, 1), (2, 2, 1)), samples=True)
    logits = stepper.run(control, *stepper.accept(control, (tensor("int32", 2, 1), half)))
    assert logits.shape == (2, VOCABULARY)
    assert stepper.caches.size_bytes > 0
