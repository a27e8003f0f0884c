"""When this node measures itself: the driver around `speed_book` and `calibration`.

    look every 2 s ─► is a kind due, and no runner here? ─► probe process ─► book ─► speed.json ─► card
                          ▲                                     ╳ killed when a runner is to start
    runners' heartbeats ─► calibration ────────────────────────────────────────────► card

The card goes out without speeds first: a start waits for nothing. A probe never runs beside a runner,
which it would slow down and by which it would be misled: it begins only when this node holds nothing,
and a runner that is to start first ends the probe and waits until it is gone (`give_way`). The probe is
repeated when the node is free again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from meshinfer.base.beats import sleep_to_beat
from meshinfer.base.errors import MeshinferError
from meshinfer.base.files import write_atomically
from meshinfer.base.ids import ModelId, PlacementId
from meshinfer.models.store import ModelStore
from meshinfer.planning.cost import LayerWork, Stage, decode_time
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.work import model_work
from meshinfer.serving.available_memory import available_bytes
from meshinfer.serving.calibration import Calibration
from meshinfer.serving.give_way import GiveWay
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.ports import Ports
from meshinfer.serving.seat_service import SeatService
from meshinfer.serving.speed_book import SpeedBook, wanted_kinds
from meshinfer.serving.speed_process import ProbeQuestion, ask_process, machine_fingerprint
from meshinfer.topology.card import KindSpeed
from meshinfer.topology.placement import Placement
from meshinfer.topology.speed import NodeSpeed, engine_kind
from meshinfer.wire.runner_control import Heartbeat
from meshinfer.wire.speed_probe import LayerShape, SpeedReport

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
FINGERPRINT_SECONDS = 60.0
NEWS_SHARE = 0.05
"""A change of a speed that is worth an announcement; runs vary by as much."""


@dataclass(frozen=True, slots=True)
class ProbePorts:
    """The agent, as the probe sees it."""

    home: Path
    wanted: Callable[[], Awaitable[Mapping[str, LayerShape]]]
    """Kinds of weights that this node should know its speed for."""
    at_work: Callable[[], bool]
    """Whether memory is promised here or a runner lives."""
    memory_to_try: Callable[[], int]
    """Bytes that runners may use, as far as is known now; 0 if the operator has said it."""
    publish_speeds: Callable[[tuple[KindSpeed, ...]], None]
    publish_memory: Callable[[int], None]
    """The engine gets no more than this."""
    running: Callable[[], Mapping[SeatKey, tuple[Heartbeat, Placement, ModelCard | None]]]
    """Runners that have said something, with what they are."""
    fingerprint: Callable[[], str]
    """Blocks for a moment: called in a thread."""
    ask: Callable[[ProbeQuestion], Awaitable[SpeedReport]]
    """Runs a probe; cancelling it ends the process before it returns. Raises MeshinferError."""
    computes_float32: bool
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = trio.to_thread.run_sync
    """How what blocks is done; in simulations at once, since a clock that jumps does not wait for threads."""


class SpeedProbe:
    """This node's speeds, kept true."""

    def __init__(self, ports: ProbePorts, give_way: GiveWay) -> None:
        self._ports = ports
        self._give_way = give_way
        self._calibration = Calibration()
        self._steps: dict[SeatKey, int] = {}
        """Counted by each living runner, as of the last look."""
        self._published: dict[str, NodeSpeed] = {}

    async def run(self) -> None:
        """Look, measure and calibrate until cancelled; no process is left then."""
        ports = self._ports
        book = await self._open_book()
        self._publish(book)
        if ceiling := book.present.memory_ceiling_bytes:
            ports.publish_memory(ceiling)
        looked_at = trio.current_time()
        while True:
            if trio.current_time() >= looked_at + FINGERPRINT_SECONDS:
                looked_at = trio.current_time()
                if book.look(await ports.in_thread(ports.fingerprint)):
                    log.info("this machine has changed; its speed is measured again unless it is known")
                    self._calibration = Calibration()
                    self._published.clear()
                    self._publish(book)
            self._calibrate(book)
            wanted = await ports.wanted()
            due = book.due(wanted, trio.current_time())
            if due and not ports.at_work():
                await self._probe(book, due)
            await sleep_to_beat(LOOK_SECONDS)

    # --- measuring ------------------------------------------------------------------------------

    async def _probe(self, book: SpeedBook, due: Mapping[str, LayerShape]) -> None:
        ports = self._ports
        memory_bytes = 0 if book.present.memory_tried else ports.memory_to_try()
        question = ProbeQuestion(tuple(due.items()), memory_bytes)
        try:
            report = await self._give_way.probe(partial(ports.ask, question))
        except MeshinferError as error:
            again = book.failed(trio.current_time())
            why = str(error).rstrip(".")
            log.warning("this machine's speed could not be measured (%s); trying again in %.0f s", why, again)
            return
        if report is None:
            log.debug("a probe of %s made way for a runner", ", ".join(due))
            return
        for kind in book.measured(report, trio.current_time()):
            self._calibration.forget(kind)
            self._published.pop(kind, None)
        await ports.in_thread(partial(self._write, book.to_bytes()))
        if report.memory is not None:
            ports.publish_memory(report.memory.usable_bytes)
        self._publish(book)

    # --- learning from real runs ----------------------------------------------------------------

    def _calibrate(self, book: SpeedBook) -> None:
        """Hold what runners say against what the probe's numbers predict."""
        running = self._ports.running()
        self._steps = {key: steps for key, steps in self._steps.items() if key in running}
        for key, (heartbeat, placement, card) in running.items():
            before = self._steps.get(key, 0)
            self._steps[key] = heartbeat.steps
            # With one session it is clear what a step was; with several its batch is only roughly known.
            if card is None or heartbeat.sessions != 1 or heartbeat.steps <= before:
                continue
            predicted = self._predicted_seconds(book, card, placement, key.seat_index, heartbeat)
            kind = engine_kind(card.weight_kind, self._ports.computes_float32)
            steps = heartbeat.steps - before
            # By the clock that the probe went by: what others use is on the card as its load, and would count twice.
            self._calibration.observe(kind, predicted, heartbeat.computing_seconds, steps, trio.current_time())
        self._publish(book)

    def _predicted_seconds(
        self, book: SpeedBook, card: ModelCard, placement: Placement, seat_index: int, heartbeat: Heartbeat
    ) -> float:
        """A decode step of that seat by the probe's numbers alone; 0 where there are none."""
        wide, known = self._ports.computes_float32, book.by_kind
        layers, head = (known.get(engine_kind(kind, wide)) for kind in (card.weight_kind, card.head_kind))
        if layers is None:
            return 0.0
        seat = placement.seats[seat_index]
        return step_seconds(
            card, seat.start, seat.end, layers.speed, (head or layers).speed, wide, heartbeat.cache_bytes
        )

    # --- telling --------------------------------------------------------------------------------

    def _publish(self, book: SpeedBook) -> None:
        speeds = book.speeds(self._calibration.applied)
        for told in speeds:
            before = self._published.get(told.kind)
            if before is None or _differ(before.stream_bytes_per_second, told.speed.stream_bytes_per_second):
                self._published[told.kind] = told.speed
        self._ports.publish_speeds(tuple(KindSpeed(told.kind, self._published[told.kind]) for told in speeds))

    # --- speed.json -----------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self._ports.home / "speed.json"

    async def _open_book(self) -> SpeedBook:
        fingerprint = await self._ports.in_thread(self._ports.fingerprint)
        try:
            data = await self._ports.in_thread(self._path.read_bytes)
        except OSError:
            data = b""  # a first start
        return SpeedBook.from_bytes(data, fingerprint)

    def _write(self, data: bytes) -> None:
        try:
            write_atomically(self._path, data)
        except OSError as error:
            log.warning("cannot write %s (%s); the next start will measure again", self._path, error)


def step_seconds(
    card: ModelCard, start: int, end: int, layers: NodeSpeed, head: NodeSpeed, computes_float32: bool, cache_bytes: int
) -> float:
    """One decode step of one session in layers `[start, end)` whose caches hold so much: what planners predict for it."""
    work = model_work(card, computes_float32)
    context = context_held(work.layers[start:end], cache_bytes)
    return decode_time(work, Stage(start, end, (layers,), heads=(head,)), 1, context).seconds


def context_held(layers: Sequence[LayerWork], cache_bytes: int) -> float:
    """Tokens of one session's context, by the bytes of its caches in `layers`; full windows grow no more."""
    least = min((layer.cache_bytes_per_token for layer in layers if layer.cache_bytes_per_token), default=0.0)
    if not least:
        return 0.0
    low, high = 0.0, cache_bytes / least
    while high - low > 1:
        middle = (low + high) / 2
        held = sum(layer.cached_tokens(middle) * layer.cache_bytes_per_token + layer.state_bytes for layer in layers)
        low, high = (middle, high) if held < cache_bytes else (low, middle)
    return high


def _differ(before: float, now: float) -> bool:
    return abs(math.log(now / before)) > NEWS_SHARE


# --- wired to a node ------------------------------------------------------------------------------


def node_probe(ports: Ports, seats: SeatService, store: ModelStore, update_card: Callable[..., Any]) -> SpeedProbe:
    """The probe of the node that `ports` is of. `update_card` changes fields of its card, by name."""
    settings, card = ports.settings, ports.own_card
    wide = card().computes_float32

    def held() -> list[ModelCard]:
        return [found for model in store.held() if (found := _card_of(store, model.model_id)) is not None]

    async def wanted() -> Mapping[str, LayerShape]:
        others = [other for other in ports.topology().nodes if other.node_id != ports.node_id]
        return wanted_kinds(await trio.to_thread.run_sync(held), others, computes_float32=wide)

    def memory_to_try() -> int:
        if settings.memory_limit_bytes:
            return 0
        return min(card().memory_usable_bytes, int(available_bytes() * (1 - settings.memory_reserve)))

    def publish_memory(usable_bytes: int) -> None:
        if not settings.memory_limit_bytes:
            update_card(memory_usable_bytes=min(usable_bytes, card().memory_usable_bytes))

    def running() -> Mapping[SeatKey, tuple[Heartbeat, Placement, ModelCard | None]]:
        placements = {placement.placement_id: placement for placement in card().placements}
        held = {SeatKey(seat.instance_id, seat.epoch, seat.seat_index): seat.placement_id for seat in card().seats}
        found: dict[SeatKey, tuple[Heartbeat, Placement, ModelCard | None]] = {}
        for key, heartbeat in seats.runners.heartbeats().items():
            if (placement := placements.get(held.get(key, PlacementId("")))) is not None:
                found[key] = heartbeat, placement, _card_of(store, placement.model_id)
        return found

    return SpeedProbe(
        ProbePorts(
            home=settings.home,
            wanted=wanted,
            at_work=lambda: bool(card().memory_promised_bytes or seats.runners.pids()),
            memory_to_try=memory_to_try,
            publish_speeds=lambda speeds: update_card(speeds=speeds),
            publish_memory=publish_memory,
            running=running,
            fingerprint=partial(machine_fingerprint, card().accelerator),
            ask=ask_process,
            computes_float32=wide,
        ),
        seats.runners.give_way,
    )


def _card_of(store: ModelStore, model_id: ModelId) -> ModelCard | None:
    try:
        info = store.info(model_id)
    except (MeshinferError, OSError):
        return None  # removed just now, or damaged: whoever wants to run it will be told
    return info.card if info else None
