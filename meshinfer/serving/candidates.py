"""What could be placed, best first, as this node sees the mesh: the planner's plans, and repairs of what is broken.

A node that is in doubt, or whose runner failed again and again, is planned with only if there is no other way, and the
latter not at once (`failures`); what an instance holds counts as free for its own next epoch, and so does what is
loaded ahead for it, which may be all that is left of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import trio

from meshinfer.base.errors import NoRoom
from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.planning.hops import cycle_hops
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Plan, Preview, Refusal
from meshinfer.planning.planner import plan, validate_placement
from meshinfer.planning.repair import broken_channels, crosses, repairs
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.failures import Failures, Rest
from meshinfer.serving.ports import Ports
from meshinfer.serving.view import AHEAD, Instance
from meshinfer.topology.card import NodeCard, SeatReport
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import Place

WARM_STATES = frozenset({"cut", "linking", "ready"})
"""Of a seat whose layers are in memory; a cut one may have to read the last of them."""
Candidates = tuple[Sequence[Plan], Sequence[Refusal]]


class CandidateSource:
    """This node's plans for any model, and what it remembers of failures."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._failures = Failures()

    def learn(self, instance: Instance) -> None:
        """Take in what its seats say of failures, as long as they say it: a failed seat is announced for seconds only."""
        self._failures.learn(instance, trio.current_time())

    def best_first(
        self, ask: Place, card: ModelCard, instance_id: InstanceId, old: Instance | None, silent: frozenset[NodeId]
    ) -> Candidates:
        """Candidates, best first: without `silent` nodes, nor those in doubt if that is possible.

        Raises:
            NoRoom: only nodes can take it whose runner failed again and again, the last time a moment ago.
        """
        now = trio.current_time()
        if old is not None:
            self.learn(old)
        troubled = self._failures.troubled(instance_id, now)
        # Who names the nodes has reasons to.
        rests = self._failures.rests(instance_id, now) if ask.placement is None else ()
        topology = without(silent, with_memory_of(self._ports.topology(), instance_id))
        rested = without(frozenset(rest.node_id for rest in rests), topology)
        # To lease a seat on one that this node does not reach takes a call's whole deadline, and then it is planned anew.
        doubtful = self._ports.doubtful() | self._ports.out_of_reach() | troubled | frozenset(ask.out_of_reach)
        sure = without(doubtful, topology)
        refusals: list[Refusal] = []
        # What serves all but one origin is replaced by what serves that one, too, or not at all.
        is_of_use = old is not None and self._ports.is_usable(old)
        for among in (sure,) if is_of_use else (sure, rested) if doubtful else (topology,):
            plans, refusals = self._candidates(ask, card, among, old)
            if ask.placement is None:
                if old is not None:
                    plans = [*self._repairs(card, instance_id, old.placement, old.reports, among), *plans]
                for ahead in loaded_ahead(instance_id, among) if old is None else ():
                    if answers(ahead, ask):
                        nothing = (None,) * len(ahead.seats)
                        plans = [*self._repairs(card, instance_id, ahead, nothing, among), *plans]
                broken = among.blocked | (broken_channels(old.placement, among) if old is not None else frozenset())
                plans.sort(key=lambda candidate: crosses(candidate.placement, broken))
            if plans:
                return plans, refusals
        if rests and not is_of_use and self._candidates(ask, card, topology, old)[0]:
            raise self._resting(rests)
        return [], refusals

    def _repairs(
        self,
        card: ModelCard,
        instance_id: InstanceId,
        placement: Placement,
        reports: Sequence[SeatReport | None],
        among: Topology,
    ) -> Sequence[Plan]:
        """Placements that leave the layers where they are in memory, or almost."""
        here = among.by_id.keys() & self._ports.staying()
        lost = [
            index
            for index, (seat, report) in enumerate(zip(placement.seats, reports, strict=True))
            if seat.node_id not in here or not _is_held(seat, report, instance_id, among)
        ]
        chunk = self._ports.settings.prefill_chunk_tokens
        return repairs(placement, lost, among, card, prefill_chunk_tokens=chunk)

    def _resting(self, rests: Sequence[Rest]) -> NoRoom:
        """There is room, on nodes that are not to be tried yet."""
        names = self._ports.topology().by_id
        each = "; ".join(
            f"its runner failed {rest.failures} times on {names[rest.node_id].name}, and nobody else can take that seat"
            f"{f' ({rest.error})' if rest.error else ''}"
            for rest in rests
            if rest.node_id in names
        )
        return NoRoom(
            each[:1500], do=f"next try in {max(1, math.ceil(rests[0].seconds))} s; look at `meshinfer status`"
        )

    def _candidates(
        self, ask: Place, card: ModelCard, topology: Topology, old: Instance | None
    ) -> tuple[list[Plan], list[Refusal]]:
        if ask.placement is not None:
            chunk = self._ports.settings.prefill_chunk_tokens
            verdict = validate_placement(ask.placement, topology, card, may_fetch=True, prefill_chunk_tokens=chunk)
            return ([verdict], []) if isinstance(verdict, Plan) else ([], [verdict])
        # Where the broken one was, the files are, and perhaps layers: another place must be worth it.
        running = old if old is not None and answers(old.placement, ask) else None
        preview = self.preview(topology, card, ask.workload, ask.constraints, running)
        return list(preview.plans), list(preview.refusals)

    def preview(
        self,
        topology: Topology,
        card: ModelCard,
        workload: Workload,
        constraints: Constraints,
        running: Instance | None = None,
    ) -> Preview:
        """`topology` counts the memory of `running` as free."""
        preview = plan(
            topology,
            card,
            workload,
            constraints,
            may_fetch=True,
            prefill_chunk_tokens=self._ports.settings.prefill_chunk_tokens,
            running=running.placement if running else None,
        )
        if self._ports.want_links is not None:
            orders = ([seat.node_id for seat in each.placement.seats] for each in preview.plans)
            self._ports.want_links(hop for order in orders for hop in cycle_hops(order))
        return preview


def _is_held(seat: Seat, report: SeatReport | None, instance_id: InstanceId, among: Topology) -> bool:
    """Its node has these layers in memory, or reads them: of this epoch, or of an older one if this one was left half made.

    One that has yet to fetch the files has nothing that another node would not have sooner.
    """
    if report is not None and report.state == "failed":
        return False
    card = among.by_id[seat.node_id]
    placements = {placement.placement_id: placement for placement in card.placements}
    files = {(model.model_id, model.digest) for model in card.models}
    for each in card.seats:
        placement = placements.get(each.placement_id)
        if each.instance_id != instance_id or placement is None or seat not in placement.seats:
            continue
        if each.state in WARM_STATES or (each.loads and (placement.model_id, placement.model_digest) in files):
            return True
    return False


def loaded_ahead(instance_id: InstanceId, among: Topology) -> Iterator[Placement]:
    """Placements that seats are loaded ahead for: all that is known of an instance whose every holder went meanwhile."""
    found: dict[str, Placement] = {}
    for card in among.nodes:
        ids = {seat.placement_id for seat in card.seats if (seat.instance_id, seat.epoch) == (instance_id, AHEAD)}
        found |= {each.placement_id: each for each in card.placements if each.placement_id in ids and each.is_whole}
    return (found[key] for key in sorted(found))


def answers(placement: Placement, ask: Place) -> bool:
    """Whether an instance of `placement` is what is asked for: that very one, or one that reserves at least as much."""
    if ask.placement is not None:
        return placement == ask.placement
    nodes = set(placement.node_ids)
    allowed = nodes.isdisjoint(ask.constraints.exclude) and nodes <= set(ask.constraints.nodes or nodes)
    held = {node: sum(seat.layers for seat in placement.seats if seat.node_id == node) for node in nodes}
    has_layers = all(held.get(node) == count for node, count in ask.constraints.layers)
    has_context = placement.context_tokens >= ask.workload.context_tokens
    return allowed and has_layers and has_context and placement.concurrency >= ask.workload.concurrency


def without(nodes: frozenset[NodeId], topology: Topology) -> Topology:
    if not nodes:
        return topology
    return Topology.of((node for node in topology.nodes if node.node_id not in nodes), topology.links)


def with_memory_of(topology: Topology, instance_id: InstanceId) -> Topology:
    """`topology` as if the seats of an instance were free: its next epoch takes their place and memory.

    Of seats that are loaded ahead, too, and when nothing else is left of it.
    """

    def unburdened(card: NodeCard) -> NodeCard:
        freed = sum(seat.promised_bytes for seat in card.seats if seat.instance_id == instance_id)
        return replace(card, memory_promised_bytes=max(0, card.memory_promised_bytes - freed)) if freed else card

    return Topology.of((unburdened(card) for card in topology.nodes), topology.links)
