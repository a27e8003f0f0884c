"""How fast this machine runs layers, by running some: the numbers of `NodeSpeed`, for each kind of weights.

Nothing is looked up. Layers of mlx-lm's own Llama, of the sizes that a model at hand has, are filled with
made-up weights of the kind and run as a seat runs them: same modules, same caches, same float type, same
BLAS. Six runs per kind, and each number is what the cost model will multiply by:

| run | gives |
|---|---|
| steps of a stage of very narrow layers, few and many of them | overhead of a step `o`, overhead of a layer `l` |
| a decode step over more weights than any cache holds | stream: bytes of a layer / (time of a layer − l) |
| the same step with a long context | cache rate: bytes of keys and values / the time that it adds |
| a step of two sessions | row rate: bytes of a layer / the time that the second one adds |
| prefill chunks of two lengths through a few layers | FLOP/s: work that the longer one has more / the time that it takes more; \
pass rate: bytes of a layer / what is left of the shorter one |

A whole layer rather than a bare matrix product, because what lies between the products (norms, rotations,
softmax, unpacking) costs time in proportion to them: on a CPU a third of a prefill. What it costs whatever
the size is `l`, which the narrow layers show.

Which clock: `Platform.timer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.llama import Model, ModelArgs

from meshinfer.engine.loader import parameters_of
from meshinfer.engine.platform import Platform
from meshinfer.engine.repeat import Clock, Times, repeat
from meshinfer.engine.sampling import Draw, draw_tokens
from meshinfer.engine.stage import Stage
from meshinfer.engine.unpacking import unpack_for_many_rows
from meshinfer.topology.speed import NodeSpeed, engine_kind
from meshinfer.wire.records import Sampling
from meshinfer.wire.speed_probe import LayerShape, MeasuredKind, Packing, packing_of

WORKING_SET_BYTES = 64 * 2**20
"""Weights of the decode run, read in the same order again and again: nothing of them survives in a cache that is
smaller. Laptops have 8 to 48 MB. Raising it makes each run longer (0.1 s with it, 4-bit weights on one CPU core)."""
MOST_LAYERS = 64
CHUNK_TOKENS = 256
"""Of the prefill run; 512, the usual chunk, has 3 % more FLOP/s and takes twice the time (measured, float32, CPU)."""
SHORT_CHUNK_TOKENS = 32
"""Of the other one: many enough rows that BLAS is at its best, few enough that what does not grow with them shows."""
CHUNK_LAYERS = 2
LEAST_CHUNK_RUNS = 3
"""Of a prefill run, if its time is to allow a longer chunk."""
CONTEXT_TOKENS = 4096
"""Of the run with a context: enough that reading it takes a time that can be told from the weights'."""
_SEEN_SHARE = 0.05
"""What a context must add to a step to be believed; less is within the noise."""
NARROW = LayerShape(hidden=128, intermediate=128, heads=2, kv_heads=1, vocabulary=128)
"""As narrow as groups of 128 weights allow."""
NARROW_LAYERS = (2, 18)
_SLOWEST_SHARE = 0.1
"""Of a layer's time must be left once its overhead is taken off; noise alone could eat it up on tiny shapes."""


def measure_speeds(
    kinds: Sequence[tuple[str, LayerShape]], platform: Platform, seconds: float, now: Clock = time.monotonic
) -> tuple[MeasuredKind, ...]:
    """Each of `kinds`, with layers of the shape beside it, within about `seconds` in all.

    A kind takes at least one run of each sort, however long that is.

    Raises:
        BadInput: no such kind.
    """
    end = now() + seconds
    measured: list[MeasuredKind] = []
    for index, (kind, shape) in enumerate(kinds):
        left = (end - now()) / (len(kinds) - index)
        measured.append(_Probe(kind, shape, platform, now).measure(left))
        mx.clear_cache()
    return tuple(measured)


class _Probe:
    """One kind of weights."""

    def __init__(self, kind: str, shape: LayerShape, platform: Platform, now: Clock) -> None:
        self._kind, self._shape = kind, shape
        self._packing = packing_of(kind)
        self._platform = platform
        # Quantised models compute in the float type of their scales; bfloat16 is what conversions are made with.
        floats = engine_kind("bfloat16" if self._packing else kind, platform.computes_float32)
        self._dtype: mx.Dtype = getattr(mx, floats)
        self._now, self._timer = now, platform.timer

    def measure(self, seconds: float) -> MeasuredKind:
        end = self._now() + seconds
        step_overhead, layer_overhead = self._overheads(0.15 * seconds)
        sampling = self._sampling(0.03 * seconds)
        flops, whole = self._prefill(0.4 * (end - self._now()), layer_overhead)
        decode, stream, cache, row = self._decode(end - self._now(), layer_overhead)
        speed = NodeSpeed(
            stream_bytes_per_second=stream,
            flops_per_second=flops,
            step_overhead_seconds=step_overhead,
            sampling_seconds=sampling,
            layer_overhead_seconds=layer_overhead,
            cache_bytes_per_second=cache,
            row_bytes_per_second=row,
            pass_bytes_per_second=whole,
        )
        return MeasuredKind(self._kind, speed, decode.spread, decode.count)

    # --- the runs -------------------------------------------------------------------------------

    def _overheads(self, allowed_seconds: float) -> tuple[float, float]:
        """Seconds of a step and of each of its layers that have nothing to do with their size."""
        few, many = (
            self._repeat(_stage(self._packing, NARROW, layers, self._dtype, self._platform).decode, allowed_seconds / 2)
            for layers in NARROW_LAYERS
        )
        layer = max(0.0, many.median - few.median) / (NARROW_LAYERS[1] - NARROW_LAYERS[0])
        return max(0.0, few.median - NARROW_LAYERS[0] * layer), layer

    def _decode(self, allowed_seconds: float, layer_overhead: float) -> tuple[Times, float, float, float]:
        """Times of a step, bytes per second of weights, of keys and values, and of weights for a second session."""
        end = self._now() + allowed_seconds
        one = _stage(self._packing, self._shape, 1, self._dtype, self._platform)
        layers = min(MOST_LAYERS, -(-WORKING_SET_BYTES // one.layer_bytes))
        stage = _stage(self._packing, self._shape, layers, self._dtype, self._platform)
        empty = self._repeat(stage.decode, 0.4 * (end - self._now()))
        step = empty.median
        stage.be_empty(rows=2)
        second = self._repeat(stage.decode, 0.5 * (end - self._now())).median - step
        stream = layers * stage.layer_bytes / max(step - layers * layer_overhead, _SLOWEST_SHARE * step)
        few = min(layers, -(-WORKING_SET_BYTES // stage.context_bytes))
        stage.keep(few)
        stage.pretend_context()
        full = self._repeat(stage.decode, end - self._now()).median
        longer = full - step * few / layers
        cache = few * stage.context_bytes / longer if longer > _SEEN_SHARE * full else 0.0
        return empty, stream, cache, layers * stage.layer_bytes / second if second > _SEEN_SHARE * step else 0.0

    def _prefill(self, allowed_seconds: float, layer_overhead: float) -> tuple[float, float]:
        """FLOP/s of a chunk, and the bytes per second of weights that it takes before them; 0: none to speak of.

        A shorter chunk where the machine is so slow that a whole one takes too long.
        """
        stage = _stage(self._packing, self._shape, CHUNK_LAYERS, self._dtype, self._platform)
        begin, tokens = self._now(), SHORT_CHUNK_TOKENS
        _timed(partial(stage.prefill, tokens), self._timer)  # what starts lazily
        seconds = _timed(partial(stage.prefill, tokens), self._timer)
        # Twice the tokens take less than twice the time. Some runs of each must fit; a wall's clock would count what
        # others do meanwhile.
        while tokens < CHUNK_TOKENS and seconds * 3 * LEAST_CHUNK_RUNS <= allowed_seconds:
            tokens, seconds = 2 * tokens, 2 * seconds
        short, long = SHORT_CHUNK_TOKENS, max(tokens, 2 * SHORT_CHUNK_TOKENS)
        few, many = (
            self._layer_seconds(stage, count, share * (allowed_seconds - (self._now() - begin)), layer_overhead)
            for count, share in ((short, 0.3), (long, 1.0))
        )
        # Where the longer one took hardly longer, all of it is arithmetic at the longer one's rate.
        grew = max(many - few, _SLOWEST_SHARE * many)
        flops = (self._flops(long) - self._flops(short)) / grew
        before = many - self._flops(long) / flops
        return flops, stage.layer_bytes / before if before > _SEEN_SHARE * few else 0.0

    def _layer_seconds(self, stage: _MadeUp, tokens: int, allowed_seconds: float, layer_overhead: float) -> float:
        layer = self._repeat(partial(stage.prefill, tokens), allowed_seconds).median / CHUNK_LAYERS
        return max(layer - layer_overhead, _SLOWEST_SHARE * layer)

    def _flops(self, tokens: int) -> float:
        """Of a layer, for a first chunk."""
        # Two per weight, and four per pair of positions and element of a head: half the chunk is their mean context.
        return tokens * (2 * self._shape.weights + 4 * self._shape.hidden * tokens / 2)

    def _sampling(self, allowed_seconds: float) -> float:
        """Seconds to take the likeliest token."""
        logits = mx.random.normal((1, self._shape.vocabulary))
        mx.eval(logits)
        draws = [Draw(Sampling(seed=0, temperature=0.0), index=0)]
        return self._repeat(lambda: draw_tokens(logits, draws), allowed_seconds).median

    def _repeat(self, run: Callable[[], object], allowed_seconds: float) -> Times:
        return repeat(run, max(0.0, allowed_seconds), now=self._now, timer=self._timer)


def _timed(run: Callable[[], object], timer: Clock) -> float:
    before = timer()
    run()
    return timer() - before


# --- a made-up stage ------------------------------------------------------------------------------


@dataclass(slots=True)
class _MadeUp:
    """Layers that are whole but for their meaning."""

    stage: Stage
    layer_bytes: int
    shape: LayerShape
    dtype: mx.Dtype
    cache: list[Any]
    rows: int = 1

    def decode(self) -> None:
        """One step of its sessions, as `engine.stepping` runs it; the context grows by one token."""
        tokens = mx.zeros((self.rows, 1), mx.int32)
        mx.eval(self.stage(tokens, (), self.cache), self.stage.state_arrays(self.cache))

    def prefill(self, tokens: int) -> None:
        """A first chunk."""
        cache = _batch_cache(self.stage)
        mx.eval(self.stage(mx.zeros((1, tokens), mx.int32), (), cache), self.stage.state_arrays(cache))

    def be_empty(self, rows: int) -> None:
        """So many sessions without a context."""
        self.rows, self.cache = rows, _batch_cache(self.stage, rows)

    def keep(self, layers: int) -> None:
        """Run only the first of its layers from now on, for one session."""
        self.stage.release()
        self.stage = Stage(self.stage.model, 0, layers, self.stage.structure)
        self.be_empty(rows=1)

    def pretend_context(self) -> None:
        """Let every layer have keys and values of CONTEXT_TOKENS tokens."""
        # With room for some tokens more, so that no run has to make it.
        shape = (1, self.shape.kv_heads, CONTEXT_TOKENS + 256, self.shape.head_width)
        for entry in self.stage.own_caches(self.cache):
            keys, values = (mx.full(shape, 0.1, self.dtype) for _ in range(2))
            entry.state = keys, values, mx.array([CONTEXT_TOKENS]), entry.left_padding, CONTEXT_TOKENS
        mx.eval(self.stage.state_arrays(self.cache))

    @property
    def context_bytes(self) -> int:
        """Of one layer, after `pretend_context`."""
        return 2 * CONTEXT_TOKENS * self.shape.kv_heads * self.shape.head_width * self.dtype.size


def _stage(packing: Packing | None, shape: LayerShape, layers: int, dtype: mx.Dtype, platform: Platform) -> _MadeUp:
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=shape.hidden,
            # One more than runs: a stage before the last one hands on hidden states, and every layer of it is needed
            # for them. Of the last one's, MLX would leave out what nobody asks for.
            num_hidden_layers=layers + 1,
            intermediate_size=shape.intermediate,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_width,
            rms_norm_eps=1e-5,
            vocab_size=NARROW.vocabulary,  # only the embedding's first row is read
        )
    )
    if packing is not None:
        nn.quantize(
            model,
            packing.group_size,
            packing.bits,
            mode=packing.mode,
            class_predicate=lambda _path, module: isinstance(module, nn.Linear),
        )
    model.set_dtype(dtype)
    if platform.computes_float32:
        unpack_for_many_rows(model)
    _fill(model.model.embed_tokens)
    for layer in model.model.layers[:layers]:
        _fill(layer)
    stage = Stage(model, 0, layers)
    layer_bytes = sum(array.nbytes for name, array in parameters_of(model).items() if ".layers.0." in name)
    return _MadeUp(stage, layer_bytes, shape, dtype, _batch_cache(stage))


def _batch_cache(stage: Stage, rows: int = 1) -> list[Any]:
    """What a seat steps on: batches."""
    return [entry.merge([entry] * rows) for entry in stage.make_cache()]


def _fill(module: nn.Module) -> None:
    """Give its parameters numbers: which ones is no matter, as long as sums stay finite.

    One array of each form is drawn, the others are copies of it: drawing 100 MB takes a CPU longer than reading it
    twenty times.
    """

    def filled(path: str, lazy: mx.array) -> mx.array:
        return _drawn(path.rpartition(".")[2], lazy.shape, lazy.dtype) + 0

    module.update(tree_map_with_path(filled, module.parameters()))
    mx.eval(module.parameters())


@lru_cache(maxsize=16)
def _drawn(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if name == "weight" and dtype == mx.uint32:
        return mx.random.randint(0, 2**31 - 1, shape, dtype=dtype)
    if name == "weight" and len(shape) > 1:
        return mx.random.normal(shape, dtype=dtype) * 0.02
    if dtype == mx.uint8:  # scales of the mx and nv modes: floats of 8 bits; these are far from their largest
        return mx.full(shape, 0x30, dtype)
    return mx.full(shape, {"scales": 0.01, "biases": -0.07}.get(name, 1.0), dtype)
