"""This node's seats, as others have to do with them: planners ask, the view and the clock tell, the card shows.

Decisions are the ledger's (`serving.seats`), and what is to be done with processes is done by `serving.seat_runners`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import trio

from meshinfer.base.beats import sleep_to_beat
from meshinfer.base.errors import BadInput, MeshinferError, PeerLost, Refused
from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.base.looking import until
from meshinfer.planning.planner import seat_memory
from meshinfer.serving.epochs import DeletedMeanwhile, StaleEpoch
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.ports import Ports
from meshinfer.serving.runner_watch import LOOK_SECONDS
from meshinfer.serving.seat_news import SeatNews
from meshinfer.serving.seat_runners import SeatRunners
from meshinfer.serving.seats import SeatLedger
from meshinfer.serving.view import instances
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import (
    COMMIT,
    DELETE,
    LEASE,
    RELEASE,
    Deletion,
    Done,
    Lease,
    LeaseAnswer,
    SeatRef,
)

REPORT_SECONDS = 2.0
"""How often counters that move all the time (sessions, resident bytes) reach the card."""
LEAVING = "this node is about to leave"


class SeatService:
    """This node's seats."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        settings = ports.settings
        self._ledger = SeatLedger(
            ports.node_id, ports.own_card().memory_usable_bytes, settings.lease_seconds, settings.load_stall_seconds
        )
        self.runners = SeatRunners(ports, self._ledger, self._changed)
        self._stirred = trio.Event()
        """Set when the ledger's next deadline may be another."""
        self._news = SeatNews()
        for method, handler in (
            (LEASE, self._on_lease),
            (COMMIT, self._on_commit),
            (RELEASE, self._on_release),
            (DELETE, self._on_delete),
        ):
            ports.transport.serve(method, handler)

    async def run(self) -> None:
        """Serve until cancelled; every runner is gone when this returns."""
        async with self.runners.at_work() as nursery:
            nursery.start_soon(self._watch_view)
            nursery.start_soon(self._watch_clock)
            nursery.start_soon(self._refresh_counters)

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
        self._changed()
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
        await self.runners.perform(self._ledger.commit(ref, trio.current_time()))
        return Done()

    async def release(self, ref: SeatRef) -> Done:
        """Free what is held; the memory is free when this returns, but for what layers keep that wait for a repair."""
        freed, effects = self._ledger.release(ref, trio.current_time())
        await self.runners.perform(effects)
        return Done(freed)

    async def delete(self, deletion: Deletion) -> Done:
        """Free what is held of an instance; the memory is free when this returns, and no repair brings it back."""
        freed, effects = self._ledger.delete(deletion)
        await self.runners.perform(effects)
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

    # --- watching -------------------------------------------------------------------------------

    async def _watch_view(self) -> None:
        watch = self._ports.watch()
        while True:
            topology = self._ports.topology()
            now = trio.current_time()
            strangers = self._ports.acquaintance.strangers(topology, now)
            not_lost = topology.by_id.keys() | strangers
            effects = self._ledger.view_changed(instances(topology, strangers), not_lost, now)
            await self.runners.perform(effects)
            look_again_at = now + REPORT_SECONDS if self._ledger.is_outliving else math.inf
            with trio.move_on_at(min(look_again_at, self._ports.acquaintance.next_wakeup(now))):
                await watch.changed()

    async def _watch_clock(self) -> None:
        while True:
            due = self._ledger.next_wakeup()
            self._stirred = trio.Event()
            with trio.move_on_at(due if due is not None else math.inf):
                await self._stirred.wait()
                continue
            await self.runners.perform(self._ledger.tick(trio.current_time()))

    async def _refresh_counters(self) -> None:
        while True:
            await sleep_to_beat(REPORT_SECONDS)
            self._announce(counters=True)

    # --- what others see ------------------------------------------------------------------------

    def _changed(self) -> None:
        self._announce()
        self._stirred.set()

    def _announce(self, *, counters: bool = False) -> None:
        """Put the seats on the card, and whom their runners dial in vain, if that is news."""
        reports, now = self._ledger.reports(), trio.current_time()
        blocked = tuple(sorted(self._ports.blocked_ways.blocked(now)))
        if self._news.is_due(reports, blocked, now, counters=counters):
            self._news.told(reports, blocked, now)
            self._ports.announce(reports, self._ledger.placements(), self._ledger.promised_bytes, blocked)
