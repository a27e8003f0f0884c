"""What the agent asks of a speed probe, and what it is told: between two processes of one node, as JSON.

A probe is a short-lived process with the engine in it (`python -m meshinfer.runner speed`). It is told
which kinds of weights to measure and what a layer of a model at hand looks like, so that it measures
products of the sizes that will really run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from meshinfer.base.bounds import at_least, sized
from meshinfer.base.errors import BadInput
from meshinfer.planning.model_card import ModelCard
from meshinfer.topology.speed import FLOAT_KINDS, NodeSpeed

_AFFINE = re.compile(r"q([234568])g(16|32|64|128)")
_OTHER_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
_SHAPE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})x([1-9][0-9]{0,3})x([1-9][0-9]{0,3})x([1-9][0-9]{0,6})")


@dataclass(frozen=True, slots=True)
class Packing:
    """How a quantised kind lies in memory, in the engine's words."""

    bits: int
    group_size: int
    mode: str


def packing_of(kind: str) -> Packing | None:
    """How weights of `kind` are packed; None for floats.

    Raises:
        BadInput: no kind that this build knows. Names of kinds come from other nodes' cards too.
    """
    if kind in FLOAT_KINDS:
        return None
    if match := _AFFINE.fullmatch(kind):
        return Packing(int(match[1]), int(match[2]), "affine")
    if kind in _OTHER_MODES:
        return Packing(*_OTHER_MODES[kind], kind)
    raise BadInput(f"{kind[:32]!r} is no kind of weights", expected="float32, bfloat16, float16, q4g64, mxfp4, …")


def is_kind(text: str) -> bool:
    """Whether this build can measure weights of that kind."""
    try:
        packing_of(text)
    except BadInput:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A transformer layer, as far as its speed depends on it, and the vocabulary that is sampled from."""

    hidden: int = 1024
    intermediate: int = 2816
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 65_536

    @classmethod
    def of(cls, card: ModelCard) -> LayerShape:
        """The shape of a model's layers; of the default where the card does not say or would be no such layer."""
        default = cls()
        hidden, heads = card.hidden_size, card.attention_heads
        if not (hidden and heads and hidden % heads == 0 and card.intermediate_size):
            return default
        head_width = hidden // heads
        kv_heads = max((layer.kv_elements_per_token for layer in card.layers), default=0) // (2 * head_width)
        fits = 0 < kv_heads <= heads and heads % kv_heads == 0
        return cls(hidden, card.intermediate_size, heads, kv_heads if fits else heads, max(card.vocab_size, 2))

    @classmethod
    def parse(cls, text: str) -> LayerShape:
        """`576x1536x9x3x49152`: hidden, intermediate, heads, key-value heads, vocabulary.

        Raises:
            BadInput: not five numbers that make a layer.
        """
        match = _SHAPE.fullmatch(text)
        shape = cls(*map(int, match.groups())) if match else None
        if shape is None or shape.hidden % shape.heads or shape.heads % shape.kv_heads:
            raise BadInput(f"{text[:60]!r} is no layer's shape", expected="such as 576x1536x9x3x49152")
        return shape

    def __str__(self) -> str:
        return f"{self.hidden}x{self.intermediate}x{self.heads}x{self.kv_heads}x{self.vocabulary}"

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def weights(self) -> int:
        """Elements of the matrices of one layer: q, k, v, o, gate, up, down."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_heads * self.head_width + 3 * self.intermediate)


@dataclass(frozen=True, slots=True)
class MeasuredKind:
    """One kind of weights, measured."""

    kind: Annotated[str, sized(1, 32)]
    speed: NodeSpeed
    spread: Annotated[float, at_least(0)]
    """Of its decode steps: half the middle half's width, as a share of the median."""
    samples: Annotated[int, at_least(0)]


StoppedBy = Literal["", "refused", "pressure", "time"]
"""Why a memory trial ended before all was allocated: the engine was refused more; the machine ran short of memory or
began to swap; the time was up (what was not tried is believed)."""


@dataclass(frozen=True, slots=True)
class MemoryTrial:
    """What the engine could really allocate."""

    asked_bytes: Annotated[int, at_least(0)]
    got_bytes: Annotated[int, at_least(0)]
    """Allocated and written to."""
    stopped_by: StoppedBy = ""

    @property
    def usable_bytes(self) -> int:
        """As far as it is known: all that was asked for, unless something stood against it."""
        return self.got_bytes if self.stopped_by in {"refused", "pressure"} else self.asked_bytes


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """A probe's one line of output."""

    kinds: Annotated[tuple[MeasuredKind, ...], sized(0, 16)]
    memory: MemoryTrial | None
    """None: nobody asked."""
    seconds: Annotated[float, at_least(0)]
    """The measuring alone, without the process's start."""
