"""Other ways to place layers, the true optimum, and what each would do on a phantom's truth.

The rivals decide as the programs do that they are named after, from the same measurements as we do; all are
judged by the phantom's true speeds and links, with our cost model and our count of memory. Where a rival's
own rule gives a node more than it can hold, it is given its next best choice rather than nothing, and where its
rule would cut a model in a place where it has no cut, the nearest legal one counts.

| planner | rule |
|---|---|
| ours | `planning.planner.plan` |
| optimum | all orders of all sets of nodes, each with its quickest cuts, on the truth |
| memory | exo's: the fewest nodes that hold it, those with most memory; layers in proportion to free memory |
| even | mlx-lm's: all nodes, as many layers each |
| flops | cake's: all nodes, layers in proportion to arithmetic, as far as memory goes; the rest moves on |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

from meshinfer.base.ids import NodeId
from meshinfer.planning import cost
from meshinfer.planning.choice import Choice
from meshinfer.planning.memory import PREFILL_CHUNK_TOKENS, seat_memory
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.partition import boundaries
from meshinfer.planning.planner import plan
from meshinfer.planning.problem import Problem
from meshinfer.planning.quickest import quickest_cuts
from meshinfer.planning.work import model_work
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing.phantoms import Phantom
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement, Seat

OPTIMUM_NODES = 6
"""Up to here the optimum is computed: 1,957 orders. With one node more it is 13,700."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one planner's placement would do."""

    planner: str
    placement: Placement
    request_seconds: float
    """A typical request, alone."""
    house_seconds: float
    """All sessions at once."""
    ttft_seconds: float
    tokens_per_second: float
    """Of one stream while it decodes."""


Rival = Callable[[Topology, ModelCard, Workload], Placement | None]


def compare(
    phantom: Phantom, measured: Topology, card: ModelCard, workload: Workload, *, optimum: bool = True
) -> list[Outcome]:
    """Every planner that finds a placement; each planned on `measured` and is judged by `phantom`."""
    outcomes: list[Outcome] = []
    for name, rival in PLANNERS.items():
        placement = rival(measured, card, workload)
        if placement is not None:
            outcomes.append(judge(name, phantom, card, workload, placement))
    if optimum and len(phantom.nodes) <= OPTIMUM_NODES:
        best = by_all_orders(phantom.topology, card, workload)
        if best is not None:
            outcomes.append(judge("optimum", phantom, card, workload, best))
    return outcomes


def judge(name: str, phantom: Phantom, card: ModelCard, workload: Workload, placement: Placement) -> Outcome:
    """What `placement`, a pipeline, would do in truth."""
    prompt, output = workload.typical
    order = [seat.node_id for seat in placement.seats]
    hops = [phantom.link(*pair) for pair in pairwise((*order, order[0]))] if len(order) > 1 else []
    told = cost.predict(
        model_work(card, computes_float32=False),
        [cost.Stage(seat.start, seat.end, (phantom.speeds[seat.node_id],)) for seat in placement.seats],
        hops,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=workload.concurrency,
        chunk_tokens=PREFILL_CHUNK_TOKENS,
    )
    return Outcome(name, placement, told.request_seconds, told.house_seconds, told.ttft_seconds, 1 / told.tpot_seconds)


# --- planners -------------------------------------------------------------------------------------


def ours(topology: Topology, card: ModelCard, workload: Workload) -> Placement | None:
    preview = plan(topology, card, workload, Constraints())
    return preview.plans[0].placement if preview.plans else None


def by_all_orders(topology: Topology, card: ModelCard, workload: Workload) -> Placement | None:
    """The optimum: nothing is left out but cuts that are slower for their order."""
    problem = Problem(topology, card, workload, Constraints(), topology.nodes, PREFILL_CHUNK_TOKENS)
    further = problem.terms.further_chunks
    best: Choice | None = None
    for size in range(1, len(problem.nodes) + 1):
        for order in permutations(range(len(problem.nodes)), size):
            stages = [problem.holder(index) for index in order]
            pairs = list(pairwise(stages))
            hops = sum(problem.hop(*pair) for pair in pairs)
            hops += problem.back(stages[-1], stages[0]) if pairs else 0
            slowest = max((problem.transfer(*pair) for pair in pairs), default=0) if further else 0
            cuts = quickest_cuts(stages, hops, slowest, further)
            if cuts is not None and (best is None or cuts.cost < best.cuts.cost):
                best = Choice(tuple(stages), cuts)
    return problem.placement(best.stages, best.cuts.positions) if best else None


def by_memory(topology: Topology, card: ModelCard, workload: Workload) -> Placement | None:
    """The fewest nodes, those with most memory; layers in proportion to it."""
    largest = sorted(topology.nodes, key=lambda node: (-node.memory_free_bytes, node.node_id))
    for count in range(1, min(len(largest), card.layer_count) + 1):
        nodes = sorted(largest[:count], key=lambda node: node.node_id)
        layers = in_proportion(card.layer_count, [node.memory_free_bytes for node in nodes])
        if fits(placement := _placement(card, workload, nodes, layers), topology, card):
            return placement
    return None


def evenly(topology: Topology, card: ModelCard, workload: Workload) -> Placement | None:
    """All nodes, or all but the smallest of them, with equal parts."""
    largest = sorted(topology.nodes, key=lambda node: (-node.memory_free_bytes, node.node_id))
    for count in range(min(len(largest), card.layer_count), 0, -1):
        nodes = sorted(largest[:count], key=lambda node: node.node_id)
        layers = in_proportion(card.layer_count, [1] * count)
        if fits(placement := _placement(card, workload, nodes, layers), topology, card):
            return placement
    return None


def by_flops(topology: Topology, card: ModelCard, workload: Workload) -> Placement | None:
    """All nodes in proportion to arithmetic; what a node has no memory for goes to those that have."""
    nodes = list(topology.nodes)
    while nodes:
        flops = [int(max((each.speed.flops_per_second for each in node.speeds), default=1.0)) for node in nodes]
        layers = in_proportion(card.layer_count, flops)
        for _ in range(card.layer_count):
            placement = _placement(card, workload, nodes, layers)
            if fits(placement, topology, card):
                return placement
            if len(placement.seats) < len(nodes):
                break
            over = _shortfalls(placement, topology, card)
            full = max(range(len(nodes)), key=lambda index: (over[index], index))
            room = min(range(len(nodes)), key=lambda index: (over[index], index))
            if over[full] <= 0 or over[room] >= 0 or layers[full] <= 1:
                break
            layers[full], layers[room] = layers[full] - 1, layers[room] + 1
        nodes.remove(min(nodes, key=lambda node: (node.memory_free_bytes, node.node_id)))
    return None


PLANNERS: dict[str, Rival] = {"ours": ours, "memory": by_memory, "even": evenly, "flops": by_flops}


def in_proportion(count: int, weights: Sequence[int]) -> list[int]:
    """`count` layers by `weights`, at least one each, the largest remainders rounded up."""
    total = max(1, sum(weights))
    shares = [max(1, count * weight // total) for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda index: (-(count * weights[index] % total), index))
    place = 0
    while sum(shares) < count:
        shares[by_remainder[place % len(shares)]] += 1
        place += 1
    while sum(shares) > count:
        shares[max(range(len(shares)), key=lambda index: (shares[index], index))] -= 1
    return shares


def fits(placement: Placement, topology: Topology, card: ModelCard) -> bool:
    return max(_shortfalls(placement, topology, card)) <= 0


def _shortfalls(placement: Placement, topology: Topology, card: ModelCard) -> list[int]:
    """Per seat, bytes that it needs beyond what is free; negative where there is room."""
    memories = (
        seat_memory(card, placement, index, topology.by_id[seat.node_id], PREFILL_CHUNK_TOKENS)
        for index, seat in enumerate(placement.seats)
    )
    return [memory.need_bytes - memory.free_bytes for memory in memories]


def _placement(card: ModelCard, workload: Workload, nodes: Sequence[NodeCard], layers: Sequence[int]) -> Placement:
    cuts = _legal(boundaries(card), list(accumulate(layers)))
    seats = [
        Seat(NodeId(node.node_id), start, end)
        for node, (start, end) in zip(nodes, pairwise((0, *cuts)), strict=True)
        if end > start
    ]
    return Placement(
        card.model_id, card.digest, card.layer_count, "pipeline", "libp2p",
        workload.context_tokens, workload.concurrency, tuple(seats),
    )  # fmt: skip


def _legal(bounds: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The nearest legal end of each stage; a stage may be left with nothing."""
    return [min(bounds, key=lambda bound: (abs(bound - end), bound)) for end in ends]
