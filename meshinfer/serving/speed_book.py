"""What is known of this machine's speed, and what should be measured next: pure.

Measurements belong to a *fingerprint*: the machine, its engine's versions, where its power comes from.
A few of them are kept, so that unplugging and plugging in again, or a restart, measures nothing anew.
A kind of weights is due when it is wanted and has no number under the present fingerprint; again, ten
minutes later, where the number was unsteady (a busy machine), a few times; and after a failure, with
growing patience. Of two measurements the steadier one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from meshinfer.base.bounds import at_least, sized
from meshinfer.planning.model_card import ModelCard
from meshinfer.topology.card import KindSpeed, NodeCard
from meshinfer.topology.speed import NodeSpeed, engine_kind
from meshinfer.wire.speed_probe import LayerShape, MeasuredKind, SpeedReport, is_kind

KINDS_LIMIT = 16
"""As many as a card publishes."""
FINGERPRINTS_LIMIT = 4
UNSTEADY_SPREAD = 0.1
"""Of the decode steps, half the middle half; above it the number is good to no better than about 20 %."""
UNSTEADY_AGAIN_SECONDS = 600.0
UNSTEADY_TRIES = 3
"""A machine that is never quiet has the numbers that it has."""
FAILED_AGAIN_SECONDS = (60.0, 600.0, 3600.0)
"""After the first, second, and every further failure in a row."""
USUAL_KIND = "q4g64"
"""What most conversions are; measured where no model says what else, so that a planner knows something of every node."""


def wanted_kinds(
    held: Iterable[ModelCard], others: Iterable[NodeCard], *, computes_float32: bool
) -> dict[str, LayerShape]:
    """Kinds that this node should have numbers for, each with the shape to measure it with; most important first.

    Those of the models at hand, in the shape of the largest of them; then those that other nodes have numbers
    for, since a plan compares like with like, and a model's files may come here from there.
    """
    wanted: dict[str, LayerShape] = {}
    for card in sorted(held, key=lambda card: (-card.weight_bytes(0, card.layer_count, False), card.model_id)):
        for kind in (card.weight_kind, card.head_kind):
            if is_kind(kind):
                wanted.setdefault(engine_kind(kind, computes_float32), LayerShape.of(card))
    published = sorted({spoken.kind for card in others for spoken in card.speeds})
    for kind in [*published, *([] if wanted or published else [USUAL_KIND])]:
        if is_kind(kind):
            wanted.setdefault(engine_kind(kind, computes_float32), LayerShape())
    return dict(list(wanted.items())[:KINDS_LIMIT])


@dataclass(frozen=True, slots=True)
class KeptSpeeds:
    """What was measured under one fingerprint."""

    fingerprint: Annotated[str, sized(1, 128)]
    kinds: Annotated[tuple[MeasuredKind, ...], sized(0, KINDS_LIMIT)] = ()
    memory_tried: bool = False
    memory_ceiling_bytes: Annotated[int, at_least(0)] = 0
    """What the engine was refused more than; 0: it was not."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """`speed.json`."""

    format: int
    machines: Annotated[tuple[KeptSpeeds, ...], sized(0, FINGERPRINTS_LIMIT)]
    """Newest first."""


FORMAT = 2
"""Raised when what a probe measures changes its meaning: numbers of another format are measured anew."""


@dataclass(slots=True)
class _Tries:
    """Of one kind, since this agent's start or the last change of fingerprint."""

    count: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class SpeedBook:
    """The measurements of this machine."""

    fingerprint: str
    machines: dict[str, KeptSpeeds] = field(default_factory=dict[str, KeptSpeeds])
    """By fingerprint, oldest first; at most FINGERPRINTS_LIMIT."""
    _tries: dict[str, _Tries] = field(default_factory=dict[str, _Tries])
    _failures: int = 0
    _failed_until: float = 0.0

    @classmethod
    def from_bytes(cls, data: bytes, fingerprint: str) -> SpeedBook:
        """The book as it was written down; an empty one where that cannot be read, or is of another format."""
        try:
            kept = msgspec.json.decode(data, type=KeptFile)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls(fingerprint)
        if kept.format != FORMAT:
            return cls(fingerprint)
        return cls(fingerprint, {machine.fingerprint: machine for machine in reversed(kept.machines)})

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(KeptFile(FORMAT, tuple(reversed(self.machines.values()))))

    @property
    def present(self) -> KeptSpeeds:
        """What is known of the machine as it is now."""
        return self.machines.get(self.fingerprint) or KeptSpeeds(self.fingerprint)

    @property
    def by_kind(self) -> dict[str, MeasuredKind]:
        return {measured.kind: measured for measured in self.present.kinds}

    def look(self, fingerprint: str) -> bool:
        """The machine's fingerprint now; whether it has changed."""
        if fingerprint == self.fingerprint:
            return False
        self.fingerprint = fingerprint
        self._tries.clear()
        self._failures, self._failed_until = 0, 0.0
        return True

    def due(self, wanted: Mapping[str, LayerShape], now: float) -> dict[str, LayerShape]:
        """What to measure now; nothing, if all is known or it is too early to try again."""
        if now < self._failed_until:
            return {}
        return {kind: shape for kind, shape in wanted.items() if self._is_due(kind, now)}

    def _is_due(self, kind: str, now: float) -> bool:
        known, tries = self.by_kind.get(kind), self._tries.get(kind, _Tries())
        if known is None:
            return True
        # One from an earlier start is believed as it is: at this one nobody has tried.
        unsteady = known.spread > UNSTEADY_SPREAD and 0 < tries.count < UNSTEADY_TRIES
        return unsteady and now >= tries.not_before

    def measured(self, report: SpeedReport, now: float) -> tuple[str, ...]:
        """Take a report in; the kinds whose numbers are other ones now."""
        self._failures, self._failed_until = 0, 0.0
        kinds, changed = self.by_kind, list[str]()
        for new in report.kinds:
            tries = self._tries.setdefault(new.kind, _Tries())
            tries.count, tries.not_before = tries.count + 1, now + UNSTEADY_AGAIN_SECONDS
            if (old := kinds.get(new.kind)) is None or new.spread < old.spread:
                # The newest stands last; the first ones go when there are too many.
                kinds.pop(new.kind, None)
                kinds[new.kind] = new
                changed.append(new.kind)
        present, memory = self.present, report.memory
        kept = KeptSpeeds(
            self.fingerprint,
            tuple(kinds.values())[-KINDS_LIMIT:],
            present.memory_tried or memory is not None,
            memory.usable_bytes if memory and memory.stopped_by == "refused" else present.memory_ceiling_bytes,
        )
        self.machines.pop(self.fingerprint, None)
        self.machines[self.fingerprint] = kept
        while len(self.machines) > FINGERPRINTS_LIMIT:
            del self.machines[next(iter(self.machines))]
        return tuple(changed)

    def failed(self, now: float) -> float:
        """A probe gave no answer; the seconds until the next one."""
        patience = FAILED_AGAIN_SECONDS[min(self._failures, len(FAILED_AGAIN_SECONDS) - 1)]
        self._failures += 1
        self._failed_until = now + patience
        return patience

    def speeds(self, applied: Callable[[str, NodeSpeed], NodeSpeed]) -> tuple[KindSpeed, ...]:
        """For the card, sorted by kind; `applied` is what real runs make of a number."""
        return tuple(KindSpeed(kind, applied(kind, measured.speed)) for kind, measured in sorted(self.by_kind.items()))
