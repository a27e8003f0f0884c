"""One stage: layers `[start, end)` of any mlx-lm model, run by the model's own forward.

Nothing of a model is implemented again. The whole model stays, lazily loaded, with its own `__call__`;
single layers get another one:

    layer:      0 … start−1     start           …    end−1            end … n−1
    its call:   passes its      takes what the       also keeps       passes its
                input through   stage before sent    what it returns  input through

MLX evaluates only what somebody asks for, so embedding, norm, head and foreign layers are never read on
a stage that does not need them. Every stage gets the token ids (four bytes each), so models that feed
per-layer embeddings work too.

**Caches.** A model looks into the caches of *fixed* layers for its masks and offsets (`cache[swa_idx]`),
which may be foreign here. So `make_cache` returns a list of full length in which the entry of a foreign
layer is one of the stage's own caches of the same kind; where the stage has none of that kind, one
*shadow* per kind stands in, advanced by one-wide dummies. Without that, sliding-window models are
silently wrong; a test shows that it would be seen.

A stage is plain synchronous code for the one MLX thread. Its results are lazy: the caller evaluates them
together with `state_arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import make_prompt_cache

from meshinfer.base.errors import BadInput
from meshinfer.engine.structure import (
    ArraySpec,
    NotSplittable,
    Structure,
    arrays_in,
    dtype_name,
    is_overridden,
    layers_of,
    override_call,
)

Cache = list[Any]
"""mlx-lm's caches, one per entry of the model's own cache list; foreign entries alias own ones or shadows."""


class Stage:
    """Layers `[start, end)` of `model`, which belongs to the stage from then on.

    Raises:
        NotSplittable: the model cannot be cut there.
    """

    def __init__(self, model: nn.Module, start: int, end: int, structure: Structure | None = None) -> None:
        self.structure = structure or Structure.probe(model)
        self.structure.check_range(start, end)
        self.model, self.start, self.end = model, start, end
        self._own_indices = sorted({i for wiring in self.structure.layers[start:end] for i in wiring.cache_indices})
        self._step = _Step()
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        """The layers that got another call, with the class that they had."""
        layers = layers_of(model)
        if any(is_overridden(layer) for layer in layers):
            raise NotSplittable("this model is a stage already", expected="a freshly loaded model")
        for index, layer in enumerate(layers):
            if not start <= index < end:
                self._classes.append((layer, override_call(layer, self._pass_through(index))))
            elif (index == start and not self.is_first) or (index == end - 1 and not self.is_last):
                self._classes.append((layer, override_call(layer, self._edge(index, type(layer).__call__))))

    def release(self) -> None:
        """Give the model its own calls back; the stage is of no use afterwards."""
        while self._classes:
            layer, before = self._classes.pop()
            layer.__class__ = before

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.structure.layer_count

    def carried_shapes(self, batch: int, length: int) -> tuple[ArraySpec, ...]:
        """What this stage receives for a step of `batch` rows of `length` tokens: dtype and shape of each array.

        A float array of another float type may come too (the stage before computes in its own); it is cast.
        """
        return tuple(array.spec(batch, length) for array in self.structure.carried_arrays[self.start])

    # --- caches -----------------------------------------------------------------------------------

    def make_cache(self) -> Cache:
        """An empty cache for one sequence: as long as the model's own list, foreign entries aliased."""
        full: Cache = make_prompt_cache(self.model)
        stand_ins: dict[Any, Any] = {}
        for index in self._own_indices:
            stand_ins.setdefault(_kind(full[index]), full[index])
        return [
            entry if index in self._own_indices else stand_ins.setdefault(_kind(entry), entry)
            for index, entry in enumerate(full)
        ]

    def own_caches(self, cache: Cache) -> list[Any]:
        """The entries that hold this stage's own state (no shadows)."""
        return [cache[index] for index in self._own_indices]

    def state_arrays(self, cache: Cache) -> list[mx.array]:
        """All arrays of `cache`, shadows too: evaluate them with each step's result, or the graph grows for ever."""
        unique = {id(entry): entry for entry in cache}.values()
        return [array for entry in unique for array in arrays_in(state_of(entry))]

    # --- one step ---------------------------------------------------------------------------------

    def __call__(
        self, tokens: mx.array, carried: Sequence[mx.array] | None, cache: Cache
    ) -> mx.array | tuple[mx.array, ...]:
        """One step over `tokens` [batch, length] (int32), lazily.

        Args:
            tokens: ids that are known to be in the vocabulary; MLX does not check them.
            carried: what the stage before produced; None (or empty) on the first stage.
            cache: of `make_cache`, or what batching made of it.

        Returns:
            Logits [batch, length, vocabulary] on the last stage, else the carried arrays.

        Raises:
            BadInput: `carried` is not what `carried_shapes` says.
        """
        batch, length = tokens.shape
        self._step = _Step(
            batch,
            length,
            incoming=self._accept(tuple(carried or ()), batch, length),
            own=frozenset(id(entry) for entry in self.own_caches(cache)),
        )
        step = self._step
        try:
            logits = self.model(tokens, cache=cache)
        finally:
            self._step = _Step()
        return logits if self.is_last else step.outgoing

    def _accept(self, carried: tuple[mx.array, ...], batch: int, length: int) -> tuple[mx.array, ...]:
        arrays = self.structure.carried_arrays[self.start]
        expected = self.carried_shapes(batch, length)
        fits = len(carried) == len(expected) and all(
            tuple(array.shape) == spec.shape and (array.dtype == own.dtype or _both_float(array.dtype, own.dtype))
            for array, spec, own in zip(carried, expected, arrays, strict=True)
        )
        if not fits:
            raise BadInput(
                f"a step of {batch} × {length} tokens came with {[(dtype_name(a.dtype), a.shape) for a in carried]}",
                expected=f"{[(spec.dtype, spec.shape) for spec in expected]}",
            )
        return tuple(array.astype(own.dtype) for array, own in zip(carried, arrays, strict=True))

    def rehearse(self, length: int, cache: Cache) -> None:
        """A step of so many tokens, for nobody; returns when it is computed."""
        carried = [mx.zeros(spec.shape, getattr(mx, spec.dtype)) for spec in self.carried_shapes(1, length)]
        outputs = self(mx.zeros((1, length), mx.int32), carried, cache)
        mx.eval(outputs, self.state_arrays(cache))

    # --- the layers' other calls ------------------------------------------------------------------

    def _pass_through(self, index: int) -> Callable[..., Any]:
        wiring = self.structure.layers[index]

        def call(_layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._advance_shadows((*args, *kwargs.values()))
            given: dict[Any, Any] = dict(enumerate(args)) | kwargs
            return _fill(wiring.outputs, {output: given.get(slot) for slot, output in wiring.carried_slots})

        return call

    def _edge(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        wiring = self.structure.layers[index]
        receives = index == self.start and not self.is_first
        wanted = () if index != self.end - 1 or self.is_last else self.structure.layers[self.end].carried

        def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if receives:
                received = dict(zip(wiring.carried, self._step.incoming, strict=True))
                slots: dict[Any, Any] = {slot: received[output] for slot, output in wiring.carried_slots}
                args = tuple(slots.get(position, value) for position, value in enumerate(args))
                kwargs |= {name: value for name, value in slots.items() if name in kwargs}
            outputs = original(layer, *args, **kwargs)
            if wanted:
                arrays = list(arrays_in(outputs))
                # A handle of our own: some models write into the last layer's output afterwards (gemma3n).
                self._step.outgoing = tuple(mx.stop_gradient(arrays[output]) for output in wanted)
            return outputs

        return call

    def _advance_shadows(self, arguments: tuple[Any, ...]) -> None:
        step = self._step
        for entry in arguments:
            if isinstance(entry, caches._BaseCache) and id(entry) not in step.own | step.advanced:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - its kinds share no public base
                step.advanced |= {id(entry)}
                _advance(entry, step.batch, step.length)


class _Step:
    """What one call of a stage carries along."""

    def __init__(
        self,
        batch: int = 0,
        length: int = 0,
        incoming: tuple[mx.array, ...] = (),
        own: frozenset[int] = frozenset(),
    ) -> None:
        self.batch, self.length = batch, length
        self.incoming = incoming
        self.outgoing: tuple[mx.array, ...] = ()
        self.own = own
        """Identities of the caches that the stage's layers advance themselves."""
        self.advanced: frozenset[int] = frozenset()
        """Identities of the shadows that were advanced in this step: each once, however many layers share it."""


def _kind(entry: Any) -> Any:
    """Caches of equal kind give equal masks and offsets when they have seen the same tokens."""
    if isinstance(entry, caches.CacheList):
        return tuple(_kind(part) for part in entry.caches)
    sizes = tuple(getattr(entry, name, None) for name in ("max_size", "keep", "chunk_size", "group_size", "bits"))
    return (type(entry), sizes, len(entry.cache) if isinstance(entry, caches.ArraysCache) else None)


def _both_float(one: mx.Dtype, other: mx.Dtype) -> bool:
    return mx.issubdtype(one, mx.floating) and mx.issubdtype(other, mx.floating)


def state_of(entry: Any) -> Any:
    """What a cache holds; an untouched one may have no state to ask for."""
    if isinstance(entry, caches.CacheList):
        return [state_of(part) for part in entry.caches]
    return entry.state


def _advance(entry: Any, batch: int, length: int) -> None:
    """Let a shadow see `length` tokens more; its content is one element wide and never read."""
    if isinstance(entry, caches.CacheList):
        for part in entry.caches:
            _advance(part, batch, length)
    elif isinstance(entry, caches.ArraysCache):
        for index, array in enumerate(entry.cache):
            if array is None:
                entry[index] = mx.zeros((batch, 1))  # batching takes rows out of it and puts rows in
        entry.advance(length)
    else:
        width = getattr(entry, "group_size", 1)
        dummy = mx.zeros((batch, 1, length, width))
        entry.update_and_fetch(dummy, dummy)


def _fill(outline: Any, arrays: dict[int, Any]) -> Any:
    if isinstance(outline, tuple):
        return tuple(_fill(part, arrays) for part in outline)  # pyright: ignore[reportUnknownVariableType]
    return arrays.get(outline) if isinstance(outline, int) else None
