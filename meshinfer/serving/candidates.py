"""What could be placed, best first, as this node sees the mesh: the planner's plans, and repairs of what is broken.

A node that is in doubt, or whose runner failed again and again, is planned with only if there is no other way; what an
instance holds counts as free for its own next epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import trio

from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.planning.hops import cycle_hops
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Plan, Preview, Refusal
from meshinfer.planning.planner import plan, validate_placement
from meshinfer.planning.repair import broken_channels, crosses, repairs
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.ports import Ports
from meshinfer.serving.view import Instance
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import Place

WARM_STATES = frozenset({"cut", "linking", "ready"})
"""Of a seat whose layers are in memory."""
LASTING_ERRORS = frozenset({"corrupt_model", "bad_input"})
"""Trying again on the same node changes nothing."""
FAILURES_BEFORE_ELSEWHERE = 2
"""A runner that crashed once is made again where it was, since its files are there; after the second time it goes
elsewhere if it can."""
FAILURES_SECONDS = 120.0
"""How long a failure counts. A seat that has served for so long starts with a clean record."""
Candidates = tuple[Sequence[Plan], Sequence[Refusal]]


class CandidateSource:
    """This node's plans for any model, and what it remembers of failures."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._failures: dict[tuple[InstanceId, NodeId], dict[int, float]] = {}
        """Of runners, as this planner saw them of late: the epochs in which a node's seat failed, and when."""

    def best_first(self, ask: Place, card: ModelCard, old: Instance | None, silent: frozenset[NodeId]) -> Candidates:
        """Candidates, best first: without `silent` nodes, nor those in doubt if that is possible."""
        topology = without(silent, with_memory_of(self._ports.topology(), old))
        doubtful = self._ports.doubtful() | self._troubled(old) | frozenset(ask.out_of_reach)
        sure = without(doubtful, topology)
        refusals: list[Refusal] = []
        # What serves all but one origin is replaced by what serves that one, too, or not at all.
        is_of_use = old is not None and self._ports.is_usable(old)
        for among in (sure,) if is_of_use else (sure, topology) if doubtful else (topology,):
            plans, refusals = self._candidates(ask, card, among, old)
            if old is not None and ask.placement is None:
                lost = [
                    index
                    for index, (seat, report) in enumerate(zip(old.placement.seats, old.reports, strict=True))
                    if report is None or report.state not in WARM_STATES or seat.node_id not in among.by_id
                ]
                chunk = self._ports.settings.prefill_chunk_tokens
                plans = [*repairs(old.placement, lost, among, card, prefill_chunk_tokens=chunk), *plans]
                broken = broken_channels(old.placement, among)
                plans.sort(key=lambda candidate: crosses(candidate.placement, broken))
            if plans:
                return plans, refusals
        return [], refusals

    def _troubled(self, old: Instance | None) -> frozenset[NodeId]:
        """Nodes whose runner for this instance failed again and again of late: its seat goes elsewhere if it can."""
        if old is None:
            return frozenset()
        now = trio.current_time()
        for seat, report in zip(old.placement.seats, old.reports, strict=True):
            if report is not None and report.state == "failed":
                epochs = self._failures.setdefault((old.instance_id, seat.node_id), {})
                epochs.setdefault(old.epoch, now)
                if report.error_code in LASTING_ERRORS:
                    epochs.setdefault(-1, now)  # once is enough
        for key, epochs in list(self._failures.items()):
            recent = {epoch: at for epoch, at in epochs.items() if now - at < FAILURES_SECONDS}
            if recent:
                self._failures[key] = recent
            else:
                del self._failures[key]
        return frozenset(
            node
            for (instance_id, node), epochs in self._failures.items()
            if instance_id == old.instance_id and len(epochs) >= FAILURES_BEFORE_ELSEWHERE
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


def with_memory_of(topology: Topology, old: Instance | None) -> Topology:
    """`topology` as if the seats of an instance were free: its next epoch takes their place and memory."""
    if old is None:
        return topology

    def unburdened(card: NodeCard) -> NodeCard:
        freed = sum(seat.promised_bytes for seat in card.seats if seat.instance_id == old.instance_id)
        return replace(card, memory_promised_bytes=max(0, card.memory_promised_bytes - freed)) if freed else card

    return Topology.of((unburdened(card) for card in topology.nodes), topology.links)
