"""Runners of this node's seats: what the ledger decides is done, and what they say gets to the ledger.

A runner is started when a seat is to load, goes on as the next epoch's where that gives this node the very same layers,
and ends with its seat. Whether it still does anything is looked at here, and judged by the ledger. How it gets its
channels is in `serving.seat_channels`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from meshinfer.base.beats import sleep_to_beat
from meshinfer.base.errors import MeshinferError
from meshinfer.serving.give_way import GiveWay
from meshinfer.serving.held_runner import HeldRunner
from meshinfer.serving.held_seat import SeatKey, dialled_by
from meshinfer.serving.ports import Ports
from meshinfer.serving.reach import dialled_in_vain
from meshinfer.serving.runner_watch import LOOK_SECONDS
from meshinfer.serving.runners import Runner
from meshinfer.serving.seat_channels import SeatChannels
from meshinfer.serving.seats import RebindRunner, SeatEffect, SeatLedger, StartRunner, StopRunner, is_of_another_epoch
from meshinfer.serving.spares import Spares
from meshinfer.topology.placement import Placement
from meshinfer.wire.runner_control import (
    ChannelLost,
    Heartbeat,
    Linked,
    LinkSample,
    Loaded,
    Loading,
    LoadSeat,
    OriginGone,
    Rebind,
    RunnerMessage,
)

log = logging.getLogger(__name__)

WORD_SECONDS = 5.0
"""For a runner that was told what to load to say where it listens; a spare takes 0.15 s, four others beside it on two cores."""
PROCESS_SECONDS = 20.0
"""For one whose process has just been started, from then on; 1.3 s there. A cold disk has Python itself to read."""


@dataclass(eq=False, slots=True)
class _Starting:
    """A seat that will have a runner soon."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    over: trio.Event = field(default_factory=trio.Event)
    """It has one, or never will."""


class SeatRunners:
    """All of this node's.

    Args:
        ports: the agent.
        ledger: decides; what runners say changes it.
        changed: called whenever the ledger may say something else than before.
    """

    def __init__(self, ports: Ports, ledger: SeatLedger, changed: Callable[[], None]) -> None:
        self._ports = ports
        self._ledger = ledger
        self._changed = changed
        self._held: dict[SeatKey, HeldRunner] = {}
        """All and only runners that have been told what to be and are not gone, by what they are now."""
        self._starting: dict[SeatKey, _Starting] = {}
        """All and only seats whose files are being fetched or whose process is being started."""
        self._spares = Spares(ports.start_runner, self._may_start_spare, self._may_keep_spare)
        self._nursery: trio.Nursery | None = None
        self.channels = SeatChannels(ports, self._find)
        self.give_way = GiveWay()
        """For who measures this machine: never while a seat is about to load."""

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncGenerator[trio.Nursery]:
        """Before this, no seat is started; after it, every runner is gone. Who works beside them may use their nursery."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._look)
            nursery.start_soon(self._spares.run)
            yield nursery

    # --- what the ledger decides ----------------------------------------------------------------

    async def perform(self, effects: list[SeatEffect]) -> None:
        """Stops are waited for (the memory is free afterwards), starts go on in the background.

        Rebindings come first, and take effect before anything is waited for: who acts on the ledger's next decision must
        find the process under the name that the ledger has for it.
        """
        for effect in effects:
            if isinstance(effect, RebindRunner):
                await self._rebind(effect)
        async with trio.open_nursery() as stopping:
            for effect in effects:
                if isinstance(effect, StopRunner) and (starting := self._starting.get(effect.key)):
                    starting.scope.cancel()  # a fetch of gigabytes that nobody wants any more
                if isinstance(effect, StopRunner) and (held := self._held.get(effect.key)):
                    log.info("seat %s: stopping its runner: %s", effect.key, effect.reason)
                    stopping.start_soon(partial(held.runner.stop, at_once=effect.at_once))
        for effect in effects:
            if isinstance(effect, StartRunner) and self._nursery is not None:
                # From now on: who releases it before its task has begun must find it.
                starting = self._starting[effect.key] = _Starting()
                self._nursery.start_soon(self._run_seat, effect.key, effect.placement, starting)
        self._changed()

    async def _run_seat(self, key: SeatKey, placement: Placement, starting: _Starting) -> None:
        """One runner's life, from its start to its obituary."""

        def fetched(done_bytes: int, total_bytes: int) -> None:
            self._ledger.runner_said(key, Loading(done_bytes, total_bytes), trio.current_time())
            self._changed()

        runner: Runner | None = None
        path: Path | None = None
        try:
            with starting.scope:
                path = await self._ports.model_path(placement.model_id, fetched)
                runner = await self.give_way.start(self._spares.take)
        except (MeshinferError, OSError) as error:
            code = error.code if isinstance(error, MeshinferError) else ""
            if self._starting.get(key) is starting:
                await self.perform(self._ledger.fail(key, str(error), trio.current_time(), code))
            return
        finally:
            # What is loaded ahead is always of epoch 0: the next of that name may have begun while this one ended.
            if self._starting.get(key) is starting:
                del self._starting[key]
            starting.over.set()
        if starting.scope.cancel_called or runner is None:  # released before there was one
            if runner is not None:
                await runner.stop()
            return
        log.info("seat %s: process %d is to be its runner", key, runner.pid)
        held = self._held[key] = HeldRunner(key, placement, runner)
        settings = self._ports.settings
        seat = LoadSeat(
            model_path=str(path),
            instance_id=key.instance_id,
            epoch=key.epoch,
            placement=placement,
            seat_index=key.seat_index,
            bind_host=settings.channel_host,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            memory_limit_bytes=self._ports.own_card().memory_usable_bytes,
        )
        why = ""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._link, held.linking, key, placement, runner)
                nursery.start_soon(self._expect_word, held)
                if key not in self._ledger.running():  # released while it started
                    await runner.stop()
                try:
                    await runner.send(seat)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    log.debug("seat %s: its runner died before it was told what to be", key)
                why = await runner.listen(partial(self._heard, held))
                nursery.cancel_scope.cancel()
        finally:
            held.linking.cancel()
            if not why:  # it is not the runner's end but this service's
                with trio.CancelScope(shield=True):
                    await runner.stop()
            if is_last := self._held.get(held.key) is held:
                del self._held[held.key]
        if is_last and held.key not in self._starting:  # else that seat is another process's by now
            await self.perform(self._ledger.fail(held.key, why, trio.current_time()))

    async def _link(self, linking: trio.CancelScope, key: SeatKey, placement: Placement, runner: Runner) -> None:
        with linking:  # its own: its runner may be another seat's, with another task, before this one begins
            await self.channels.link(key, placement, runner)

    async def _rebind(self, effect: RebindRunner) -> None:
        """The runner of the old epoch's seat goes on as the new one's.

        It is the new one's from the call on. What is sent to it under that name (a channel, the rebinding after this one)
        gets there after this has, since messages arrive in the order of their sending.
        """
        held = self._held.pop(effect.old, None)
        try:
            if held is None:
                raise trio.ClosedResourceError  # noqa: TRY301 - the same as if it had gone a moment later
            self._held[effect.key] = held
            held.key, held.placement = effect.key, effect.placement
            held.linking.cancel()
            linking = held.linking = trio.CancelScope()
            await held.runner.send(Rebind(effect.key.epoch, effect.placement, effect.key.seat_index))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.perform(self._ledger.fail(effect.key, "its warm runner is gone", trio.current_time()))
            return
        log.info("seat %s: goes on with the layers of epoch %d", effect.key, effect.old.epoch)
        if self._nursery is not None:
            self._nursery.start_soon(self._link, linking, effect.key, effect.placement, held.runner)

    # --- what runners say, and whether they do ---------------------------------------------------

    async def _heard(self, held: HeldRunner, message: RunnerMessage) -> None:
        if isinstance(message, Heartbeat):
            held.heartbeat = message
        if isinstance(message, LinkSample):
            if self._ports.frame_arrived and message.seat < len(held.placement.seats):
                peer = held.placement.seats[message.seat].node_id
                self._ports.frame_arrived(peer, message.byte_count, message.seconds)
            return
        if isinstance(message, Loaded):
            held.loads = False
            log.info("seat %s: its layers are loaded, in %.2f s", held.key, message.seconds)
        if is_of_another_epoch(message, held.key):
            log.debug("seat %s: %r of another epoch came late", held.key, message)
        elif isinstance(message, Linked):
            log.info("seat %s: its channels are open", held.key)
            _, target = dialled_by(held.placement, held.key.seat_index)
            self._ports.blocked_ways.opened(held.placement.seats[target].node_id)
        elif isinstance(message, ChannelLost) and 0 <= message.seat < len(held.placement.seats):
            node = held.placement.seats[message.seat].node_id
            self._ports.blame(node)
            if message.unanswered:
                dialled_in_vain(self._ports, node)
        effects = self._ledger.runner_said(held.key, message, trio.current_time())
        if effects:
            self._perform_soon(effects)
        else:
            self._changed()

    def _perform_soon(self, effects: list[SeatEffect]) -> None:
        """For what a runner's own tasks found out: stopping it waits for its loop, and ends them."""
        assert self._nursery is not None, "a runner without tasks"
        self._nursery.start_soon(self.perform, effects)

    async def _expect_word(self, held: HeldRunner) -> None:
        """Its first; without it, the seat fails. Second by second, so that an agent that slept blames nobody."""
        starts = PROCESS_SECONDS - (trio.current_time() - held.runner.started_at)
        for _ in range(math.ceil(max(WORD_SECONDS, starts))):
            with trio.move_on_after(1.0):
                await held.runner.heard.wait()
                return
        why = "its runner lives and does not begin"
        self._perform_soon(self._ledger.fail(held.key, why, trio.current_time(), at_once=True))

    async def _look(self) -> None:
        async with trio.open_nursery() as telling:
            while True:
                await sleep_to_beat(LOOK_SECONDS)
                now = trio.current_time()
                if effects := self._ledger.look_at_runners(now):
                    await self.perform(effects)
                out_of_reach = self._ports.out_of_reach()
                for key, lost in self._ledger.cut_off(out_of_reach, now):
                    if held := self._held.get(key):
                        await self._heard(held, lost)  # as if its runner had said so
                reached = self._ports.topology().by_id.keys() - out_of_reach
                for held in list(self._held.values()):
                    for certificate_der in held.origins.vanished(reached, now):
                        # Not awaited: a frozen runner's socket may be full, and these looks are what finds it out.
                        telling.start_soon(self._forget_origin, held, certificate_der)

    async def _forget_origin(self, held: HeldRunner, certificate_der: bytes) -> None:
        log.info("seat %s: an origin has vanished; its sessions end here", held.key)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await held.runner.send(OriginGone(certificate_der))

    # --- a runner for whoever comes next --------------------------------------------------------

    def _may_start_spare(self) -> bool:
        """There is memory for a runner beyond what seats hold, and nothing loads or is about to that it would slow down."""
        is_calm = all(report.state in {"ready", "cut"} and not report.loads for report in self._ledger.reports())
        return self._ports.settings.spare_runner and self._has_room_for_runner() and is_calm

    def _may_keep_spare(self) -> bool:
        """There is memory for it, or a leased seat is about to take it: what that promises has a runner's in it.

        Above all after a seat has failed: its next life is about to begin, and to end the spare now would cost it the two
        seconds that the spare is here to save.
        """
        is_awaited = any(report.state == "leased" for report in self._ledger.reports())
        return self._ports.settings.spare_runner and (self._has_room_for_runner() or is_awaited)

    def _has_room_for_runner(self) -> bool:
        card = self._ports.own_card()
        return card.memory_usable_bytes - self._ledger.held_bytes >= card.runner_overhead_bytes

    # --- what can be asked ----------------------------------------------------------------------

    def heartbeats(self) -> dict[SeatKey, Heartbeat]:
        """The last word of each, for metrics."""
        return {key: held.heartbeat for key, held in self._held.items() if held.heartbeat is not None}

    def pids(self) -> dict[SeatKey, int]:
        """Their processes, for operators (and for those who test by killing them)."""
        return {key: held.runner.pid for key, held in self._held.items()}

    async def _find(self, key: SeatKey) -> HeldRunner | None:
        if key in self._starting:
            await self._starting[key].over.wait()
        return self._held.get(key) if key in self._ledger.running() else None
