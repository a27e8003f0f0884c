"""From a topology, a model card and a workload to plans, best first, and refusals with their numbers.

    nodes that may take part ─► room of each ─► sets and orders of nodes ─► cuts ─► plans
    (alive, allowed, has files)   (memory)         (search)               (partition)

The order of preference, first planner:
1. One node that holds everything: no link slows it. Most free memory first, then id.
2. The fewest nodes that hold everything: each further one costs a hop per token and saves nothing
   for a single stream. Among those the least link time per token, the way back of the token
   included; then ids. Within the nodes, the cuts that leave the fullest of them most headroom.
A node that holds the model's files goes before one that would have to fetch them (`may_fetch`).

Pure and deterministic to the bit: nodes sorted by id, measurements quantised, arithmetic in
integers, no clock, no dice. Any node computes the same preview from the same topology, so which
one plans is never a matter of correctness. Memory that a card says is promised counts as taken;
a caller who repairs an instance first gives back, in the topology that it passes, what the
instance's warm seats hold.

Manual placements go through the same checks (`validate_placement`), and a node that is asked for a
lease recomputes its seat's need with the same `seat_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshinfer.base.errors import BadInput
from meshinfer.planning import explain
from meshinfer.planning.hops import cycle_nanoseconds, hop_nanoseconds
from meshinfer.planning.memory import PREFILL_CHUNK_TOKENS, RangeNeeds, Room, seat_memory
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.partition import balanced_cuts, boundaries, furthest
from meshinfer.planning.plan import Plan, Preview, Refusal, SeatMemory
from meshinfer.planning.search import Cycle, cycles
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement, Seat

__all__ = ["plan", "seat_memory", "validate_placement"]

MAX_PLANS = 8
"""More candidates than that to lease, and the view is stale: plan anew instead."""
LONG_PIPELINE_PLANS = 4
"""Beyond 8 stages: the alternatives differ in one node of many, and each takes 5 ms to cut."""
MAX_REFUSALS_PER_NODE = 16
"""Single nodes that do not fit alone, largest first; a page of them tells a person nothing more."""
FETCH_PRICE = 10**15
"""What a node without the files costs, in the currency of link time: more than any sum of hops, so that nodes
that hold the files always win among equally many."""


def plan(
    topology: Topology,
    card: ModelCard,
    workload: Workload,
    constraints: Constraints,
    *,
    may_fetch: bool = False,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> Preview:
    """All candidates for this model, the choice first.

    Args:
        topology: the live nodes and what they say of themselves.
        card: the model; nodes take part that hold its files with the card's digest.
        workload: what to reserve.
        constraints: what the operator allows.
        may_fetch: also nodes that would have to fetch the files from a peer first.
        prefill_chunk_tokens: of the nodes' settings; the activation peak depends on it.
    """
    impossible = _never_possible(topology, card, workload)
    if impossible:
        return Preview((), (impossible,))
    nodes, refusals = _eligible(topology, card, constraints, may_fetch)
    if not nodes:
        return Preview((), tuple(refusals))
    problem = _Problem.of(topology, card, workload, nodes, prefill_chunk_tokens)
    chosen = problem.choose()
    tight = [problem.too_small_alone(node) for node in problem.too_small()[:MAX_REFUSALS_PER_NODE]]
    if chosen:
        plans = [problem.plan(cycle) for cycle in chosen]
        reasons = explain.reasons(topology, card, plans, tight)
        return Preview(
            tuple(replace(each, reason=reason) for each, reason in zip(plans, reasons, strict=True)),
            tuple(tight + refusals + explain.not_in_this_build(nodes)),
        )
    if len(problem.bounds) == 2:
        why = explain.cannot_be_cut(topology, card, [seat for each in tight for seat in each.memory])
    else:
        why = problem.mesh_too_small()
    return Preview((), (why, *refusals, *tight))


def validate_placement(
    placement: Placement,
    topology: Topology,
    card: ModelCard,
    *,
    may_fetch: bool = False,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> Plan | Refusal:
    """What `plan` would say of exactly this placement. A node may hold several of its seats; their needs add up."""

    def refuse(constraint: str, explanation: str, memory: Sequence[SeatMemory] = ()) -> Refusal:
        return explain.refusal(constraint, explanation, placement.node_ids, memory, placement)

    if (placement.model_id, placement.model_digest) != (card.model_id, card.digest):
        return refuse("model", explain.other_model(placement, card))
    if placement.layer_count != card.layer_count:
        return refuse("cut", f"{card.model_id} has {card.layer_count} layers, not {placement.layer_count}.")
    try:
        placement.validate()
    except BadInput as error:
        return refuse("cut", str(error))
    if placement.strategy != "pipeline" or placement.channel != "libp2p" or any(s.ranks > 1 for s in placement.seats):
        return refuse("build", explain.build_runs_only(placement.strategy, placement.channel))
    if (impossible := _context_too_long(card, placement.context_tokens)) is not None:
        return refuse("context", impossible)
    absent = [node_id for node_id in placement.node_ids if node_id not in topology.by_id]
    if absent:
        return refuse("nodes", explain.not_alive(topology, absent))
    nodes = [topology.by_id[node_id] for node_id in placement.node_ids]
    leaving = [node for node in nodes if node.leaving]
    if leaving:
        return refuse("nodes", explain.are_leaving(topology, leaving))
    without = [node for node in nodes if not _holds(node, card)]
    if without and not (may_fetch and any(_holds(node, card) for node in topology.nodes)):
        return refuse("model", explain.without_files(topology, card, without))
    bounds = boundaries(card)
    illegal = [seat.start for seat in placement.seats if seat.start not in bounds]
    if illegal:
        return refuse("cut", explain.illegal_cuts(card, illegal, bounds))
    memory = _memory_in_turn(card, placement, nodes, prefill_chunk_tokens)
    if any(seat.shortfall_bytes for seat in memory):
        return refuse("memory", explain.seats_too_large(topology, memory), memory)
    return _plan(topology, placement, memory, "this placement was asked for")


def _never_possible(topology: Topology, card: ModelCard, workload: Workload) -> Refusal | None:
    """What no choice of nodes could mend."""
    too_long = _context_too_long(card, workload.context_tokens)
    if too_long:
        return explain.refusal("context", too_long)
    if not any(_holds(node, card) for node in topology.nodes):
        return explain.refusal("model", explain.nobody_holds(card, topology))
    return None


def _context_too_long(card: ModelCard, context_tokens: int) -> str | None:
    """Why not, or None. A card whose maximum is 0 does not know it."""
    if not card.max_context_tokens or context_tokens <= card.max_context_tokens:
        return None
    return (
        f"{card.model_id} can use a context of {card.max_context_tokens} tokens at most; {context_tokens} were asked "
        f"for. Lower --context."
    )


def _holds(node: NodeCard, card: ModelCard) -> bool:
    return any((held.model_id, held.digest) == (card.model_id, card.digest) for held in node.models)


def _eligible(
    topology: Topology, card: ModelCard, constraints: Constraints, may_fetch: bool
) -> tuple[list[NodeCard], list[Refusal]]:
    """Nodes that may take part, sorted by id, and why others may not."""
    refusals: list[Refusal] = []
    absent = [node_id for node_id in constraints.nodes if node_id not in topology.by_id]
    if absent:
        refusals.append(explain.refusal("nodes", explain.not_alive(topology, absent), absent))
    allowed = [
        node
        for node in topology.nodes
        if (not constraints.nodes or node.node_id in constraints.nodes) and node.node_id not in constraints.exclude
    ]
    leaving = [node for node in allowed if node.leaving]
    staying = [node for node in allowed if not node.leaving]
    without = [node for node in staying if not may_fetch and not _holds(node, card)]
    if without:
        text = explain.without_files(topology, card, without)
        refusals.append(explain.refusal("model", text, [node.node_id for node in without]))
    if leaving:
        text = explain.are_leaving(topology, leaving)
        refusals.append(explain.refusal("nodes", text, [node.node_id for node in leaving]))
    eligible = [node for node in staying if may_fetch or _holds(node, card)]
    if not eligible and not refusals:
        refusals.append(explain.refusal("nodes", explain.none_allowed(topology, constraints)))
    return eligible, refusals


@dataclass(frozen=True)
class _Problem:
    """One call of `plan`: the nodes that may take part, as rooms, and what has to go into them."""

    topology: Topology
    card: ModelCard
    workload: Workload
    prefill_chunk_tokens: int
    bounds: tuple[int, ...]
    nodes: tuple[NodeCard, ...]
    """Sorted by id; `rooms` and `reach` go with them."""
    rooms: tuple[Room, ...]
    reach: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        topology: Topology,
        card: ModelCard,
        workload: Workload,
        nodes: Sequence[NodeCard],
        prefill_chunk_tokens: int,
    ) -> _Problem:
        needs = {
            wide: RangeNeeds.of(card, workload.context_tokens, workload.concurrency, wide, prefill_chunk_tokens)
            for wide in {node.computes_float32 for node in nodes}
        }
        rooms = tuple(
            Room(needs[node.computes_float32], node.runner_overhead_bytes, node.memory_free_bytes) for node in nodes
        )
        bounds = boundaries(card)
        return cls(
            topology=topology,
            card=card,
            workload=workload,
            prefill_chunk_tokens=prefill_chunk_tokens,
            bounds=bounds,
            nodes=tuple(nodes),
            rooms=rooms,
            reach=tuple(furthest(room, bounds) for room in rooms),
        )

    def choose(self) -> list[Cycle]:
        """Cycles, best first; up to two of them one node larger than needed, to compare."""

        def hop(source: int, target: int) -> int:
            return hop_nanoseconds(self.topology, self.nodes[source].node_id, self.nodes[target].node_id)

        price = [0 if _holds(node, self.card) else FETCH_PRICE for node in self.nodes]
        found = cycles(self.reach, hop, price)
        best = [cycle for cycle in found if len(cycle.order) == len(found[0].order)]
        larger = found[len(best) :][:2]
        wanted = MAX_PLANS if not best or len(best[0].order) <= MAX_PLANS else LONG_PIPELINE_PLANS
        if best and len(best[0].order) == 1:
            best.sort(key=lambda cycle: (cycle.cost, -self.nodes[cycle.order[0]].memory_free_bytes, cycle.order))
        return best[: wanted - len(larger)] + larger

    def plan(self, cycle: Cycle) -> Plan:
        cuts = balanced_cuts([self.rooms[index] for index in cycle.order], self.bounds)
        assert cuts is not None, "a closed cycle fits when every node is filled to the brim"
        placement, memory = self._seat([self.nodes[index] for index in cycle.order], cuts)
        return _plan(self.topology, placement, memory, "")

    def too_small(self) -> list[NodeCard]:
        """Nodes that cannot hold it all, most free memory first."""
        everything = len(self.bounds) - 1
        small = [node for node, reach in zip(self.nodes, self.reach, strict=True) if reach[0] < everything]
        return _by_room(small)

    def too_small_alone(self, node: NodeCard) -> Refusal:
        _, memory = self._seat([node], (0, len(self.bounds) - 1))
        return explain.too_small(self.topology, self.card, node, memory)

    def mesh_too_small(self) -> Refusal:
        """The fairest cut over all nodes that can hold a block at all, with what each of them lacks."""
        everyone = _by_room(self.nodes)
        useful = {
            node.node_id
            for node, reach in zip(self.nodes, self.reach, strict=True)
            if any(end > start for start, end in enumerate(reach))
        }
        parties = [node for node in everyone if node.node_id in useful] or everyone[:1]
        parties = parties[: min(len(self.bounds) - 1, MAX_REFUSALS_PER_NODE)]
        room_of = {node.node_id: room for node, room in zip(self.nodes, self.rooms, strict=True)}
        cuts = balanced_cuts([room_of[node.node_id] for node in parties], self.bounds, must_fit=False)
        assert cuts is not None, "there are at most as many nodes as blocks"
        _, memory = self._seat(parties, cuts)
        text = explain.mesh_too_small(self.topology, self.card, self.workload, memory, everyone)
        return explain.refusal("memory", text, [node.node_id for node in parties], memory)

    def _seat(self, nodes: Sequence[NodeCard], cuts: Sequence[int]) -> tuple[Placement, tuple[SeatMemory, ...]]:
        layers = [self.bounds[cut] for cut in cuts]
        placement = Placement(
            model_id=self.card.model_id,
            model_digest=self.card.digest,
            layer_count=self.card.layer_count,
            strategy="pipeline",
            channel="libp2p",
            context_tokens=self.workload.context_tokens,
            concurrency=self.workload.concurrency,
            seats=tuple(
                Seat(node.node_id, start, end) for node, start, end in zip(nodes, layers[:-1], layers[1:], strict=True)
            ),
        )
        return placement, _memory_in_turn(self.card, placement, nodes, self.prefill_chunk_tokens)


def _by_room(nodes: Sequence[NodeCard]) -> list[NodeCard]:
    """Most free memory first, then id."""
    return sorted(nodes, key=lambda node: (-node.memory_free_bytes, node.node_id))


def _memory_in_turn(
    card: ModelCard, placement: Placement, nodes: Sequence[NodeCard], prefill_chunk_tokens: int
) -> tuple[SeatMemory, ...]:
    """One per seat; a node's later seats find free what its earlier ones leave."""
    by_id = {node.node_id: node for node in nodes}
    free = {node.node_id: node.memory_free_bytes for node in nodes}
    out: list[SeatMemory] = []
    for index, seat in enumerate(placement.seats):
        memory = seat_memory(card, placement, index, by_id[seat.node_id], prefill_chunk_tokens)
        memory = replace(memory, free_bytes=free[seat.node_id])
        free[seat.node_id] = max(0, free[seat.node_id] - memory.need_bytes)
        out.append(memory)
    return tuple(out)


def _plan(topology: Topology, placement: Placement, memory: tuple[SeatMemory, ...], reason: str) -> Plan:
    order = [seat.node_id for seat in placement.seats]
    return Plan(
        placement=placement,
        memory=memory,
        topology_digest=topology.digest,
        predicted_hop_seconds=cycle_nanoseconds(topology, order) / 1e9,
        binds=explain.binds(topology, placement, memory),
        reason=reason,
    )
