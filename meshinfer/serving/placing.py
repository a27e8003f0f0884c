"""From a model id to a ready instance, without a leader: what any node does that wants one.

The origin looks at the derived instances first. If none is ready or on its way, it asks the nodes
in the order that rendezvous hashing gives for the model, so that all origins that want one model
at once meet at one planner; a planner that does not answer by its deadline is passed over, and the
origin plans itself when its own turn comes. What the planner then does is `elected_planner`'s.

    origin ── place ──▶ planner (leases and commits every seat)
           ◀─ placed ──
    origin waits until its own view derives `ready`

Nobody has to ask for a repair: whoever is elected for the model of a broken instance wants it whole. And a node
that leaves wants its seats to be others' before it goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import trio

from meshinfer.base.errors import (
    ERRORS_BY_CODE,
    DeadlineExceeded,
    MeshinferError,
    PeerLost,
    Refused,
    UnknownInstance,
)
from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.acquaintance import STRANGER_SECONDS
from meshinfer.serving.candidates import loaded_ahead
from meshinfer.serving.elected_planner import ANNOUNCE_SECONDS, ElectedPlanner
from meshinfer.serving.election import elect
from meshinfer.serving.failures import LASTING_ERRORS
from meshinfer.serving.ports import Ports
from meshinfer.serving.reach import while_within_reach, within_reach
from meshinfer.serving.requests import Waiting
from meshinfer.serving.view import Instance
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import PLACE, Place, Placed

log = logging.getLogger(__name__)

PLACE_TIMEOUT_SECONDS = 10.0
"""For a planner's answer: a model card asked of a peer, and a few candidates' leases, each bounded by the call
timeout. A planner that dies meanwhile is noticed as a lost peer, sooner."""
PLACING_TRIES = 3
"""How often one request asks for its model to be placed before its last failure is the answer."""
ASKS_AT_ONCE = 4
"""Of one model, for the requests of this node: a planner answers the calls of a node sixteen at a time, and one that waits for
silent nodes keeps those of other models waiting. The rest find it placed, as a rule, when their turn comes."""
REPAIR_SECONDS = 10.0
"""Between two repairs of one instance that no request asked for: a node that comes and goes does not make it flap."""
REPAIRS_AT_ONCE = 8
"""Of different instances: one that waits for a silent node's three seconds, and again for the next, holds up no other."""
HAND_OVER_SECONDS = 20.0
"""For the seats of a node that leaves to be loaded elsewhere. Longer, and the person at the keyboard pulls the plug."""
LEAVERS_SECONDS = 0.5
"""Before a hand-over, for the news of others that leave at the same time: twice what gossip takes to be everywhere."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What an answer that has begun needs of an instance to go on there."""

    model_digest: str
    """Of the weights that began it; others cannot go on with it."""
    least_tokens: int
    """Of context: where less is reserved, it would be refused as too long, though where it began it was not."""

    def fits(self, instance: Instance) -> bool:
        return instance.placement.context_tokens >= self.least_tokens


class Placer:
    """Instances wanted by this node: for its requests, for whoever deletes them, and for their own sake."""

    def __init__(self, ports: Ports, planner: ElectedPlanner) -> None:
        self._ports = ports
        self._planner = planner
        self._repairs = trio.CapacityLimiter(REPAIRS_AT_ONCE)
        self._repairing: set[InstanceId] = set()
        """One task each."""
        self._asks: dict[ModelId, trio.CapacityLimiter] = {}
        """See `_placed`; of models that somebody asks for."""

    async def run(self) -> None:
        """Repair what broke, also when nobody asks for it: the planner that is elected for the model sees to it."""
        watch = self._ports.watch()
        not_before: dict[InstanceId, float] = {}
        async with trio.open_nursery() as repairs:
            while True:
                now = trio.current_time()
                not_before = {key: at for key, at in not_before.items() if at > now}
                for instance in self._ports.instances():
                    if instance.state == "broken":  # on every node: who is elected may change
                        self._planner.learn(instance)
                    if self._should_repair(instance) and instance.instance_id not in not_before:
                        not_before[instance.instance_id] = now + REPAIR_SECONDS
                        if instance.instance_id not in self._repairing:
                            self._repairing.add(instance.instance_id)
                            repairs.start_soon(self._repair, instance)
                with trio.move_on_at(min((*not_before.values(), self._ports.acquaintance.next_wakeup(now)))):
                    await watch.changed()

    def _should_repair(self, instance: Instance) -> bool:
        elected = elect(instance.placement.model_id, self._ports.staying())[:1]
        return instance.state == "broken" and elected == (self._ports.node_id,)

    async def _repair(self, instance: Instance) -> None:
        try:
            async with self._repairs:
                await self._planner.repair(instance)
        except MeshinferError as error:
            model_id = instance.placement.model_id
            log.warning("instance %s (%s) is not repaired: %s", instance.instance_id, model_id, error)
        finally:
            self._repairing.discard(instance.instance_id)

    async def hand_over(self, instance: Instance) -> bool:
        """This node is about to leave: give its seats of `instance` to others. False if that cannot be, or is not wanted.

        Raises nothing of the mesh's: whatever is wrong with one instance, the node leaves, and its others wait.
        """
        own = self._ports.node_id
        watch = self._ports.watch()
        given_epoch = 0
        with trio.move_on_after(HAND_OVER_SECONDS):
            await trio.sleep(LEAVERS_SECONDS)
            while True:
                now = next((each for each in self._ports.instances() if each.instance_id == instance.instance_id), None)
                if now is None or (now.state == "broken" and now.epoch >= given_epoch):
                    return False  # it is deleted, or repaired without this node
                if own not in now.placement.node_ids:
                    if now.state == "ready":
                        return True
                elif not given_epoch and self._is_first_to_hand_over(now):
                    given_epoch = await self._give_away(now)
                    if not given_epoch:
                        return False
                    continue
                await watch.changed()
        return False

    async def _give_away(self, instance: Instance) -> int:
        """The epoch in which others hold what this node held; 0 if there will be none."""
        try:
            return (await self._planner.give_away(instance, leaving=self._ports.node_id)).epoch
        except MeshinferError as error:  # no room, no model card, deleted meanwhile
            model_id = instance.placement.model_id
            log.warning("instance %s (%s) is not handed over: %s", instance.instance_id, model_id, error)
            return 0

    def _is_first_to_hand_over(self, instance: Instance) -> bool:
        """Of nodes that leave one instance together, one hands over for all: each for itself, they break off each other's.

        Who comes when another's hand-over is under way, which shows by what is loaded ahead, waits for its end.
        """
        topology = self._ports.topology()
        if next(loaded_ahead(instance.instance_id, topology), None) is not None:
            return False
        holders = instance.placement.node_ids
        leaving = {card.node_id for card in topology.nodes if card.takes_nothing}.intersection(holders)
        return elect(instance.instance_id, {*leaving, self._ports.node_id})[0] == self._ports.node_id

    async def ready_instance(
        self,
        model_id: ModelId,
        workload: Workload,
        waiting: Callable[[Waiting], None],
        avoid: frozenset[NodeId] = frozenset(),
        tokens: int = 0,
        begun: Begun | None = None,
    ) -> Instance:
        """An instance of `model_id` that is ready, placed and loaded if need be; without the nodes to `avoid` if it can.

        Of several, one that reserves context for the `tokens` of prompt and answer; if none does, any. For an answer
        that has `begun`, one that it can go on with, or a new one.

        Waits as long as there is progress; the caller brings the deadline of the request.

        Raises:
            UnknownModel, NoRoom, BadInput: as the planner said.
            Refused: it was deleted again and again.
            PeerLost: no planner answers, or what was placed broke again and again; with the last reason.
        """
        failure: MeshinferError = PeerLost(f"{model_id} could not be placed: what was placed does not show")
        watch = self._ports.watch()
        if begun is not None:
            workload = replace(workload, context_tokens=max(workload.context_tokens, begun.least_tokens))

        def usable() -> Instance | None:
            found = self._instance_of(model_id, tokens, begun)
            return found if found is not None and self._ports.is_usable(found, avoid) else None

        for _ in range(PLACING_TRIES):
            instance = usable()
            if instance is None:
                waiting(Waiting("planning", 0.0))
                # Of one that is repaired, the others on it need no more sessions at once than it was placed for.
                broken = self._instance_of(model_id, tokens, begun)
                most = broken.placement.concurrency if broken else workload.concurrency
                wanted = replace(workload, concurrency=min(workload.concurrency, most))
                out_of_reach = tuple(sorted(avoid))[:256]
                ask = Place(model_id, wanted, Constraints(), None, out_of_reach)
                try:
                    instance = await self._placed(ask, usable)
                except Refused as error:  # deleted while it was being placed, and still wanted here
                    failure = error
                    continue
                if instance is not None and begun is not None and not begun.fits(instance):
                    continue  # another origin has placed it anew meanwhile, with less
                if instance is not None and instance.state == "broken":
                    failure = _failure_of(instance)
            while instance is not None and instance.state in {"placing", "loading"}:
                waiting(Waiting("placing" if instance.state == "placing" else "loading", instance.progress))
                with trio.move_on_after(STRANGER_SECONDS):  # a stranger is lost by time alone
                    await watch.changed()
                now = self._instance_of(model_id, tokens, begun)
                if now is None or not self._ports.is_usable(now, avoid):
                    failure, now = _failure_of(now or instance), None
                instance = now
            if instance is not None and instance.state == "ready":
                return instance
        raise failure

    async def _placed(self, ask: Place, usable: Callable[[], Instance | None]) -> Instance | None:
        """What was asked for once it shows here; what is `usable` if another request has seen to that meanwhile."""
        asks = self._asks.setdefault(ask.model_id, trio.CapacityLimiter(ASKS_AT_ONCE))
        try:
            async with asks:
                return usable() or await self.appears(await self.place(ask))
        finally:
            if not asks.borrowed_tokens and not asks.statistics().tasks_waiting:
                self._asks.pop(ask.model_id, None)

    async def place(self, ask: Place) -> Placed:
        """Have the elected planner place it; the next in order where one does not answer."""
        order = elect(ask.model_id, within_reach(self._ports) & self._ports.staying())
        asked = encode(ask)
        for planner in order:
            if planner == self._ports.node_id:
                # In its turn and no later: whoever comes after it would ask it, and two would plan at once.
                break
            try:
                call = partial(self._ports.call, planner, PLACE, asked, PLACE_TIMEOUT_SECONDS)
                return decode(Placed, await while_within_reach(self._ports, planner, call))
            except (PeerLost, DeadlineExceeded) as error:
                log.info("planner %s passed over for %s: %s", self._ports.called(planner), ask.model_id, error)
        return await self._planner.place(ask)

    async def appears(self, placed: Placed) -> Instance | None:
        """The placed instance once it shows in this node's view; None if it does not in time."""
        watch = self._ports.watch()
        with trio.move_on_after(ANNOUNCE_SECONDS):
            while True:
                for instance in self._ports.instances():
                    if instance.instance_id == placed.instance_id and instance.epoch >= placed.epoch:
                        return instance
                await watch.changed()
        return None

    async def delete(self, instance_id: InstanceId) -> tuple[dict[NodeId, int], tuple[NodeId, ...]]:
        """Free an instance on every node: bytes freed by each, and who did not confirm.

        A repair of it that is under way ends. A request of the model that is under way has it placed again, as a new
        one would.

        Raises:
            UnknownInstance: no live node announces it.
        """
        found = [instance for instance in self._ports.instances() if instance.instance_id == instance_id]
        if not found:
            raise UnknownInstance(
                f"no instance {instance_id[:64]!r}",
                expected=f"one of {[i.instance_id for i in self._ports.instances()] or 'none: nothing is placed'}",
            )
        return await self._planner.delete(found[0])

    def _instance_of(self, model_id: ModelId, tokens: int, begun: Begun | None) -> Instance | None:
        """The best one to use: those with context enough, and of these ready before loading before the rest.

        Also a broken one before one that is too small: it can be repaired.
        """
        order = {"ready": 0, "loading": 1, "placing": 2, "broken": 3}
        known = self._ports.instances_of(model_id)
        return min(
            (each for each in known if begun is None or begun.fits(each)),
            key=lambda instance: (
                begun is not None and instance.placement.model_digest != begun.model_digest,
                instance.placement.context_tokens < tokens,
                order[instance.state],
                instance.instance_id,
            ),
            default=None,
        )


def _failure_of(instance: Instance) -> MeshinferError:
    """What to tell whoever waited for it."""
    what = f"{instance.placement.model_id} could not be loaded"
    if instance.error_code in LASTING_ERRORS:
        return ERRORS_BY_CODE[instance.error_code](f"{what}: {instance.error}")
    why = instance.error or "a node was lost meanwhile"
    return PeerLost(f"{what}: {why}", do="look at `meshinfer status`, then try again")
