"""Seats made real on this node: the driver around `SeatLedger`.

It answers planners (lease, commit, release), starts and ends runners as the ledger says, opens the
channels between seats, and keeps this node's card true. Decisions are the ledger's; here is only
doing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

from meshinfer.base.beats import sleep_to_beat
from meshinfer.base.errors import BadInput, MeshinferError, PeerLost, Refused
from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.base.looking import until
from meshinfer.planning.planner import seat_memory
from meshinfer.serving.epochs import DeletedMeanwhile, StaleEpoch
from meshinfer.serving.give_way import GiveWay
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.origins import Origins
from meshinfer.serving.ports import Ports
from meshinfer.serving.runner_watch import LOOK_SECONDS
from meshinfer.serving.runners import Runner
from meshinfer.serving.seats import RebindRunner, SeatEffect, SeatLedger, StartRunner, StopRunner, is_of_another_epoch
from meshinfer.serving.spares import Spares
from meshinfer.serving.view import AHEAD, instances
from meshinfer.topology.card import SeatReport
from meshinfer.topology.placement import Placement
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import (
    COMMIT,
    DELETE,
    LEASE,
    OPEN_CHANNEL,
    RELEASE,
    ChannelOffer,
    Deletion,
    Done,
    Lease,
    LeaseAnswer,
    OpenChannel,
    SeatRef,
)
from meshinfer.wire.runner_control import (
    ChannelLost,
    DialChannel,
    ExpectChannel,
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

TOKEN_LAPSE_SECONDS = 10.0
"""From a channel's offer to its use: one dial and one TLS handshake, with room for a slow link."""
LISTEN_WAIT_SECONDS = 2.0
"""How long an offer waits for the runner to listen (its imports take 1 to 2 s) before it says 'not yet'."""
WORD_SECONDS = 5.0
"""For a runner that was told what to load to say where it listens; a spare takes 0.15 s, four others beside it on two cores."""
PROCESS_SECONDS = 20.0
"""For one whose process has just been started, from then on; 1.3 s there. A cold disk has Python itself to read."""
REPORT_SECONDS = 2.0
"""How often counters that move all the time (sessions, resident bytes) reach the card."""
LEAVING = "this node is about to leave"
PROGRESS_SECONDS = 1.0
"""Between two announcements for the sake of a load's progress alone. A node may announce six times at once, then twice
a second: a load of 0.3 s that tells each tenth of it has `ready` wait for half a second."""


@dataclass(eq=False, slots=True)
class _Held:
    """A seat's runner. The seat that it is changes with a rebinding; the process stays."""

    key: SeatKey
    placement: Placement
    runner: Runner
    linking: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Of the task that opens the channel which this seat dials."""
    heartbeat: Heartbeat | None = None
    origins: Origins = field(default_factory=Origins)
    """Who has channels to it."""


@dataclass(eq=False, slots=True)
class _Starting:
    """A seat that will have a runner soon."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    over: trio.Event = field(default_factory=trio.Event)
    """It has one, or never will."""


class SeatService:
    """This node's seats."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        settings = ports.settings
        self._ledger = SeatLedger(
            ports.node_id, ports.own_card().memory_usable_bytes, settings.lease_seconds, settings.load_stall_seconds
        )
        self._held: dict[SeatKey, _Held] = {}
        """All and only runners that have been told what to be and are not gone, by what they are now."""
        self._starting: dict[SeatKey, _Starting] = {}
        """All and only seats whose files are being fetched or whose process is being started."""
        self._spares = Spares(ports.start_runner, self._may_start_spare, self._may_keep_spare)
        self.give_way = GiveWay()
        """For who measures this machine: never while a seat is about to load."""
        self._nursery: trio.Nursery | None = None
        self._stirred = trio.Event()
        self._announced: tuple[tuple[SeatReport, ...], ...] = ()
        """The last announcement's substance, with and without progress."""
        self._announced_at = -math.inf
        self._counted: object = None
        for method, handler in (
            (LEASE, self._on_lease),
            (COMMIT, self._on_commit),
            (RELEASE, self._on_release),
            (DELETE, self._on_delete),
            (OPEN_CHANNEL, self._on_open_channel),
        ):
            ports.transport.serve(method, handler)

    async def run(self) -> None:
        """Serve until cancelled; every runner is gone when this returns."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._watch_view)
                nursery.start_soon(self._watch_clock)
                nursery.start_soon(self._look_at_runners)
                nursery.start_soon(self._refresh_counters)
                nursery.start_soon(self._spares.run)
        finally:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as ending:
                    for held in list(self._held.values()):
                        ending.start_soon(held.runner.stop)

    # --- for planners: over the network or from this node's own ----------------------------------

    async def lease(self, lease: Lease, planner: NodeId) -> LeaseAnswer:
        """Promise memory for a seat to `planner`, by this node's own numbers.

        Raises:
            PeerLost: this node is about to leave: to whoever plans it is gone already. Not for layers that it has: a
                hand-over that began before lets it go on with them, and its own comes after that.
        """
        key = SeatKey(lease.instance_id, lease.epoch, lease.seat_index)
        if self._ports.is_draining and not self._ledger.has_layers_of(key, lease.placement):
            raise PeerLost(LEAVING, do="use another node")
        self._ledger.bound(self._ports.own_card().memory_usable_bytes)
        try:
            need = await self._need_bytes(lease)
            known = planner if planner in self._ports.topology().by_id else None
            lapses = self._ledger.lease(key, lease.placement, need, trio.current_time(), lease.begun_epoch, known)
        except DeletedMeanwhile as error:
            return LeaseAnswer(granted=False, newest_epoch=error.deletion.epoch, why=str(error), is_deleted=True)
        except StaleEpoch as error:
            return LeaseAnswer(granted=False, newest_epoch=error.newest, why=str(error))
        except MeshinferError as error:
            return LeaseAnswer(granted=False, why=str(error)[:2048])
        self._announce()
        return LeaseAnswer(granted=True, lapses_in_seconds=lapses)

    async def _need_bytes(self, lease: Lease) -> int:
        """What the seat takes here, by this node's own numbers and its own copy of the model."""
        placement = lease.placement
        placement.validate()
        if lease.seat_index >= len(placement.seats):
            raise BadInput(f"seat {lease.seat_index}", expected=f"one of {len(placement.seats)} seats")
        info = await self._ports.model_cards.get(placement.model_id)
        if info.card.digest != placement.model_digest:
            raise Refused(
                f"this node's {placement.model_id} has digest {info.card.digest[:16]}",
                expected=placement.model_digest[:16],
                do="pull the same revision of the model on every node",
            )
        chunk = self._ports.settings.prefill_chunk_tokens
        return seat_memory(info.card, placement, lease.seat_index, self._ports.own_card(), chunk).need_bytes

    async def commit(self, ref: SeatRef) -> Done:
        """Start loading what was leased. Raises Refused if nothing is."""
        await self._perform(self._ledger.commit(ref, trio.current_time()))
        return Done()

    async def release(self, ref: SeatRef) -> Done:
        """Free what is held; the memory is free when this returns, but for what layers keep that wait for a repair."""
        freed, effects = self._ledger.release(ref, trio.current_time())
        await self._perform(effects)
        return Done(freed)

    async def delete(self, deletion: Deletion) -> Done:
        """Free what is held of an instance; the memory is free when this returns, and no repair brings it back."""
        freed, effects = self._ledger.delete(deletion)
        await self._perform(effects)
        return Done(freed)

    def is_deleted(self, instance_id: InstanceId, begun_epoch: int) -> bool:
        """See `SeatLedger.is_deleted`."""
        return self._ledger.is_deleted(instance_id, begun_epoch)

    def saw_epoch(self, instance_id: InstanceId, epoch: int) -> None:
        """See `SeatLedger.saw_epoch`."""
        self._ledger.saw_epoch(instance_id, epoch)

    def next_epoch(self, instance_id: InstanceId) -> int:
        """See `SeatLedger.next_epoch`."""
        return self._ledger.next_epoch(instance_id)

    def heartbeats(self) -> dict[SeatKey, Heartbeat]:
        """The last word of each runner, for metrics."""
        return {key: held.heartbeat for key, held in self._held.items() if held.heartbeat is not None}

    def runner_pids(self) -> dict[SeatKey, int]:
        """Process ids of the runners, for operators (and for those who test by killing them)."""
        return {key: held.runner.pid for key, held in self._held.items()}

    async def drain(self, instance_ids: Collection[InstanceId], seconds: float) -> None:
        """Wait for the answers that go through seats of these instances here, whoever asked for them; at most so long."""

        def is_idle() -> bool:
            return not any(each.sessions for each in self._ledger.reports() if each.instance_id in instance_ids)

        with trio.move_on_after(seconds):
            # No event: runners say how many they have as often as this is looked at, whether or not it has changed.
            await until(is_idle, LOOK_SECONDS)

    async def release_all(self, reason: str) -> None:
        """Free everything, since this node leaves."""
        for report in self._ledger.reports():
            await self.release(SeatRef(report.instance_id, report.epoch, report.placement_id, reason))

    # --- handlers -------------------------------------------------------------------------------

    async def _on_lease(self, peer: NodeId, payload: bytes) -> bytes:
        return encode(await self.lease(decode(Lease, payload), peer))

    async def _on_commit(self, peer: NodeId, payload: bytes) -> bytes:
        del peer
        return encode(await self.commit(decode(SeatRef, payload)))

    async def _on_release(self, peer: NodeId, payload: bytes) -> bytes:
        del peer
        return encode(await self.release(decode(SeatRef, payload)))

    async def _on_delete(self, peer: NodeId, payload: bytes) -> bytes:
        del peer
        return encode(await self.delete(decode(Deletion, payload)))

    async def _on_open_channel(self, peer: NodeId, payload: bytes) -> bytes:
        return encode(await self.offer_channel(peer, decode(OpenChannel, payload)))

    async def offer_channel(self, peer: NodeId, ask: OpenChannel) -> ChannelOffer:
        """Let `peer` (its seat, or itself as an origin) dial one of our runners.

        Raises:
            Refused: no such seat here, it does not listen yet, or the caller is not who may dial it.
        """
        key = SeatKey(ask.instance_id, ask.epoch, ask.to_seat)
        if key in self._starting:  # a caller that is sent away comes back up to a second later
            with trio.move_on_after(LISTEN_WAIT_SECONDS):
                await self._starting[key].over.wait()
        held = self._held.get(key)
        if held is None or key not in self._ledger.running():
            raise Refused(
                f"no runner here for seat {ask.to_seat} of instance {ask.instance_id} epoch {ask.epoch}",
                do="look at the instance again: it may have another epoch",
            )
        if ask.from_seat >= 0:
            seats = held.placement.seats
            if ask.from_seat >= len(seats) or seats[ask.from_seat].node_id != peer:
                raise Refused(f"seat {ask.from_seat} of instance {ask.instance_id} is not {peer}'s")
        runner = held.runner
        with trio.move_on_after(LISTEN_WAIT_SECONDS):
            await runner.heard.wait()
        if runner.listening is None:
            raise Refused("the runner does not listen yet", do="ask again in a moment")
        if ask.role == "origin":
            held.origins.came(peer, ask.certificate_der, trio.current_time())
        token = secrets.token_bytes(32)
        try:
            await runner.send(ExpectChannel(ask.role, ask.from_seat, ask.certificate_der, token, TOKEN_LAPSE_SECONDS))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerLost("the runner is gone") from error
        hosts = tuple(
            dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in self._ports.transport.addresses())
        )
        if peer == self._ports.node_id:
            hosts = ("127.0.0.1", *(host for host in hosts if host != "127.0.0.1"))
        return ChannelOffer(hosts[:32], runner.listening.port, runner.listening.certificate_der, token)

    # --- effects --------------------------------------------------------------------------------

    async def _perform(self, effects: list[SeatEffect]) -> None:
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
        self._announce()
        self._stirred.set()

    async def _run_seat(self, key: SeatKey, placement: Placement, starting: _Starting) -> None:
        """One runner's life, from its start to its obituary."""

        def fetched(done_bytes: int, total_bytes: int) -> None:
            self._ledger.runner_said(key, Loading(done_bytes, total_bytes), trio.current_time())
            self._announce()

        runner: Runner | None = None
        path: Path | None = None
        try:
            with starting.scope:
                path = await self._ports.model_path(placement.model_id, fetched)
                runner = await self.give_way.start(self._spares.take)
        except (MeshinferError, OSError) as error:
            code = error.code if isinstance(error, MeshinferError) else ""
            if self._starting.get(key) is starting:
                await self._perform(self._ledger.fail(key, str(error), trio.current_time(), code))
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
        held = self._held[key] = _Held(key, placement, runner)
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
            if is_last := self._held.get(held.key) is held:
                del self._held[held.key]
        if is_last and held.key not in self._starting:  # else that seat is another process's by now
            await self._perform(self._ledger.fail(held.key, why, trio.current_time()))

    async def _expect_word(self, held: _Held) -> None:
        """Its first; without it, the seat fails. Second by second, so that an agent that slept blames nobody."""
        starts = PROCESS_SECONDS - (trio.current_time() - held.runner.started_at)
        for _ in range(math.ceil(max(WORD_SECONDS, starts))):
            with trio.move_on_after(1.0):
                await held.runner.heard.wait()
                return
        effects = self._ledger.fail(held.key, "its runner lives and does not begin", trio.current_time(), at_once=True)
        if self._nursery is not None:  # as in `_heard`: not here, where stopping it ends this task
            self._nursery.start_soon(self._perform, effects)

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
            await self._perform(self._ledger.fail(effect.key, "its warm runner is gone", trio.current_time()))
            return
        log.info("seat %s: goes on with the layers of epoch %d", effect.key, effect.old.epoch)
        if self._nursery is not None:
            self._nursery.start_soon(self._link, linking, effect.key, effect.placement, held.runner)

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

    async def _heard(self, held: _Held, message: RunnerMessage) -> None:
        if isinstance(message, Heartbeat):
            held.heartbeat = message
        if isinstance(message, LinkSample):
            if self._ports.frame_arrived and message.seat < len(held.placement.seats):
                peer = held.placement.seats[message.seat].node_id
                self._ports.frame_arrived(peer, message.byte_count, message.seconds)
            return
        if isinstance(message, Loaded):
            log.info("seat %s: its layers are loaded, in %.2f s", held.key, message.seconds)
        if is_of_another_epoch(message, held.key):
            log.debug("seat %s: %r of another epoch came late", held.key, message)
        elif isinstance(message, Linked):
            log.info("seat %s: its channels are open", held.key)
        elif isinstance(message, ChannelLost) and 0 <= message.seat < len(held.placement.seats):
            self._ports.blame(held.placement.seats[message.seat].node_id)
        effects = self._ledger.runner_said(held.key, message, trio.current_time())
        if self._nursery is not None and effects:
            # Not awaited here: stopping waits for the very loop that calls this.
            self._nursery.start_soon(self._perform, effects)
        else:
            self._announce()

    async def _link(self, linking: trio.CancelScope, key: SeatKey, placement: Placement, runner: Runner) -> None:
        """Open the channel that this seat dials: to the next stage, or from the last one to the head."""
        if key.epoch == AHEAD:  # there is nobody to be linked with yet
            return
        with linking:  # its own: its runner may be another seat's, with another task, before this one begins
            await self._open_channel(key, placement, runner)

    async def _open_channel(self, key: SeatKey, placement: Placement, runner: Runner) -> None:
        last = len(placement.seats) - 1
        if last == 0:
            return
        await runner.heard.wait()
        assert runner.listening is not None
        target, role = (0, "samples") if key.seat_index == last else (key.seat_index + 1, "activations")
        ask = OpenChannel(key.instance_id, key.epoch, key.seat_index, target, role, runner.listening.certificate_der)
        peer = placement.seats[target].node_id
        backoff = 0.1
        while True:  # ends with the runner: a load that stalls is failed by the ledger's clock
            try:
                offer = await self._ask_channel(peer, ask)
                await runner.send(DialChannel(role, target, offer))
            except MeshinferError as error:
                log.debug("seat %s: %s channel to seat %d not yet: %s", key, role, target, error)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            else:
                return
            await trio.sleep(backoff)
            backoff = min(1.0, backoff * 2)

    async def _ask_channel(self, peer: NodeId, ask: OpenChannel) -> ChannelOffer:
        if peer == self._ports.node_id:
            return await self.offer_channel(peer, ask)
        answer = await self._ports.call(
            peer, OPEN_CHANNEL, encode(ask), self._ports.settings.call_timeout_seconds + LISTEN_WAIT_SECONDS
        )
        offer = decode(ChannelOffer, answer)
        known = self._ports.channel_host(peer)  # an address that works right now comes first
        hosts = (known, *(host for host in offer.hosts if host != known)) if known else offer.hosts
        return ChannelOffer(hosts[:32], offer.port, offer.certificate_der, offer.token)

    # --- watching -------------------------------------------------------------------------------

    async def _watch_view(self) -> None:
        watch = self._ports.watch()
        while True:
            topology = self._ports.topology()
            now = trio.current_time()
            strangers = self._ports.acquaintance.strangers(topology, now)
            not_lost = topology.by_id.keys() | strangers
            effects = self._ledger.view_changed(instances(topology, strangers), not_lost, now)
            await self._perform(effects)
            look_again_at = now + REPORT_SECONDS if self._ledger.is_outliving else math.inf
            with trio.move_on_at(min(look_again_at, self._ports.acquaintance.next_wakeup(now))):
                await watch.changed()

    async def _watch_clock(self) -> None:
        while True:
            due = self._ledger.next_wakeup()
            self._stirred = trio.Event()
            with trio.move_on_at(due if due is not None else float("inf")):
                await self._stirred.wait()
                continue
            await self._perform(self._ledger.tick(trio.current_time()))

    async def _look_at_runners(self) -> None:
        async with trio.open_nursery() as telling:
            while True:
                await sleep_to_beat(LOOK_SECONDS)
                now = trio.current_time()
                if effects := self._ledger.look_at_runners(now):
                    await self._perform(effects)
                out_of_reach = self._ports.out_of_reach()
                for key, lost in self._ledger.cut_off(out_of_reach, now):
                    if held := self._held.get(key):
                        await self._heard(held, lost)  # as if its runner had said so
                reached = self._ports.topology().by_id.keys() - out_of_reach
                for held in list(self._held.values()):
                    for certificate_der in held.origins.vanished(reached, now):
                        # Not awaited: a frozen runner's socket may be full, and these looks are what finds it out.
                        telling.start_soon(self._forget_origin, held, certificate_der)

    async def _forget_origin(self, held: _Held, certificate_der: bytes) -> None:
        log.info("seat %s: an origin has vanished; its sessions end here", held.key)
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await held.runner.send(OriginGone(certificate_der))

    async def _refresh_counters(self) -> None:
        while True:
            await sleep_to_beat(REPORT_SECONDS)
            self._announce(counters=True)

    def _announce(self, *, counters: bool = False) -> None:
        """Put the seats on the card: at once when something happened, every 2 s for what only counts (others hear that with
        this node's next announcement).
        """
        reports, now = self._ledger.reports(), trio.current_time()
        has_time = now >= self._announced_at + PROGRESS_SECONDS
        what_happened = tuple(report.substance if has_time else _without_progress(report) for report in reports)
        if what_happened in self._announced and not (counters and reports != self._counted):
            return
        self._announced = (tuple(r.substance for r in reports), tuple(map(_without_progress, reports)))
        self._announced_at, self._counted = now, reports
        self._ports.announce(reports, self._ledger.placements(), self._ledger.promised_bytes)


def _without_progress(report: SeatReport) -> SeatReport:
    return replace(report.substance, progress=0.0)
