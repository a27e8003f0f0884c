"""A model in stages gives exactly what it gives whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import CONFIGS, REFUSED, VOCABULARY, make_model

from meshinfer.base.errors import BadInput
from meshinfer.engine import stage as stage_module
from meshinfer.engine.buffers import byte_count, from_bytes, spec_of, to_bytes
from meshinfer.engine.graph import LazyGraph
from meshinfer.engine.stage import Stage
from meshinfer.engine.structure import NotSplittable, Structure, is_overridden

BATCH = 2
LENGTHS = (9, 5, 1, 1, 1)
"""A prefill longer than the models' windows, a second chunk on a warm cache, three decode steps."""
CUTS = {"gemma3n": (1, 2), "gemma4_text": (1, 2, 3, 4), "hunyuan": (2, 4), "afm7": (1, 2)}
"""Models that share keys and values: no cut between who computes and who uses them."""


def token_chunks() -> list[mx.array]:
    return [mx.random.randint(0, VOCABULARY, (BATCH, n), key=mx.random.key(n + i)) for i, n in enumerate(LENGTHS)]


def run_whole(model: nn.Module) -> list[mx.array]:
    cache, results = make_prompt_cache(model), []
    for tokens in token_chunks():
        results.append(model(tokens, cache=cache))
        mx.eval(results[-1])
    return results


def run_stages(stages: Sequence[Stage]) -> list[mx.array]:
    """Through all stages, each array as it would cross the network: as bytes, checked before."""
    caches, results = [stage.make_cache() for stage in stages], []
    for tokens in token_chunks():
        carried: tuple[mx.array, ...] = ()
        for stage, cache in zip(stages, caches, strict=True):
            assert tuple(spec_of(array) for array in carried) == stage.carried_shapes(*tokens.shape)
            carried = tuple(from_bytes(spec_of(array), bytes(to_bytes(array))) for array in carried)
            outputs = stage(tokens, carried, cache)
            mx.eval(outputs, stage.state_arrays(cache))
            if stage.is_last:
                results.append(outputs)
            else:
                carried = outputs
    return results


def stages_of(name: str, cuts: Sequence[int]) -> list[Stage]:
    """Each stage with a model of its own, as on nodes of their own."""
    count = Structure.probe(make_model(name)).layer_count
    return [Stage(make_model(name), start, end) for start, end in pairwise((0, *cuts, count))]


def differences(name: str, cuts: Sequence[int]) -> list[float]:
    whole, split = run_whole(make_model(name)), run_stages(stages_of(name, cuts))
    assert not any(mx.any(mx.isnan(logits)).item() for logits in whole), "the comparison would say nothing"
    return [mx.max(mx.abs(one - other)).item() for one, other in zip(whole, split, strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_in_stages_is_bit_exact_at_every_cut(name: str) -> None:
    structure = Structure.probe(make_model(name))
    assert structure.cut_points == CUTS.get(name, tuple(range(1, structure.layer_count)))
    for cuts in [(cut,) for cut in structure.cut_points] + [structure.cut_points]:
        assert differences(name, cuts) == [0.0] * len(LENGTHS), f"{name} cut at {cuts}"


def test_rwkv_carries_two_arrays() -> None:
    stage = Stage(make_model("rwkv7"), 2, 4)
    assert [spec.shape for spec in stage.carried_shapes(3, 7)] == [(3, 7, 32), (3, 7, 4, 8)]


def test_gemma3n_carries_an_axis_before_the_batch() -> None:
    stage = Stage(make_model("gemma3n"), 1, 6)
    assert [spec.shape for spec in stage.carried_shapes(3, 7)] == [(2, 3, 7, 32)]


# --- what a wrong stage would look like -----------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_oss", "cohere2", "gemma3_text", "llama-sliding"])
def test_without_aliased_caches_the_comparison_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that would be silent otherwise: foreign caches that nobody advances."""
    monkeypatch.setattr(stage_module, "_advance", lambda *_: None)
    monkeypatch.setattr(Stage, "make_cache", lambda self: make_prompt_cache(self.model))
    monkeypatch.setattr(Stage, "state_arrays", lambda self, cache: [a for c in self.own_caches(cache) for a in c.state])
    cuts = Structure.probe(make_model(name)).cut_points
    assert max(differences(name, cuts)) > 1e-3


def test_a_stage_with_the_wrong_weights_is_seen() -> None:
    first, last = Stage(make_model("llama"), 0, 2), Stage(make_model("llama", seed=1), 2, 5)
    split = run_stages([first, last])
    assert max(mx.max(mx.abs(a - b)).item() for a, b in zip(run_whole(make_model("llama")), split, strict=True)) > 1e-3


def test_shadows_hold_next_to_nothing() -> None:
    """gpt_oss: layer 0 slides, layer 1 does not; a stage of layer 0 needs a shadow of the other kind."""
    stage = Stage(make_model("gpt_oss"), 0, 1)
    cache = stage.make_cache()
    assert len(cache) == 6
    assert len({id(entry) for entry in cache}) == 2
    mx.eval(stage(token_chunks()[0], None, cache), stage.state_arrays(cache))
    (own,) = stage.own_caches(cache)
    shadow = next(entry for entry in cache if entry is not own)
    assert shadow.offset == own.offset == LENGTHS[0]
    assert shadow.keys.shape[-1] == 1


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_looped_models_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(NotSplittable, match="not call its 5 layers once each"):
        Structure.probe(make_model(name))


def test_layers_that_are_one_object_are_refused() -> None:
    model = make_model("llama")
    model.model.layers[3] = model.model.layers[1]
    with pytest.raises(NotSplittable, match="several depths"):
        Structure.probe(model)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(NotSplittable, match="no list of layers"):
        Structure.probe(nn.Linear(4, 4))


def test_an_illegal_cut_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(NotSplittable, match=r"before layer 3; expected one of \[2, 4\]"):
        Stage(make_model("hunyuan"), 3, 6)


@pytest.mark.parametrize("bounds", [(-1, 2), (2, 2), (3, 2), (0, 6), (5, 5)])
def test_a_range_that_is_none_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(NotSplittable):
        Stage(make_model("llama"), *bounds)


def test_a_staged_model_is_not_staged_again() -> None:
    model = make_model("llama")
    stage = Stage(model, 1, 3)
    with pytest.raises(NotSplittable, match="a stage already"):
        Structure.probe(model)
    with pytest.raises(NotSplittable, match="a stage already"):
        Stage(model, 1, 3, stage.structure)
    stage.release()
    assert not any(is_overridden(layer) for layer in model.layers)
    assert Structure.probe(model).cut_points == stage.structure.cut_points


def test_a_failed_recording_puts_the_layers_back() -> None:
    model = make_model("nanbeige")
    with pytest.raises(NotSplittable):
        Structure.probe(model)
    assert not any(is_overridden(layer) for layer in model.layers)


@pytest.mark.parametrize(
    "carried",
    [(), (mx.zeros((2, 3, 31)),), (mx.zeros((2, 3, 32)), mx.zeros((2, 3, 32))), (mx.zeros((2, 3, 32), mx.int32),)],
    ids=["nothing", "too narrow", "too many", "integers"],
)
def test_a_step_with_wrong_arrays_is_refused(carried: tuple[mx.array, ...]) -> None:
    stage = Stage(make_model("llama"), 2, 4)
    with pytest.raises(BadInput, match="2 × 3 tokens"):
        stage(mx.zeros((2, 3), mx.int32), carried, stage.make_cache())


def test_a_neighbour_of_another_float_type_is_understood() -> None:
    stage = Stage(make_model("llama"), 2, 4)
    (out,) = stage(mx.zeros((2, 3), mx.int32), (mx.ones((2, 3, 32), mx.bfloat16),), stage.make_cache())
    assert out.dtype == mx.float32


# --- what we rely on in mlx-lm --------------------------------------------------------------------


def test_mlx_lm_names_its_caches_parts_as_we_read_them() -> None:
    """Read with defaults (`_kind`, `describe`), so that a renaming would otherwise pass in silence."""
    rotating, chunked, quantized = (
        caches.RotatingKVCache(8, keep=2),
        caches.ChunkedKVCache(16),
        caches.QuantizedKVCache(),
    )
    assert (rotating.max_size, rotating.keep, chunked.chunk_size) == (8, 2, 16)
    assert (quantized.group_size, quantized.bits) == (64, 8)
    assert caches.CacheList(rotating, chunked).caches == (rotating, chunked)
    assert caches.ArraysCache(3).cache == [None] * 3
    kinds = [caches.KVCache, caches.BatchKVCache, caches.BatchRotatingKVCache, caches.ArraysCache, caches.CacheList]
    assert all(issubclass(kind, caches._BaseCache) for kind in [*kinds, type(rotating), type(chunked), type(quantized)])
    fresh = caches.KVCache()
    assert (fresh.keys, fresh.values, fresh.empty()) == (None, None, True)


def test_caches_of_different_kinds_never_stand_for_each_other() -> None:
    several = [caches.KVCache(), caches.RotatingKVCache(8), caches.RotatingKVCache(9), caches.ArraysCache(1)]
    several += [caches.ArraysCache(2), caches.ChunkedKVCache(8), caches.CacheList(caches.KVCache(), caches.KVCache())]
    several += [caches.CacheList(caches.KVCache(), caches.RotatingKVCache(8)), caches.RotatingKVCache(8, keep=4)]
    assert len({stage_module._kind(entry) for entry in several}) == len(several)
    assert stage_module._kind(caches.RotatingKVCache(8)) == stage_module._kind(caches.RotatingKVCache(8))


# --- bytes and graphs -----------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint8]),
    transposed=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_arrays_survive_as_bytes(shape: tuple[int, ...], dtype: mx.Dtype, transposed: bool) -> None:
    array = (mx.arange(int(mx.prod(mx.array(shape)).item())).reshape(shape) * 3.7).astype(dtype)
    array = array.T if transposed else array
    data = bytes(to_bytes(array))
    assert len(data) == byte_count(spec_of(array))
    back = from_bytes(spec_of(array), data)
    assert back.dtype == array.dtype
    assert mx.array_equal(back, array).item()


def test_a_graph_tells_what_would_be_read() -> None:
    """MLX's printed form is what we parse: if it changes, this says so."""
    a, b, c = mx.ones((2, 2)), mx.ones((2, 2)), mx.ones((2, 2))
    mx.eval(b)
    product = a @ b
    graph = LazyGraph({"a": a, "b": b, "c": c, "product": product}, [product + 1, b, c * a])
    assert graph.read_by([0]) == {"a", "b", "product"}
    assert graph.read_by([1]) == {"b"}
    assert graph.read_by([1, 2]) == {"a", "b", "c"}
