"""What one may know of a model without reading a weight: where it can be cut, and what crosses a cut.

Practically every mlx-lm model is `for layer, c in zip(self.layers, cache): h = layer(h, mask, c)` with
something of its own around it: kinds of masks, index tables, scaled embeddings, soft caps. Instead of
knowing a hundred models by name, we watch one: its layers are given a recording `__call__` (a one-method
subclass, put back afterwards) and the model runs forward on a few tokens. MLX is lazy, so that only
builds a graph: no weight is read, and 30 layers take about 10 ms.

By object identity the recording tells what each layer takes from the layer before it, and in which argument
(nearly always one array, the hidden state; rwkv7 carries two), and which entries of the cache it uses. The
graph of the recording (`engine.graph`) tells what a layer takes from farther back, after whatever
arithmetic: shared keys and values, as in gemma4 or afm7. No cut may fall in between, nor between layers
that share a cache, nor where the model computes something of its own between two layers.
Two recordings with different batch and length tell which axis of a carried array is which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import CacheList, make_prompt_cache

from meshinfer.base.errors import BadInput
from meshinfer.engine.graph import LazyGraph

Slot = int | str
"""An argument of a layer's call: a position, or a keyword."""

# Prime and different from each other, so that each axis of a carried array can be told from the others.
_PROBES = ((2, 3), (5, 7))


class NotSplittable(BadInput):
    """A model, or a range of its layers, that cannot be a stage."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What an array must be to pass a cut."""

    dtype: str
    """MLX's name for it: `float32`, `bfloat16`, `float16`."""
    shape: tuple[int, ...]


Axis = int | Literal["batch", "length", "batch*length"]


@dataclass(frozen=True, slots=True)
class CarriedArray:
    """One array that crosses a cut, for any batch and length."""

    axes: tuple[Axis, ...]
    dtype: mx.Dtype

    def spec(self, batch: int, length: int) -> ArraySpec:
        sizes: dict[Axis, int] = {"batch": batch, "length": length, "batch*length": batch * length}
        return ArraySpec(dtype_name(self.dtype), tuple(sizes.get(axis, 0) or int(axis) for axis in self.axes))


@dataclass(frozen=True, slots=True)
class LayerWiring:
    """How one layer hangs in the model."""

    carried_slots: tuple[tuple[Slot, int], ...]
    """(argument, flat index among the arrays that the layer before returns)."""
    outputs: Any
    """The shape of what it returns: nested tuples, arrays as their flat index, everything else as None."""
    cache_indices: tuple[int, ...]
    """Entries of the model's cache that it uses; none for layers without one (an MLP between SSM layers)."""

    @property
    def carried(self) -> tuple[int, ...]:
        """Which arrays of the layer before must be had, in the order in which they cross a cut."""
        return tuple(sorted({output for _, output in self.carried_slots}))


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's wiring, as one recording showed it."""

    layers: tuple[LayerWiring, ...]
    cache_count: int
    cut_points: tuple[int, ...]
    """Layers before which the model may be cut, ascending, in (0, layer_count)."""
    carried_arrays: tuple[tuple[CarriedArray, ...], ...]
    """For each layer, what enters it from the layer before; empty for layer 0 and where no cut is possible."""
    logits_size: int
    """Logits per token that come out at the end."""
    float_dtype: mx.Dtype
    """In which the model computes: that of its first layer's output."""

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @staticmethod
    def probe(model: nn.Module) -> Structure:
        """Watch `model` run once, lazily.

        Raises:
            NotSplittable: it has no list of layers, uses a layer twice, or keeps state where we cannot follow.
        """
        small, large = (_record(model, batch, length) for batch, length in _PROBES)
        layers = tuple(_wiring(small.calls, index) for index in range(len(small.calls)))
        cuts = _cut_points(small.calls, layers)
        carried = tuple(
            _carried_arrays(small.calls[index - 1], large.calls[index - 1], wiring.carried) if index in cuts else ()
            for index, wiring in enumerate(layers)
        )
        return Structure(layers, small.cache_count, cuts, carried, small.logits_size, _dtype(small))

    def check_range(self, start: int, end: int) -> None:
        """See that layers `[start, end)` can be a stage.

        Raises:
            NotSplittable: naming the cut that cannot be and those that can.
        """
        if not 0 <= start < end <= self.layer_count:
            raise NotSplittable(
                f"layers [{start}, {end}) are not a stage", expected=f"0 ≤ start < end ≤ {self.layer_count}"
            )
        for cut in (start, end):
            if cut not in (0, self.layer_count, *self.cut_points):
                raise NotSplittable(
                    f"this model cannot be cut before layer {cut}",
                    expected=f"one of {list(self.cut_points)}" if self.cut_points else "no cut at all",
                    do="plan again with the cut points of its model card",
                )


def dtype_name(dtype: mx.Dtype) -> str:
    """`float32` for `mlx.core.float32`."""
    return str(dtype).rpartition(".")[2]


def arrays_in(value: Any) -> Iterator[mx.array]:
    """Every array in nested tuples, lists and dicts, in order."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_in(item)
    elif type(value) is dict:
        for item in value.values():
            yield from arrays_in(item)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers, as mlx-lm's convention has them.

    Raises:
        NotSplittable: it has none, or one of them stands there twice.
    """
    layers: list[nn.Module] = list(getattr(model, "layers", ()))
    if not layers:
        raise NotSplittable(f"{_name(model)} has no list of layers", expected="a model with `layers`")
    if len({id(layer) for layer in layers}) != len(layers):
        raise NotSplittable(f"{_name(model)} uses one layer object at several depths", expected="layers of their own")
    return layers


def override_call(layer: nn.Module, call: Callable[..., Any]) -> type[nn.Module]:
    """Give one layer another `__call__`; attributes, parameters and isinstance stay. Returns its class before."""
    before = type(layer)
    members = {"__call__": call, "__module__": before.__module__, OVERRIDDEN: True}
    layer.__class__ = type(before.__name__, (before,), members)
    return before


OVERRIDDEN = "_meshinfer_overridden"
"""Marks classes made by `override_call`, so that a model is neither recorded nor staged twice."""


def is_overridden(layer: nn.Module) -> bool:
    return hasattr(type(layer), OVERRIDDEN)


# --- the recording --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's call: every array in it is kept alive, so that identities stay unique."""

    slots: dict[Slot, Any]
    outputs: Any
    cache_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Recording:
    calls: list[_Call]
    cache_count: int
    logits_size: int


def _record(model: nn.Module, batch: int, length: int) -> _Recording:
    name = _name(model)
    layers = layers_of(model)
    if any(is_overridden(layer) for layer in layers):
        raise NotSplittable(f"this {name} is a stage already", expected="a freshly loaded model")
    cache = make_prompt_cache(model)
    index_of_cache = {id(part): index for index, entry in enumerate(cache) for part in (entry, *_parts(entry))}
    order: list[int] = []
    calls: list[_Call] = []

    def recording(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            used = {index_of_cache[id(item)] for item in _flat((*args, *kwargs.values())) if id(item) in index_of_cache}
            outputs = original(self, *args, **kwargs)
            order.append(index)
            calls.append(_Call(dict(enumerate(args)) | kwargs, outputs, tuple(sorted(used))))
            return outputs

        return call

    classes = [override_call(layer, recording(i, type(layer).__call__)) for i, layer in enumerate(layers)]
    try:
        logits = model(mx.zeros((batch, length), mx.int32), cache=cache)
    finally:
        for layer, before in zip(layers, classes, strict=True):
            layer.__class__ = before
    if order != list(range(len(layers))):
        raise NotSplittable(
            f"{name} does not call its {len(layers)} layers once each, in order ({len(order)} calls)",
            expected="a model that is not looped",
        )
    seen = {index for call in calls for index in call.cache_indices}
    hidden = [index for index, entry in enumerate(cache) if index not in seen and not entry.empty()]
    if hidden:
        raise NotSplittable(f"{name} fills caches {hidden} outside its layers", expected="caches that layers are given")
    return _Recording(calls, len(cache), int(logits.shape[-1]))


def _name(model: nn.Module) -> str:
    """The model's type, as mlx-lm names its files."""
    return type(model).__module__.rpartition(".")[2]


def _parts(entry: Any) -> tuple[Any, ...]:
    return tuple(entry.caches) if isinstance(entry, CacheList) else ()


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _dtype(recording: _Recording) -> mx.Dtype:
    return next(arrays_in(recording.calls[0].outputs)).dtype


def _wiring(calls: Sequence[_Call], index: int) -> LayerWiring:
    # Layer 0 takes its input from the embedding; when it is skipped it passes on what layer 1 would take.
    taken_by = max(index, 1) if len(calls) > 1 else 0
    slots = _slots_from_previous(calls, taken_by) if taken_by else ()
    if index == 0:
        slots = tuple((slot, output) for slot, output in slots if slot in calls[0].slots)
    return LayerWiring(slots, _outline(calls[index].outputs), calls[index].cache_indices)


def _slots_from_previous(calls: Sequence[_Call], index: int) -> tuple[tuple[Slot, int], ...]:
    produced = {id(array): flat for flat, array in reversed(list(enumerate(arrays_in(calls[index - 1].outputs))))}
    return tuple(
        (slot, produced[id(value)])
        for slot, value in calls[index].slots.items()
        if isinstance(value, mx.array) and id(value) in produced
    )


def _cut_points(calls: Sequence[_Call], layers: Sequence[LayerWiring]) -> tuple[int, ...]:
    """Cuts that no value and no shared cache crosses, but for what the next layer takes directly."""
    bonds = _reach_across(calls, layers)
    users: dict[int, list[int]] = {}
    for index, wiring in enumerate(layers):
        for entry in wiring.cache_indices:
            users.setdefault(entry, []).append(index)
    bonds += [(sharing[0], sharing[-1]) for sharing in users.values()]
    return tuple(
        cut
        for cut in range(1, len(layers))
        if layers[cut].carried_slots and not any(producer < cut <= consumer for producer, consumer in bonds)
    )


def _reach_across(calls: Sequence[_Call], layers: Sequence[LayerWiring]) -> list[tuple[int, int]]:
    """(producer, consumer) wherever a layer's argument depends on an earlier layer: no cut in (producer, consumer].

    But for the arrays that the layer before hands on: those cross a cut.
    """
    given: list[tuple[int, mx.array]] = []
    for index, call in enumerate(calls):
        direct = {slot for slot, _ in layers[index].carried_slots} if index else {0}
        given += [
            (index, array) for slot, value in call.slots.items() if slot not in direct for array in arrays_in(value)
        ]
    if not given:
        return []
    # An array that layers hand through is known by one name only, the last that it is given: let that be its producer's.
    outputs = {(index, flat): a for index, call in enumerate(calls) for flat, a in enumerate(arrays_in(call.outputs))}
    outputs = dict(reversed(outputs.items()))
    unique = {id(array): array for _, array in given}
    graph = LazyGraph(outputs, list(unique.values()))
    read = {key: graph.read_by([place]) for place, key in enumerate(unique)}
    return [
        (max(producers), consumer)
        for consumer, array in given
        if (producers := [layer for layer, _ in read[id(array)] if layer < consumer])
    ]


def _outline(value: Any) -> Any:
    flat = iter(range(2**31))

    def walk(item: Any) -> Any:
        if isinstance(item, mx.array):
            return next(flat)
        return tuple(walk(part) for part in item) if isinstance(item, list | tuple) else None

    return walk(value)


def _carried_arrays(small: _Call, large: _Call, wanted: Sequence[int]) -> tuple[CarriedArray, ...]:
    first, second = list(arrays_in(small.outputs)), list(arrays_in(large.outputs))
    return tuple(_carried_array(first[index], second[index]) for index in wanted)


def _carried_array(small: mx.array, large: mx.array) -> CarriedArray:
    (batch, length), (more_batch, more_length) = _PROBES
    axes_by_sizes: dict[tuple[int, int], Axis] = {
        (batch, more_batch): "batch",
        (length, more_length): "length",
        (batch * length, more_batch * more_length): "batch*length",
    }
    axes: list[Axis] = []
    for sizes in zip(small.shape, large.shape, strict=True):
        axis: Axis | None = sizes[0] if sizes[0] == sizes[1] else axes_by_sizes.get(sizes)
        if axis is None:
            raise NotSplittable(
                f"an array between two layers has the shape {small.shape}", expected="batch × length × …"
            )
        axes.append(axis)
    return CarriedArray(tuple(axes), small.dtype)
