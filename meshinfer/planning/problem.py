"""One planning problem: the nodes that may take part, as holders, with the links between them.

Everything a search asks for is here, looked up when it is first asked: a thousand nodes have a million
links, and a plan looks at a few thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from meshinfer.base.ids import NodeId
from meshinfer.planning.holders import Candidate, Holder, Holders, best_ring, slowest_of_ring
from meshinfer.planning.measured import UNMEASURED_BANDWIDTH, UNMEASURED_DISK, LinkRates, link_rates, node_rates
from meshinfer.planning.memory import Room, seat_memory
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.partition import boundaries
from meshinfer.planning.plan import SeatMemory
from meshinfer.planning.terms import way
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology, quantise
from meshinfer.topology.placement import Placement, Seat, Strategy
from meshinfer.topology.speed import LinkSpeed


def holds(node: NodeCard, card: ModelCard) -> bool:
    """Whether it has the model's files, of this digest."""
    return any((held.model_id, held.digest) == (card.model_id, card.digest) for held in node.models)


class Problem:
    """Nodes by index, sorted by id.

    Args:
        topology: of all live nodes.
        card: the model.
        workload: what to reserve and to optimise for.
        constraints: what the operator wants of single nodes.
        nodes: that may take part.
        prefill_chunk_tokens: of the nodes' settings.
    """

    def __init__(
        self,
        topology: Topology,
        card: ModelCard,
        workload: Workload,
        constraints: Constraints,
        nodes: Sequence[NodeCard],
        prefill_chunk_tokens: int,
    ) -> None:
        self.topology = topology
        self.card = card
        self.workload = workload
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.bounds = boundaries(card)
        self.nodes = tuple(nodes)
        self.maker = Holders(card, workload, self.bounds, prefill_chunk_tokens)
        self.terms = self.maker.terms
        self._layers = dict(constraints.layers)
        self._candidates: dict[int, Candidate] = {}
        self._holders: dict[int, Holder] = {}
        self._links: dict[tuple[int, int], LinkRates] = {}
        self._hops: dict[tuple[int, int, bool], int] = {}

    @property
    def required(self) -> int:
        """Nodes (bit set) that the operator wants in the plan."""
        return sum(1 << index for index, node in enumerate(self.nodes) if node.node_id in self._layers)

    # --- nodes ----------------------------------------------------------------------------------

    def candidate(self, index: int) -> Candidate:
        if index not in self._candidates:
            node = self.nodes[index]
            self._candidates[index] = Candidate(
                index=index,
                rates=node_rates(node, self.card),
                computes_float32=node.computes_float32,
                overhead_bytes=node.runner_overhead_bytes,
                free_bytes=node.memory_free_bytes,
                fetch_bytes_per_second=0.0 if holds(node, self.card) else self._fetch_rates.get(node.node_id, 0.0),
                layers=self._layers.get(node.node_id, 0),
            )
        return self._candidates[index]

    def room(self, index: int) -> Room:
        return self.maker.room(self.candidate(index))

    def holder(self, index: int) -> Holder:
        """The node as a stage of its own."""
        if index not in self._holders:
            self._holders[index] = self.maker.node(self.candidate(index))
        return self._holders[index]

    def group(self, members: Sequence[int]) -> Holder:
        """These nodes as a tensor group, in the order of their quickest ring."""
        links = {(a, b): self.link(a, b).speed for a in members for b in members if a != b}
        wide = any(self.nodes[index].computes_float32 for index in members)
        message = self.terms.batch * self.maker.work(wide).activation_bytes_per_token
        ring = best_ring(members, links, message)
        return self.maker.group([self.candidate(index) for index in ring], slowest_of_ring(ring, links))

    @cached_property
    def _fetch_rates(self) -> dict[NodeId, float]:
        """Bytes per second at which nodes without the files would get them from the quickest peer that has them.

        No quicker than a disk takes them, however quick the link.
        """
        having = {node.node_id for node in self.topology.nodes if holds(node, self.card)}
        rates = {node.node_id: UNMEASURED_BANDWIDTH for node in self.nodes}
        for link in self.topology.links:
            if link.source in having and link.target in rates and link.bandwidth_bytes_per_second:
                rates[link.target] = max(rates[link.target], quantise(link.bandwidth_bytes_per_second))
        return {node_id: min(rate, UNMEASURED_DISK) for node_id, rate in rates.items()}

    # --- links ----------------------------------------------------------------------------------

    def link(self, source: int, target: int) -> LinkRates:
        key = source, target
        if key not in self._links:
            self._links[key] = link_rates(self.topology, self.nodes[source].node_id, self.nodes[target].node_id)
        return self._links[key]

    def hop(self, before: Holder, after: Holder) -> int:
        """J of the activations between two stages."""
        if len(before.nodes) == len(after.nodes) == 1:
            return self._hop(before.nodes[0], after.nodes[0], self._is_wide(before))
        return self._hop(*self._way(before, after), self._is_wide(before))

    def transfer(self, before: Holder, after: Holder) -> int:
        """How long a prefill chunk keeps the link busy."""
        work = self.maker.work(self._is_wide(before))
        return self.terms.transfer(self.link(*self._way(before, after)).speed, work)

    def back(self, last: Holder, first: Holder) -> int:
        """J of the tokens' way to the head."""

        def price(source: int, target: int) -> int:
            return self.terms.back(self.link(source, target).speed)

        return price(*way(last.nodes, first.nodes, price))

    def _way(self, before: Holder, after: Holder) -> tuple[int, int]:
        wide = self._is_wide(before)
        return way(before.nodes, after.nodes, lambda source, target: self._hop(source, target, wide))

    def _hop(self, source: int, target: int, wide: bool) -> int:
        key = source, target, wide
        if key not in self._hops:
            self._hops[key] = self.terms.hop(self.link(source, target).speed, self.maker.work(wide))
        return self._hops[key]

    def _is_wide(self, stage: Holder) -> bool:
        """Whether its activations are float32: those of its widest rank."""
        return any(self.nodes[index].computes_float32 for index in stage.nodes)

    # --- placements -----------------------------------------------------------------------------

    def placement(self, stages: Sequence[Holder], positions: Sequence[int]) -> Placement:
        """`stages` with their cuts (indices into the boundaries)."""
        layers = [self.bounds[position] for position in positions]
        seats = [
            Seat(self.nodes[index].node_id, start, end, rank, len(stage.nodes))
            for stage, start, end in zip(stages, layers[:-1], layers[1:], strict=True)
            for rank, index in enumerate(stage.nodes)
        ]
        grouped = any(len(stage.nodes) > 1 for stage in stages)
        strategy: Strategy = "pipeline" if not grouped else "tensor" if len(stages) == 1 else "hybrid"
        return Placement(
            model_id=self.card.model_id,
            model_digest=self.card.digest,
            layer_count=self.card.layer_count,
            strategy=strategy,
            channel="mlx-ring" if grouped else "libp2p",
            context_tokens=self.workload.context_tokens,
            concurrency=self.workload.concurrency,
            seats=tuple(seats),
        )


def memory_in_turn(
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


def slowest_link(rates: Sequence[LinkRates]) -> tuple[LinkSpeed, str]:
    """The worst of each property of a ring's links, and what of it is assumed."""
    return (
        LinkSpeed(
            max(each.speed.latency_seconds for each in rates),
            min(each.speed.bandwidth_bytes_per_second for each in rates),
            max(each.speed.message_seconds for each in rates),
        ),
        next((each.assumed for each in rates if each.assumed), ""),
    )
