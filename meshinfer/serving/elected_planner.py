"""From a wish to leased and committed seats: what the node does that was elected to plan.

Any node may be it, at any time (`election`). It plans (`candidates`), leases every seat (`seat_calls`), and commits; what
one seat refuses is released everywhere, and the next candidate is tried.

    planner ── lease ──▶ every seat (each decides by its own memory)
            ◀─ granted ─
            ── commit ─▶ every seat: loads, links, announces `ready`

A broken instance is placed anew as its next epoch: seats whose layers are still in memory stay, and nodes whose
runner failed again and again are left out. Leases make it safe that two nodes may take themselves for the planner.
A placing that finds its instance deleted ends there, whatever it has reached: it began before, for what is no more.
A node whose lid has just opened plans nothing for a moment: its connections are those of before, so everyone seems
silent, and it would place on itself alone what the others have long made whole.
An instance whose epochs are used up (no instance lives so long: some member announced one by mistake) is given up for
the next replica of its model.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import trio

from meshinfer.base.errors import NoRoom, PeerLost, Refused
from meshinfer.base.ids import InstanceId, ModelId, NodeId, instance_id_for
from meshinfer.base.looking import until
from meshinfer.planning.plan import Plan, Preview
from meshinfer.planning.repair import crosses, repairs
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.candidates import WARM_STATES, Candidates, CandidateSource, answers, with_memory_of, without
from meshinfer.serving.election import elect
from meshinfer.serving.ports import Ports
from meshinfer.serving.seat_calls import SeatCalls, Tried
from meshinfer.serving.seat_service import LEAVING, SeatService
from meshinfer.serving.view import AHEAD, Instance, report_of
from meshinfer.topology.card import LAST_EPOCH
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import (
    DELETE,
    PLACE,
    RELEASE,
    Deletion,
    Place,
    Placed,
    SeatRef,
)

log = logging.getLogger(__name__)

PLANNINGS = 4
"""How often one placing is planned, each time without the nodes that did not answer the last time. Two lids that close
at once take two; where it takes more, what this node sees is too old to plan with."""
LOAD_AHEAD_SECONDS = 15.0
"""How long the old epoch goes on for the sake of its clients while the seats of one that leaves are loaded elsewhere. What
takes longer is loaded within the new epoch, with a pause."""
LOOK_SECONDS = 0.1
"""How often a node that has just come to looks whether it is back with the others."""
OUTRUN_TRIES = 3
"""How often one placing is planned that others outrun: two models that are asked for in the same tenth of a second take two,
each of which must know what the other has taken."""
NEWS_SECONDS = 0.3
"""For what others have just said to show on the cards here: more than gossip on change takes (milliseconds, a quarter of a second at most)."""
EPOCH_TRIES = 3
"""A stale epoch's refusal names the newest, so the second try is right; the third is for a race."""
ANNOUNCE_SECONDS = 5.0
"""How long a placement may take to show in the view (gossip on change takes milliseconds)."""


@dataclass(frozen=True, slots=True)
class _JustPlaced:
    placed: Placed
    begun_epoch: int
    """The first that its placing tried: a deletion may be of an epoch between that and the last."""
    until: float


class _GivenUp(NoRoom):
    """Nothing could be placed, and on the way some node has given its seat of the epoch before to one that failed."""


class _Outrun(NoRoom):
    """Every candidate was refused by a node that answers: it has promised elsewhere what its card still shows as free."""


class _DeletedBefore(Refused):
    """A seat's node knows of a deletion that this node had not heard of: perhaps from long before it was asked."""


class ElectedPlanner:
    """This node as the planner, whoever elected it."""

    def __init__(self, ports: Ports, seats: SeatService) -> None:
        self._ports = ports
        self._seats = seats
        self._calls = SeatCalls(ports, seats)
        self._candidates = CandidateSource(ports)
        self._planning: dict[ModelId, trio.Lock] = {}
        """See `_alone_for`."""
        self._just_placed: dict[InstanceId, _JustPlaced] = {}
        """What was placed here and may not be in the view yet."""
        ports.transport.serve(PLACE, self._on_place)

    async def preview(self, model_id: ModelId, workload: Workload, constraints: Constraints) -> Preview:
        """What could be placed now, and what could not and why; of a model that runs, what a re-plan would say."""
        info = await self._ports.model_cards.get(model_id)
        running = self._in_use(Place(model_id, workload, constraints))
        topology = self._ports.topology()
        if running is not None:
            topology = with_memory_of(topology, running.instance_id)
        return self._candidates.preview(topology, info.card, workload, constraints, running)

    async def place(self, ask: Place) -> Placed:
        """See to it that an instance of this model exists.

        Raises:
            UnknownModel, BadInput, NoRoom: it cannot be, with the numbers.
            Refused: it was deleted before it was there.
        """
        await self._back_with_the_others()
        for _ in range(OUTRUN_TRIES - 1):
            with suppress(_Outrun):
                return await self._place(ask)
            await trio.sleep(NEWS_SECONDS)
        return await self._place(ask)

    async def _place(self, ask: Place) -> Placed:
        await self._hear_of_blocked_ways(ask.model_id)  # whoever waits for that keeps no other waiting
        async with self._alone_for(ask.model_id):
            existing = self._existing(ask)
            if existing is not None:
                return existing
            instance_id, old, epoch = self._free_instance_id(ask)
            try:
                return await self._plan_and_make(ask, instance_id, epoch, old)
            except _DeletedBefore:
                if old is not None:  # then it is this one that was deleted, and nobody wants it back
                    raise
                # Nothing was here to be deleted since the request came (this node was started anew after a deletion,
                # say), so it is not what the request is about: begin above it.
                return await self._plan_and_make(ask, instance_id, self._seats.next_epoch(instance_id), None)
            except _GivenUp:
                raise
            except NoRoom:
                for now in self._ports.instances():
                    is_old = old is not None and (now.instance_id, now.epoch) == (old.instance_id, old.epoch)
                    if is_old and self._ports.is_usable(now):
                        return _placed(now)  # it serves all but one origin, whose link may come back
                raise

    def learn(self, instance: Instance) -> None:
        """Take in what the seats of an instance say of failures, whether or not it is planned now."""
        self._candidates.learn(instance)

    async def repair(self, instance: Instance) -> None:
        """Make it whole again, if it still is there and still is broken.

        Raises:
            NoRoom: it cannot be, with the numbers.
            Refused: it was deleted meanwhile.
        """
        await self._back_with_the_others()
        await self._hear_of_blocked_ways(instance.placement.model_id)
        async with self._alone_for(instance.placement.model_id):
            on_their_way = self._on_their_way(self._ports.out_of_reach())
            if any(placed.instance_id == instance.instance_id for placed in on_their_way):
                return  # it was placed for a request, which came a moment sooner
            for old in self._ports.instances():
                if (old.instance_id, old.epoch) == (instance.instance_id, instance.epoch) and old.state == "broken":
                    workload = Workload(old.placement.context_tokens, old.placement.concurrency)
                    ask = Place(old.placement.model_id, workload, Constraints())
                    await self._plan_and_make(ask, old.instance_id, old.epoch + 1, old)

    async def give_away(self, instance: Instance, leaving: NodeId) -> Placed:
        """Give the seats that `leaving` has of `instance` to others.

        Raises:
            NoRoom: nobody can take them, with the numbers.
        """
        if self._ports.topology().by_id.keys() == {leaving}:
            raise NoRoom("there is no other node")
        info = await self._ports.model_cards.get(instance.placement.model_id)
        chunk = self._ports.settings.prefill_chunk_tokens
        workload = Workload(instance.placement.context_tokens, instance.placement.concurrency)

        def candidates(silent: frozenset[NodeId]) -> Candidates:
            staying = self._ports.staying() - {leaving}
            # Of others that leave at the same time, too.
            theirs = [index for index, seat in enumerate(instance.placement.seats) if seat.node_id not in staying]
            others = without(silent | {leaving}, with_memory_of(self._ports.topology(), instance.instance_id))
            plans = repairs(instance.placement, theirs, others, info.card, prefill_chunk_tokens=chunk)
            preview = self._candidates.preview(others, info.card, workload, Constraints())
            in_order = sorted([*plans, *preview.plans], key=lambda each: crosses(each.placement, others.blocked))
            return in_order, preview.refusals

        return await self._make(instance.instance_id, instance.epoch + 1, candidates, is_repair=True, going_on=instance)

    async def delete(self, instance: Instance) -> tuple[dict[NodeId, int], tuple[NodeId, ...]]:
        """Free it on every node: bytes freed by each that held some, and which of its nodes did not confirm.

        Every node with a connection is told, since a repair that is under way may have leases on any. To connect to a
        thousand others for that would be out of proportion: who repairs is told, and gives up what it has leased.
        """
        deletion = Deletion(instance.instance_id, instance.epoch)
        holders = set(instance.placement.node_ids)
        live = self._ports.topology().by_id.keys()
        near = live & {self._ports.node_id, *self._ports.transport.peers()}
        repairer = elect(instance.placement.model_id, self._ports.staying())[:1]
        freed, unconfirmed = await self._calls.tell_all(holders.union(near, repairer), DELETE, deletion)
        self._just_placed.pop(instance.instance_id, None)
        return {node: size for node, size in freed.items() if size or node in holders}, tuple(
            node for node in unconfirmed if node in holders
        )

    async def _back_with_the_others(self) -> None:
        """At once, unless this node has just come to."""
        await until(lambda: not self._ports.is_waking(), LOOK_SECONDS)  # it ends with time, or when somebody is heard

    async def _hear_of_blocked_ways(self, model_id: ModelId) -> None:
        """Two seats that dialled one node in vain say so in the same tenth of a second; of only one of them it is not known
        which end is to be replaced.
        """
        blocked = self._ports.topology().blocked
        broken = (each for each in self._standing(model_id) if each.state == "broken")
        if any(crosses(each.placement, blocked) for each in broken):
            await trio.sleep(NEWS_SECONDS)

    @asynccontextmanager
    async def _alone_for(self, model_id: ModelId) -> AsyncGenerator[None]:
        """One placing at a time for each model; the locks of idle models are dropped."""
        lock = self._planning.setdefault(model_id, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._planning.pop(model_id, None)

    async def _plan_and_make(self, ask: Place, instance_id: InstanceId, epoch: int, old: Instance | None) -> Placed:
        info = await self._ports.model_cards.get(ask.model_id)

        def candidates(silent: frozenset[NodeId]) -> Candidates:
            return self._candidates.best_first(ask, info.card, instance_id, old, silent)

        return await self._make(instance_id, epoch, candidates, is_repair=old is not None)

    async def _make(
        self,
        instance_id: InstanceId,
        epoch: int,
        candidates: Callable[[frozenset[NodeId]], Candidates],
        *,
        is_repair: bool,
        going_on: Instance | None = None,
    ) -> Placed:
        """Lease and commit the first candidate that all its nodes agree to.

        A node that does not answer is no node to plan with, though it may still be in the view: everything is planned
        again without it. To go on with the next candidate instead would cost the seats that are warm: it may place
        other layers on the nodes that live. While `going_on` serves, what is new is loaded ahead, beside it. What a
        repair has loaded, or taken over, when it fails is left to the next one; anybody else's is freed.

        Raises:
            NoRoom: there is no candidate, or none could be leased; with the first reason, which is the best candidate's.
            PeerLost: a node does not answer, and this one's lid was closed when it was asked.
            Refused: the instance was deleted meanwhile.
        """
        begun_epoch = epoch
        silent: frozenset[NodeId] = frozenset()
        failures: list[str] = []
        error: type[NoRoom] = NoRoom
        for _ in range(PLANNINGS):
            plans, refusals = candidates(silent)
            if not plans:
                why = refusals[0].explanation if refusals else "no live node can hold the model"
                names = ", ".join(sorted(self._ports.called(node) for node in silent))
                raise error(
                    f"{why.removesuffix('.')}. Not counted, since they do not answer: {names[:500]}" if silent else why,
                    do="`meshinfer plan` shows every candidate with its numbers",
                )
            for candidate in plans:
                tried = Tried("", epoch)
                if going_on:
                    tried = await self._load_ahead(going_on, epoch, candidate, begun_epoch)
                if not tried.why:
                    tried = await self._try(instance_id, epoch, candidate, begun_epoch, is_repair)
                if tried.why == "":
                    placed = Placed(instance_id, tried.epoch, candidate.placement, tuple(refusals[:64]))
                    self._remember(placed, begun_epoch)
                    return placed
                if tried.unheard and self._ports.is_waking():
                    raise PeerLost(f"this node came to a moment ago: {tried.why}", do="try again in a moment")
                failures.append(tried.why)
                error = _GivenUp if tried.is_committed else error
                epoch = tried.epoch + 1
                if tried.unheard:
                    silent |= tried.unheard
                    break
            else:
                error = _Outrun if error is NoRoom else error
                break
        for why in failures:
            log.debug("instance %s: a candidate could not be leased: %s", instance_id, why)
        more = f" (and {len(failures) - 1} other candidates, for reasons of their own)" if failures[1:] else ""
        raise error(f"no candidate could be leased: {failures[0][:500]}{more}", do="try again in a moment")

    async def _load_ahead(self, old: Instance, epoch: int, candidate: Plan, begun_epoch: int) -> Tried:
        """Have the seats loaded that `candidate` has beyond `old`, while `old` goes on.

        Nothing is done where the nodes of `old` would have to load, too: they have memory for one of the two only.

        Raises:
            Refused: `old` did not go on. What was loaded so far lies ready for whoever repairs it.
        """
        placement = candidate.placement
        seats = [index for index, seat in enumerate(placement.seats) if seat not in old.placement.seats]
        nodes = {placement.seats[index].node_id for index in seats}
        if not nodes.isdisjoint(old.placement.node_ids):
            return Tried("", epoch)
        placed = Placed(old.instance_id, AHEAD, placement)
        _, tried = await self._calls.lease_all(old.instance_id, AHEAD, candidate, begun_epoch, seats)
        if not tried.why:
            tried = await self._calls.commit_all(placed, nodes)
        if not tried.why:
            with trio.move_on_after(LOAD_AHEAD_SECONDS):
                tried = await self._loaded_ahead(old, placed, seats)
        if tried.why:
            ref = SeatRef(old.instance_id, AHEAD, placement.placement_id, "its loading failed")
            await self._calls.tell_all(nodes - tried.unheard, RELEASE, ref)
        return replace(tried, epoch=epoch, is_committed=False)

    async def _loaded_ahead(self, old: Instance, placed: Placed, seats: Sequence[int]) -> Tried:
        """Once their layers are in memory, or why they never will be."""
        placement = placed.placement
        watch = self._ports.watch()
        while True:
            topology = self._ports.topology()
            reports = [report_of(topology, old.instance_id, AHEAD, placement, index) for index in seats]
            if all(report is not None and report.state in WARM_STATES for report in reports):
                return Tried("", AHEAD)
            for index, report in zip(seats, reports, strict=True):
                node = placement.seats[index].node_id
                if node not in topology.by_id:
                    return Tried(f"{self._ports.called(node)} is gone", AHEAD, frozenset((node,)))
                if report is not None and report.state == "failed":
                    return Tried(f"seat {index} on {self._ports.called(node)}: {report.error}", AHEAD)
            same = [now for now in self._ports.instances() if now.instance_id == old.instance_id]
            if not same or same[0].epoch != old.epoch or same[0].state == "broken":
                raise Refused(
                    f"instance {old.instance_id} broke, or was placed anew or deleted, while its seats were handed over",
                    do="nothing: whoever repairs it does without this node",
                )
            await watch.changed()

    async def _try(
        self, instance_id: InstanceId, epoch: int, candidate: Plan, begun_epoch: int, is_repair: bool
    ) -> Tried:
        """Lease and commit every seat of it, or none."""
        placement = candidate.placement
        tried = Tried("", epoch)
        for _ in range(EPOCH_TRIES):
            if epoch > LAST_EPOCH:
                self._seats.saw_epoch(instance_id, LAST_EPOCH)
                raise Refused(f"instance {instance_id} has no epoch left", do="ask again: it will be another instance")
            newest, tried = await self._calls.lease_all(instance_id, epoch, candidate, begun_epoch)
            if not tried.why:
                tried = await self._calls.commit_all(Placed(instance_id, epoch, placement))
            is_void = self._seats.is_deleted(instance_id, begun_epoch)
            if not tried.why and not is_void:
                where = ", ".join(self._ports.called(node) for node in placement.node_ids)
                log.info("instance %s epoch %d is placed on %s", instance_id, epoch, where)
                return tried
            keeps = is_repair and not is_void and tried.deletion is None
            ref = SeatRef(instance_id, epoch, placement.placement_id, "its placing failed", keeps)
            # Where that is not heard, the lease lapses by itself.
            await self._calls.tell_all(set(placement.node_ids) - tried.unheard, RELEASE, ref)
            if keeps and self._seats.is_deleted(instance_id, begun_epoch):  # meanwhile
                free = replace(ref, keeps_layers=False)
                await self._calls.tell_all(set(placement.node_ids) - tried.unheard, RELEASE, free)
            what = f"instance {instance_id} was deleted while it was being placed"
            if self._seats.is_deleted(instance_id, begun_epoch):
                raise Refused(what, do="ask again")
            if tried.deletion is not None:
                await self._seats.delete(tried.deletion)  # now this node knows, and so does whoever asks next
                raise _DeletedBefore(what, do="ask again")
            if tried.unheard or not newest:  # to ask again who is silent costs a call's whole deadline each time
                return replace(tried, epoch=max(epoch, newest))
            epoch = max(epoch, newest) + 1
        return tried

    def _in_use(self, ask: Place) -> Instance | None:
        """The instance that a request like this would be answered by."""
        for instance in self._standing(ask.model_id):
            if answers(instance.placement, ask) and self._ports.is_usable(instance, ask.out_of_reach):
                return instance
        return None

    def _standing(self, model_id: ModelId) -> list[Instance]:
        """What the view has of it and is not deleted: a repair that began before may still show, and will vanish."""
        known = self._ports.instances_of(model_id)
        return [each for each in known if not self._seats.is_deleted(each.instance_id, each.epoch)]

    def _existing(self, ask: Place) -> Placed | None:
        """An instance that already is (or is becoming) what is asked for."""
        if (instance := self._in_use(ask)) is not None:
            return _placed(instance)
        for placed in self._on_their_way(ask.out_of_reach):
            if placed.placement.model_id == ask.model_id and answers(placed.placement, ask):
                return placed
        return None

    def _on_their_way(self, avoid: Iterable[NodeId]) -> list[Placed]:
        """What was placed here a moment ago and can be used as soon as its nodes' cards say so: as yet they show an epoch
        before, or nothing.

        Otherwise everyone who waits for the lock would place it once more, and end the processes that have just begun to load.
        """
        now = trio.current_time()
        self._just_placed = {key: just for key, just in self._just_placed.items() if just.until > now}
        seen = {instance.instance_id: instance.epoch for instance in self._ports.instances()}
        live = self._ports.topology().by_id.keys()
        return [
            just.placed
            for key, just in self._just_placed.items()
            if just.placed.epoch > seen.get(key, -1)
            and live >= set(just.placed.placement.node_ids)
            and self._ports.is_reached(just.placed.placement, avoid)
            and not self._seats.is_deleted(key, just.begun_epoch)
        ]

    def _free_instance_id(self, ask: Place) -> tuple[InstanceId, Instance | None, int]:
        """The id to place under: the first replica that is not in use, with the instance of no use that it replaces, and
        the epoch to begin with.
        """
        by_id = {instance.instance_id: instance for instance in self._standing(ask.model_id)}
        replica = 0
        while True:
            instance_id = instance_id_for(ask.model_id, replica)
            old = by_id.get(instance_id)
            epoch = max(self._seats.next_epoch(instance_id), old.epoch + 1 if old else 1)
            if epoch <= LAST_EPOCH and (old is None or not self._ports.is_usable(old, ask.out_of_reach)):
                return instance_id, old, epoch
            replica += 1

    async def _on_place(self, peer: NodeId, payload: bytes) -> bytes:
        del peer
        if self._ports.is_draining:  # whoever asks takes the next in order, as if this one were gone
            raise PeerLost(LEAVING, do="ask another node to plan")
        if self._ports.is_waking():
            raise PeerLost("this node came to a moment ago", do="ask another node to plan")
        return encode(await self.place(decode(Place, payload)))

    def _remember(self, placed: Placed, begun_epoch: int) -> None:
        until = trio.current_time() + ANNOUNCE_SECONDS
        self._just_placed[placed.instance_id] = _JustPlaced(placed, begun_epoch, until)


def _placed(instance: Instance) -> Placed:
    return Placed(instance.instance_id, instance.epoch, instance.placement)
