"""The seats that this node holds: a pure machine, and the only place that promises memory.

No leader may order a node about: a planner *proposes*, and this ledger decides by what is free here
and now. A lease is a promise with a deadline on this node's own clock; a planner that dies between
its steps leaves nothing behind: what is not committed lapses as soon as its death is known, and what is
committed beside it does not wait for it. An older epoch's warm layers stay until the newer one is made.

    (asked) ── lease ──▶ leased ── commit ──▶ loading ── runner loaded ──▶ linking ── channels open ──▶ ready
                           │ lapse, release      │ runner failed or gone     ▲                             │
                           ▼                     ▼                           │ commit of the next epoch    │ seat beside
                         (gone) ◀─ linger ─── failed                         └──────────── cut ◀───────────┘ it lost
                           ▲                                                                │
                           └──────────────────────── grace over ────────────────────────────┘

Each instance counts epochs (`serving.epochs`). A lease for one that is not newer than what this node has seen, or whose
placing began before the instance was deleted, is refused; a newer one takes the place (and the memory) of what this
node held of the instance before. Where it gives this node the very layers that a runner holds, that runner goes on
under the new epoch: repairing an instance loads only what was lost. One that still loads them is cut like one that has
them, and goes on loading: meanwhile, and as the next epoch's. So is what a repair had taken over that failed.

Where two sides of a partition meet and the other's placement has won, a seat with sessions outlives its instance: it goes
on with them until its memory is needed (docs/decisions/0002-instances-have-predictable-ids.md).

Whether the runner of a loaded seat still does anything is told by `serving.runner_watch`.

A seat may be loaded ahead (as epoch 0): for the next epoch, while the present one goes on without it. The commit of that
epoch finds its layers warm, like any others, or its runner loading them; if none comes, it lapses.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from meshinfer.base.errors import BadInput, NoRoom, Refused
from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.base.units import format_bytes
from meshinfer.serving.epochs import DeletedMeanwhile, EpochBook, StaleEpoch
from meshinfer.serving.held_seat import HeldSeat, SeatKey
from meshinfer.serving.runner_watch import is_late
from meshinfer.serving.view import AHEAD, Instance
from meshinfer.topology.card import SeatReport
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import Deletion, SeatRef
from meshinfer.wire.runner_control import (
    ChannelLost,
    Heartbeat,
    Linked,
    LinkSample,
    Listening,
    Loaded,
    Loading,
    RunnerFailed,
    RunnerMessage,
)

FAILED_LINGER_SECONDS = 5.0
"""How long a failed seat is announced: long enough for every origin to read why (two gossip periods), no longer."""
WARM_SECONDS = 20.0
"""How long layers stay in memory after the seat beside them was lost. A repair takes a few seconds; twenty is a laptop
that comes back from a restart of its agent. Raising it keeps memory from other models."""
AHEAD_SECONDS = 30.0
"""How long what was loaded ahead waits for its epoch. The node for whose leaving that is done has 45 s in all; if it dies
meanwhile, the repair that wants these layers takes a few."""
MISSING_GRACE_SECONDS = 2.0
"""A live node's seat may be missing from our view for one gossip period without anything being wrong."""


@dataclass(frozen=True, slots=True)
class StartRunner:
    """Effect: start a process for this seat and give it its layers."""

    key: SeatKey
    placement: Placement


@dataclass(frozen=True, slots=True)
class RebindRunner:
    """Effect: the process of seat `old` goes on as seat `key` of the next epoch, with the layers that it has."""

    old: SeatKey
    key: SeatKey
    placement: Placement


@dataclass(frozen=True, slots=True)
class StopRunner:
    """Effect: end the process of this seat; its memory goes with it."""

    key: SeatKey
    reason: str
    at_once: bool = False
    """It does not react: to ask it first would only hold up the news that it is lost, and its memory."""


SeatEffect = StartRunner | RebindRunner | StopRunner


class SeatLedger:
    """What this node has promised and to whom."""

    def __init__(self, node_id: NodeId, usable_bytes: int, lease_seconds: float, load_stall_seconds: float) -> None:
        self._node_id = node_id
        self._usable_bytes = usable_bytes
        self._lease_seconds = lease_seconds
        self._load_stall_seconds = load_stall_seconds
        self._seats: dict[SeatKey, HeldSeat] = {}
        """All and only seats that are leased, running, or failed and still announced."""
        self._looked_at = 0.0
        """When the runners were last looked at."""
        self._epochs = EpochBook()

    def bound(self, usable_bytes: int) -> None:
        """Promise no more than this in all from now on: a probe found out what the engine really gets."""
        self._usable_bytes = usable_bytes

    # --- asked by planners ----------------------------------------------------------------------

    def lease(
        self,
        key: SeatKey,
        placement: Placement,
        need_bytes: int,
        now: float,
        begun_epoch: int = 0,
        planner: NodeId | None = None,
    ) -> float:
        """Promise `need_bytes` to this seat; seconds until the promise lapses. Idempotent.

        `begun_epoch` is the first that this placing tried; 0: it is `key`'s. With the `planner`, where it is one that
        lives in this node's view, the promise ends, too.

        Raises:
            DeletedMeanwhile: the placing began before the instance was deleted.
            StaleEpoch: this node has seen a newer one, or another placement has this one.
            NoRoom: with need, have and shortfall.
            BadInput: the seat is not this node's.
        """
        self._check_seat_is_ours(key, placement)
        begun_epoch = begun_epoch or key.epoch
        if self.is_deleted(key.instance_id, begun_epoch):
            # So is a repair of what this one makes elsewhere: it begins one above. Not all that was seen here: somebody
            # else may have begun above the deletion meanwhile.
            raise DeletedMeanwhile(key, self._epochs.delete(key.instance_id, key.epoch))
        held = self._seats.get(key)
        if held is not None and held.placement.placement_id == placement.placement_id and held.state != "failed":
            if held.state == "leased":
                held.lapses_at, held.planner = now + self._lease_seconds, planner
            return self._lease_seconds
        if key.epoch == AHEAD:
            if held is not None and held.state != "failed":
                raise Refused(
                    f"seat {key} is another placement's here",
                    expected=f"{held.placement.placement_id}",
                    do="wait for it",
                )
            return self._promise(HeldSeat(key, placement, begun_epoch, need_bytes, "leased", 0.0, now, planner=planner))
        newest = self.next_epoch(key.instance_id) - 1
        same_plan = any(
            seat.key.instance_id == key.instance_id
            and seat.key.epoch == key.epoch
            and seat.placement.placement_id == placement.placement_id
            for seat in self._seats.values()
        )
        if key.epoch < newest or (key.epoch == newest and not same_plan):
            raise StaleEpoch(key, newest)
        return self._promise(HeldSeat(key, placement, begun_epoch, need_bytes, "leased", 0.0, now, planner=planner))

    def has_layers_of(self, key: SeatKey, placement: Placement) -> bool:
        """Whether that seat would go on with what is in memory here."""
        is_its = key.seat_index < len(placement.seats)
        return is_its and any(seat.holds_what(key, placement) for seat in self._seats.values())

    def _promise(self, new: HeldSeat) -> float:
        key, need_bytes = new.key, new.promised_bytes
        replaced = [s for s in self._seats.values() if s.key.instance_id == key.instance_id and s.key.epoch < key.epoch]
        free = self._usable_bytes - self.promised_bytes + sum(seat.promised_bytes for seat in replaced)
        if need_bytes > free:
            free = max(0, free)  # less than nothing where a probe has bounded what was promised already
            raise NoRoom(
                f"the seat needs {format_bytes(need_bytes)} and {format_bytes(free)} are free here "
                f"({format_bytes(need_bytes - free)} short)",
                do="free memory, or plan again with this node's present numbers",
            )
        self._epochs.saw(key.instance_id, key.epoch)
        new.lapses_at = new.last_progress_at + self._lease_seconds
        self._seats[key] = new
        return self._lease_seconds

    def commit(self, ref: SeatRef, now: float) -> list[SeatEffect]:
        """Load what was leased under `ref`.

        Raises:
            Refused: nothing is leased under it (any more).
        """
        ours = [seat for seat in self._of(ref) if seat.state != "failed"]
        if not ours:
            raise Refused(
                f"nothing is leased here for instance {ref.instance_id} epoch {ref.epoch}",
                do="lease first; a lease lapses after a while",
            )
        older = [
            seat
            for seat in self._seats.values()
            if seat.key.instance_id == ref.instance_id and seat.key.epoch < ref.epoch
        ]
        rebound: list[SeatEffect] = []
        started: list[SeatEffect] = []
        for seat in ours:
            if seat.state != "leased":
                continue
            seat.last_progress_at = now
            warm = next(
                (old for old in older if old.holds_what(seat.key, seat.placement) and not self._is_overdue(old, now)),
                None,
            )
            if warm is None:
                seat.state = "loading"
                if seat.key.epoch == AHEAD:
                    seat.lapses_at = now + AHEAD_SECONDS
                started.append(StartRunner(seat.key, seat.placement))
            else:
                older.remove(warm)
                del self._seats[warm.key]
                seat.state, seat.loaded = "linking" if warm.loaded else "loading", warm.loaded
                seat.listens, seat.progress, seat.done_bytes = True, warm.progress, warm.done_bytes
                if not warm.loaded:  # or each epoch would give a loading that hangs its time anew
                    seat.last_progress_at = warm.last_progress_at
                seat.resident_bytes = warm.resident_bytes
                seat.watch = warm.watch  # it is the same process: what speaks against it still does
                rebound.append(RebindRunner(warm.key, seat.key, seat.placement))
        stopped = [
            effect
            for old in older
            for effect in self._drop(old, f"epoch {ref.epoch} took its place", at_once=self._is_overdue(old, now))
        ]
        return [*stopped, *self._make_room(), *rebound, *started]

    def release(self, ref: SeatRef, now: float) -> tuple[int, list[SeatEffect]]:
        """Free what is held under `ref`; layers that an older epoch left warm stay, unless this one went on with them.

        Returns the bytes that can be promised again.
        """
        freed = 0
        effects: list[SeatEffect] = []
        why = ref.reason or "released"
        for seat in self._of(ref):
            freed += seat.promised_bytes + seat.warm_bytes
            effects += self._cut(seat, why, now) if ref.keeps_layers else self._drop(seat, why)
        self._epochs.saw(ref.instance_id, ref.epoch)
        return freed, effects

    def delete(self, deletion: Deletion) -> tuple[int, list[SeatEffect]]:
        """Free what is held of the instance, what was begun to replace it too. Returns the bytes that are free now."""
        instance_id = deletion.instance_id
        void = self._epochs.delete(instance_id, deletion.epoch)
        freed = 0
        effects: list[SeatEffect] = []
        for seat in list(self._seats.values()):
            if seat.key.instance_id == instance_id and seat.begun_epoch <= void:
                # Of a repair that had got this far: a repair of that is void, too.
                void = self._epochs.delete(instance_id, seat.key.epoch)
                freed += seat.promised_bytes + seat.warm_bytes
                effects += self._drop(seat, "deleted")
        return freed, effects

    def is_deleted(self, instance_id: InstanceId, begun_epoch: int) -> bool:
        """Whether a placing of that instance which began with that epoch is void."""
        return self._epochs.is_deleted(instance_id, begun_epoch)

    def saw_epoch(self, instance_id: InstanceId, epoch: int) -> None:
        """Some other node knows of it."""
        self._epochs.saw(instance_id, epoch)

    def next_epoch(self, instance_id: InstanceId) -> int:
        """The lowest epoch that this node would lease; a planner takes the highest it knows of."""
        return self._epochs.next(instance_id)

    # --- told by runners ------------------------------------------------------------------------

    def runner_said(self, key: SeatKey, message: RunnerMessage, now: float) -> list[SeatEffect]:
        """A runner's message changes its seat."""
        seat = self._seats.get(key)
        if seat is None or not seat.runs:
            return []
        seat.watch = seat.watch.heard(message, now)
        if isinstance(message, Heartbeat) and seat.watch.is_stuck():  # a cut one, too: it is no help to a repair
            what = f"its runner has been in one step for {message.busy_seconds:.0f} s"
            return self.fail(key, what, now, at_once=True)
        is_of_use = seat.state != "cut" or isinstance(message, Loading | Loaded | RunnerFailed)
        if not is_of_use or is_of_another_epoch(message, key):
            return []
        match message:
            case Listening():
                # Its files may have been fetched from a peer before: loading counts from nothing again.
                seat.progress, seat.done_bytes, seat.last_progress_at, seat.listens = 0.0, 0, now, True
            case Loading(done_bytes, total_bytes):
                if done_bytes > seat.done_bytes:
                    seat.done_bytes, seat.last_progress_at = done_bytes, now
                    seat.progress = min(1.0, done_bytes / total_bytes) if total_bytes else 0.0
            case Loaded(active_bytes):
                seat.progress, seat.resident_bytes, seat.last_progress_at, seat.loaded = 1.0, active_bytes, now, True
            case Linked():
                seat.linked, seat.last_progress_at = True, now
            case Heartbeat():
                seat.resident_bytes = message.active_bytes
                seat.sessions = message.sessions + message.waiting
                seat.step_seconds = message.step_seconds
            case ChannelLost(_, role, other, reason):
                return self._cut(seat, f"the {role} channel with seat {other} broke: {reason}", now)
            case LinkSample():
                pass  # of a link, not of the seat
            case RunnerFailed():
                what = f"{message.what}{f'; expected {message.expected}' if message.expected else ''}"
                return self.fail(key, f"{what}. {message.do}" if message.do else what, now, message.code)
        if seat.loaded and seat.state != "cut":
            seat.state = "ready" if seat.linked else "linking"
        return []

    def look_at_runners(self, now: float) -> list[SeatEffect]:
        """Give up those that have been silent, or have read nothing, for too long; to be called every `runner_watch.LOOK_SECONDS`."""
        slept, self._looked_at = is_late(now - self._looked_at), now
        effects: list[SeatEffect] = []
        for seat in list(self._seats.values()):
            if slept or not (seat.is_warm or seat.is_loading):
                continue
            seat.watch = seat.watch.looked_at()
            if seat.watch.is_silent(now, seat.silence_share):
                effects += self.fail(seat.key, "its runner lives and says nothing", now, at_once=True)
            elif seat.is_loading and seat.watch.is_stalled:
                effects += self.fail(seat.key, "its runner lives and reads nothing", now, at_once=True)
        return effects

    def cut_off(self, out_of_reach: AbstractSet[NodeId], now: float) -> list[tuple[SeatKey, ChannelLost]]:
        """Seats whose runner waits, with a neighbour that this node does not reach: its channel is as good as broken.

        To be asked after each look. A link that passes nothing breaks no socket for many seconds.
        """
        why = "nothing comes, and this node does not reach that one"
        found: list[tuple[SeatKey, ChannelLost]] = []
        for seat in self._seats.values():
            if seat.state == "ready" and seat.watch.is_waiting(now) and not is_late(now - self._looked_at):
                lost = [ends for ends in seat.neighbours if seat.placement.seats[ends[1]].node_id in out_of_reach]
                found += [(seat.key, ChannelLost(seat.key.epoch, *ends, why)) for ends in lost[:1]]
        return found

    def fail(self, key: SeatKey, error: str, now: float, code: str = "", *, at_once: bool = False) -> list[SeatEffect]:
        """The seat cannot go on: free it now, and announce why for a while. `code`: the class of the error."""
        seat = self._seats.get(key)
        if seat is None or seat.state == "failed":
            return []
        effects: list[SeatEffect] = [StopRunner(key, error, at_once)] if seat.runs else []
        seat.state, seat.error, seat.lapses_at = "failed", error[:512], now + FAILED_LINGER_SECONDS
        seat.error_code = code[:32]
        seat.promised_bytes = seat.resident_bytes = seat.warm_bytes = seat.sessions = 0
        return effects

    # --- told by the view and the clock ---------------------------------------------------------

    def view_changed(
        self, instances: Iterable[Instance], not_lost: AbstractSet[NodeId], now: float
    ) -> list[SeatEffect]:
        """Free seats whose instance is broken, incomplete beyond a gossip's delay, or has lost to a rival placement.

        `not_lost`: nodes that live, and those not met yet.
        """
        derived = {instance.instance_id: instance for instance in instances}
        effects: list[SeatEffect] = []
        for seat in list(self._seats.values()):
            if seat.state == "leased" and seat.planner is not None and seat.planner not in not_lost:
                del self._seats[seat.key]
        for seat in list(self._seats.values()):
            instance = derived.get(seat.key.instance_id)
            if not seat.runs or instance is None or instance.epoch < seat.key.epoch:
                continue
            if seat.key.epoch == AHEAD:
                # It is no part of what runs, and no reason to end it, until the epoch that it was for does without it.
                is_unwanted = self._node_id not in instance.placement.node_ids
                # One that is half made may be followed by another that its planner tries: for that it may be here.
                if instance.epoch >= seat.begun_epoch and is_unwanted and not instance.is_half_made:
                    effects += self._drop(seat, f"epoch {instance.epoch} does without it")
                continue
            others_load = instance.epoch == seat.key.epoch and instance.loads_beside(seat.key.seat_index)
            if seat.others_load and not others_load and seat.state == "linking":
                seat.last_progress_at = now  # only from here on is it for this seat to be linked
            seat.others_load = others_load
            gone = [node for node in seat.placement.node_ids if node not in not_lost]
            may_outlive = (seat.key.epoch, seat.placement.placement_id) in instance.outlived
            if may_outlive and seat.state == "ready" and not self._is_awaited(seat):
                # Two sides of a partition have met. Its origins lose nothing by the other's victory.
                if not instance.is_half_made:
                    self._promise_no_more(seat)
                    seat.outlives = True
            elif instance.epoch > seat.key.epoch and (self._is_awaited(seat) or instance.is_half_made):
                # The news of the lease may be quicker than the commit: a repair would load what is here already. And it
                # may never be committed, and its repair want these layers.
                effects += self._cut(seat, f"epoch {instance.epoch} is about to take its place", now)
            elif instance.epoch > seat.key.epoch:
                effects += self._drop(seat, f"epoch {instance.epoch} took its place")
            elif instance.placement.placement_id != seat.placement.placement_id:
                effects += self._drop(seat, "another placement of the same epoch won")
            elif gone:
                effects += self._cut(seat, f"node …{gone[0][-8:]} is gone", now)
            elif instance.state == "broken":
                effects += self._cut(seat, f"another seat failed: {instance.error}", now)
            elif seat.planner is not None and seat.planner not in not_lost and instance.is_half_made:
                effects += self._cut(seat, "its planner is gone and has left it half made", now)
            elif seat.outlives and self.promised_bytes + seat.warm_bytes <= self._usable_bytes:
                # Who won is gone. As long as its memory is promised to another, it goes on until that one commits.
                seat.outlives = False
                seat.promised_bytes, seat.warm_bytes = seat.warm_bytes, 0
            elif not instance.missing:
                seat.alone_since = None
                seat.planner = seat.planner if instance.is_half_made else None
            elif seat.alone_since is None:
                seat.alone_since = now
        return effects + self.tick(now)

    def tick(self, now: float) -> list[SeatEffect]:
        """Let lapse what is due."""
        effects: list[SeatEffect] = []
        for seat in list(self._seats.values()):
            if seat.state in {"leased", "failed"} and now >= seat.lapses_at:
                del self._seats[seat.key]
            elif seat.state == "cut" and now >= seat.lapses_at:
                effects += self._drop(seat, f"not repaired within {WARM_SECONDS:.0f} s: {seat.error}")
            elif seat.key.epoch == AHEAD and now >= seat.lapses_at:
                effects += self._drop(seat, f"no epoch wanted it within {AHEAD_SECONDS:.0f} s")
            elif seat.alone_since is not None and now >= seat.alone_since + MISSING_GRACE_SECONDS:
                effects += self._cut(seat, "another seat of its instance is missing", now)
            elif seat.makes_progress and now >= seat.last_progress_at + self._load_stall_seconds:
                effects += self.fail(
                    seat.key, f"no progress for {self._load_stall_seconds:.0f} s while {seat.state}", now
                )
        return effects

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do; None if nothing is pending."""
        due = [seat.lapses_at for seat in self._seats.values() if seat.state in {"leased", "cut", "failed"}]
        for seat in self._seats.values():
            if seat.key.epoch == AHEAD and seat.runs:
                due.append(seat.lapses_at)
            if seat.alone_since is not None:
                due.append(seat.alone_since + MISSING_GRACE_SECONDS)
            if seat.makes_progress:
                due.append(seat.last_progress_at + self._load_stall_seconds)
        return min(due, default=None)

    # --- what can be asked ----------------------------------------------------------------------

    @property
    def is_outliving(self) -> bool:
        """Some seat will be given up as soon as the cards say that it has no session any more, which is no news to a watch."""
        return any(seat.outlives for seat in self._seats.values())

    @property
    def promised_bytes(self) -> int:
        return sum(seat.promised_bytes for seat in self._seats.values())

    @property
    def held_bytes(self) -> int:
        """Promised, or not promised any more and not given up yet."""
        return sum(seat.promised_bytes + seat.warm_bytes for seat in self._seats.values())

    def reports(self) -> tuple[SeatReport, ...]:
        """One per seat, sorted, for this node's card."""
        order = sorted(self._seats, key=lambda key: (key.instance_id, key.epoch, key.seat_index))
        return tuple(self._seats[key].report for key in order)

    def placements(self) -> tuple[Placement, ...]:
        """The placements that the reports belong to, each once."""
        found = {seat.placement.placement_id: seat.placement for seat in self._seats.values()}
        return tuple(found[placement_id] for placement_id in sorted(found))

    def running(self) -> frozenset[SeatKey]:
        """Seats that should have a runner now."""
        return frozenset(seat.key for seat in self._seats.values() if seat.runs)

    # --- inside ---------------------------------------------------------------------------------

    def _check_seat_is_ours(self, key: SeatKey, placement: Placement) -> None:
        placement.validate()
        if key.seat_index >= len(placement.seats) or placement.seats[key.seat_index].node_id != self._node_id:
            raise BadInput(
                f"seat {key.seat_index} of placement {placement.placement_id} is not this node's",
                expected="a seat whose node is the one that is asked",
            )

    def _of(self, ref: SeatRef) -> list[HeldSeat]:
        return [
            seat
            for seat in self._seats.values()
            if (seat.key.instance_id, seat.key.epoch) == (ref.instance_id, ref.epoch)
            and seat.placement.placement_id == ref.placement_id
        ]

    def _is_awaited(self, seat: HeldSeat) -> bool:
        """A newer epoch has leased this very seat here, and will go on with its layers once it commits."""
        return any(
            new.state == "leased" and new.key.epoch > seat.key.epoch and seat.holds_what(new.key, new.placement)
            for new in self._seats.values()
        )

    @staticmethod
    def _promise_no_more(seat: HeldSeat) -> None:
        """Whoever needs the memory gets it (`commit`)."""
        if seat.promised_bytes:
            seat.warm_bytes, seat.promised_bytes = seat.promised_bytes, 0

    def _make_room(self) -> list[SeatEffect]:
        """Give up warm layers, those that were cut first and those with sessions last, as far as promises need their memory."""
        effects: list[SeatEffect] = []
        for seat in sorted(self._seats.values(), key=lambda s: (s.outlives, s.lapses_at, s.key.instance_id)):
            if (seat.state == "cut" or seat.outlives) and self.held_bytes > self._usable_bytes:
                effects += self._drop(seat, "its memory is needed")
        return effects

    def _cut(self, seat: HeldSeat, why: str, now: float) -> list[SeatEffect]:
        """The instance cannot go on, but this seat's layers may, in the next epoch: keep them warm for a while.

        If they are still being read, that goes on, with the same deadline for the next progress.
        """
        if seat.state == "cut":
            return []
        if not (seat.is_warm or seat.is_loading):
            return self._drop(seat, why)
        if self._is_overdue(seat, now):  # it is to blame, and no help to a repair
            return self.fail(seat.key, f"its runner was overdue when this was lost: {why}", now, at_once=True)
        seat.state, seat.error, seat.lapses_at = "cut", why[:512], now + WARM_SECONDS
        self._promise_no_more(seat)
        seat.outlives = False
        seat.linked, seat.sessions, seat.alone_since = False, 0, None
        return []

    def _is_overdue(self, seat: HeldSeat, now: float) -> bool:
        """Whether its runner is the likely reason for what was lost; a node that slept knows nothing yet."""
        return not is_late(now - self._looked_at) and seat.watch.is_overdue(now, seat.silence_share)

    def _drop(self, seat: HeldSeat, reason: str, *, at_once: bool = False) -> list[SeatEffect]:
        del self._seats[seat.key]
        return [StopRunner(seat.key, reason, at_once)] if seat.runs else []


def is_of_another_epoch(message: RunnerMessage, key: SeatKey) -> bool:
    """A word on the channels of an epoch that this runner's seat is no more: it came too late to say anything of `key`."""
    return isinstance(message, Linked | ChannelLost) and message.epoch != key.epoch
