"""From a topology, a model card and a workload to plans, best first, and refusals with their numbers.

    nodes that may take part ─► what they cost and hold ─► orders ─► cuts ─► plans, compared by J
    (alive, allowed, has files)   (problem, holders)       (choice, orders)   (quickest)

What is best is the objective's to say (`terms` has the formula): `latency` (one typical request), `throughput`
(all sessions at once) or `fit` (the fewest nodes, the shortest way round, the most headroom). A node joins only
if J falls by it; one that would not is declined, with the numbers. Among equally quick cuts the one with
most headroom wins. What runs already stays, unless J falls by more than the hysteresis.

Tensor and hybrid candidates are priced by the same terms and come back as refusals: the runners of this
build cannot run them yet.

Pure and deterministic to the bit: nodes sorted by id, measurements quantised, searches in integers, no clock,
no dice. Any node computes the same preview from the same topology, so which one plans is never a matter
of correctness. Memory that a card says is promised counts as taken; a caller who repairs or replaces an
instance first gives back, in the topology that it passes, what the instance's seats hold.

Manual placements go through the same checks (`validate_placement`), and a node that is asked for a
lease recomputes its seat's need with the same `seat_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from meshinfer.base.errors import BadInput
from meshinfer.base.ids import NodeId
from meshinfer.planning import explain
from meshinfer.planning.choice import Choice, quickest, quickest_with_groups
from meshinfer.planning.cost import worth_moving
from meshinfer.planning.groups import groups
from meshinfer.planning.holders import Holder
from meshinfer.planning.hops import hop_nanoseconds
from meshinfer.planning.less_context import context_that_fits
from meshinfer.planning.measured import link_rates, node_rates
from meshinfer.planning.memory import PREFILL_CHUNK_TOKENS, seat_memory
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.partition import balanced_cuts, boundaries
from meshinfer.planning.plan import Declined, Plan, Preview, Refusal, SeatMemory
from meshinfer.planning.prediction import HopAt, Prediction, StageAt, predict
from meshinfer.planning.problem import Problem, holds, memory_in_turn, slowest_link
from meshinfer.planning.quickest import cuts_near, with_headroom
from meshinfer.planning.search import cycles
from meshinfer.planning.terms import Terms, picoseconds, way
from meshinfer.planning.work import model_work
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement, Seat

__all__ = ["plan", "predict_placement", "seat_memory", "validate_placement"]

MAX_PLANS = 8
"""More candidates than that to lease, and the view is stale: plan anew instead."""
LONG_PIPELINE_PLANS = 4
"""Beyond 8 stages: the alternatives differ in one node of many, and each takes some milliseconds to cut and price."""
MAX_REFUSALS_PER_NODE = 16
"""Single nodes that do not fit alone, largest first; a page of them tells a person nothing more."""
MAX_DECLINED = 8
"""Nodes whose part is priced to say that they add nothing, the quickest first."""
PLACES_TRIED = 2
"""In the pipeline, those that cost the least way."""
FETCH_PRICE = 10**15
"""With `fit`: what a node without the files costs, in the currency of link time: more than any sum of hops, so that
nodes that hold the files always win among equally many."""


def plan(
    topology: Topology,
    card: ModelCard,
    workload: Workload,
    constraints: Constraints,
    *,
    may_fetch: bool = False,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    running: Placement | None = None,
) -> Preview:
    """All candidates for this model, the choice first.

    Args:
        topology: the live nodes and what they say of themselves.
        card: the model; nodes take part that hold its files with the card's digest.
        workload: what to reserve and to optimise for.
        constraints: what the operator allows and wants.
        may_fetch: also nodes that would have to fetch the files from a peer first.
        prefill_chunk_tokens: of the nodes' settings; the activation peak depends on it.
        running: a placement of this model that is loaded; it stays the choice unless another is better by more
            than `cost.HYSTERESIS`. The topology counts its memory as free.
    """
    impossible = _never_possible(topology, card, workload)
    if impossible:
        return Preview((), (impossible,))
    topology = _limited(topology, constraints)
    nodes, refusals = _eligible(topology, card, constraints, may_fetch)
    if not nodes:
        return Preview((), tuple(refusals))
    problem = Problem(topology, card, workload, constraints, nodes, prefill_chunk_tokens)
    tight = [_too_small_alone(problem, node) for node in _too_small(problem)[:MAX_REFUSALS_PER_NODE]]
    # To fit, where the operator has set the layers, is no more than that.
    chosen = [] if workload.objective == "fit" and not constraints.layers else _quickest(problem)
    if not chosen and not constraints.layers:
        # The neighbourhoods of a large mesh may lack what the whole of it has, if only just.
        chosen = _fitting(problem)
    if not chosen:
        if len(problem.bounds) == 2:
            fitting = _context_that_fits(problem)
            why = explain.cannot_be_cut(topology, card, [seat for each in tight for seat in each.memory], fitting)
        elif constraints.layers:
            why = explain.refusal("layers", explain.layers_cannot_be(topology, card, constraints))
        else:
            why = _mesh_too_small(problem)
        return Preview((), (why, *refusals, *tight))
    plans = [_plan_of(problem, stages, positions) for stages, positions in chosen]
    stays = running and _kept(running, plans, topology, card, workload, prefill_chunk_tokens)
    if stays:
        plans = [stays, *(each for each in plans if each.placement != stays.placement)][:MAX_PLANS]
    reasons = explain.reasons(topology, card, plans, tight, is_running=bool(stays))
    grouped = _grouped(problem, plans[0])
    return Preview(
        tuple(replace(each, reason=reason) for each, reason in zip(plans, reasons, strict=True)),
        tuple(tight + refusals + grouped)[:64],
        () if workload.objective == "fit" else _declined(problem, plans[0]),
    )


def validate_placement(
    placement: Placement,
    topology: Topology,
    card: ModelCard,
    *,
    may_fetch: bool = False,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    workload: Workload | None = None,
) -> Plan | Refusal:
    """What `plan` would say of exactly this placement. A node may hold several of its seats; their needs add up.

    `workload` says what to predict for; its context and concurrency are the placement's.
    """

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
    if (impossible := _context_too_long(card, placement.context_tokens)) is not None:
        return refuse("context", impossible)
    absent = [node_id for node_id in placement.node_ids if node_id not in topology.by_id]
    if absent:
        return refuse("nodes", explain.not_alive(topology, absent))
    nodes = [topology.by_id[node_id] for node_id in placement.node_ids]
    leaving = [node for node in nodes if node.takes_nothing]
    if leaving:
        return refuse("nodes", explain.are_leaving(topology, leaving))
    without = [node for node in nodes if not holds(node, card)]
    if without and not (may_fetch and any(holds(node, card) for node in topology.nodes)):
        return refuse("model", explain.without_files(topology, card, without))
    bounds = boundaries(card)
    illegal = [seat.start for seat in placement.seats if seat.start not in bounds]
    if illegal:
        return refuse("cut", explain.illegal_cuts(card, illegal, bounds))
    degrees = {seat.ranks for seat in placement.seats if seat.ranks > 1}
    if degrees and not degrees <= set(card.tensor_degrees):
        return refuse("tensor", explain.illegal_degrees(card, sorted(degrees)))
    memory = memory_in_turn(card, placement, nodes, prefill_chunk_tokens)
    if any(seat.shortfall_bytes for seat in memory):
        return refuse("memory", explain.seats_too_large(topology, memory), memory)
    usual = workload or Workload()
    usual = replace(usual, context_tokens=placement.context_tokens, concurrency=placement.concurrency)
    prediction = predict_placement(placement, topology, card, usual, prefill_chunk_tokens)
    if placement.strategy != "pipeline" or placement.channel != "libp2p" or degrees:
        refusal = refuse("build", explain.build_runs_only(placement.strategy, placement.channel), memory)
        return replace(refusal, prediction=prediction)
    return _plan(topology, placement, memory, prediction, "this placement was asked for")


def predict_placement(
    placement: Placement,
    topology: Topology,
    card: ModelCard,
    workload: Workload,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> Prediction:
    """What a valid placement on live nodes would do."""
    works = {wide: model_work(card, wide) for wide in {node.computes_float32 for node in topology.nodes}}
    stages: list[StageAt] = []
    index = 0
    while index < len(placement.seats):
        seats = placement.seats[index : index + placement.seats[index].ranks]
        index += len(seats)
        nodes = [topology.by_id[seat.node_id] for seat in seats]
        ring = [seat.node_id for seat in seats]
        inner, assumed = None, ""
        if len(ring) > 1:
            around = zip(ring, (*ring[1:], ring[0]), strict=True)
            inner, assumed = slowest_link([link_rates(topology, a, b) for a, b in around])
        stages.append(
            StageAt(
                start=seats[0].start,
                end=seats[0].end,
                nodes=tuple(ring),
                rates=tuple(node_rates(node, card) for node in nodes),
                inner=inner,
                inner_assumed=assumed,
                work=works[any(node.computes_float32 for node in nodes)],
            )
        )
    terms = Terms.of(workload, prefill_chunk_tokens)

    def there(before: StageAt) -> Callable[[NodeId, NodeId], int]:
        return lambda a, b: terms.hop(link_rates(topology, a, b).speed, before.work)

    def back(source: NodeId, target: NodeId) -> int:
        return terms.back(link_rates(topology, source, target).speed)

    ways = [way(before.nodes, after.nodes, there(before)) for before, after in pairwise(stages)]
    if ways:
        ways.append(way(stages[-1].nodes, stages[0].nodes, back))
    hops = [HopAt(source, target, link_rates(topology, source, target)) for source, target in ways]
    return predict(stages, hops, workload, prefill_chunk_tokens)


# --- who may take part --------------------------------------------------------------------------


def _never_possible(topology: Topology, card: ModelCard, workload: Workload) -> Refusal | None:
    """What no choice of nodes could mend."""
    too_long = _context_too_long(card, workload.context_tokens)
    if too_long:
        return explain.refusal("context", too_long)
    if not any(holds(node, card) for node in topology.nodes):
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


def _limited(topology: Topology, constraints: Constraints) -> Topology:
    """`topology` with the operator's memory limits as if the nodes had no more."""
    limits = dict(constraints.memory_limits)
    if not limits:
        return topology
    cards = [
        replace(node, memory_usable_bytes=min(node.memory_usable_bytes, limits.get(node.node_id, 2**63 - 1)))
        for node in topology.nodes
    ]
    return Topology.of(cards, topology.links)


def _eligible(
    topology: Topology, card: ModelCard, constraints: Constraints, may_fetch: bool
) -> tuple[list[NodeCard], list[Refusal]]:
    """Nodes that may take part, sorted by id, and why others may not."""
    refusals: list[Refusal] = []
    wanted = [node_id for node_id, _ in constraints.layers]
    absent = [node_id for node_id in (*constraints.nodes, *wanted) if node_id not in topology.by_id]
    if absent:
        refusals.append(explain.refusal("nodes", explain.not_alive(topology, absent), absent))
    allowed = [
        node
        for node in topology.nodes
        if (not constraints.nodes or node.node_id in constraints.nodes) and node.node_id not in constraints.exclude
    ]
    leaving = [node for node in allowed if node.takes_nothing]
    staying = [node for node in allowed if not node.takes_nothing]
    without = [node for node in staying if not may_fetch and not holds(node, card)]
    if without:
        text = explain.without_files(topology, card, without)
        refusals.append(explain.refusal("model", text, [node.node_id for node in without]))
    if leaving:
        text = explain.are_leaving(topology, leaving)
        refusals.append(explain.refusal("nodes", text, [node.node_id for node in leaving]))
    eligible = [node for node in staying if may_fetch or holds(node, card)]
    if not eligible and not refusals:
        refusals.append(explain.refusal("nodes", explain.none_allowed(topology, constraints)))
    if missing := set(wanted) - {node.node_id for node in eligible}:
        if not refusals:
            text = f"{explain.names(topology, sorted(missing))} cannot take part, but --layers wants it."
            refusals.append(explain.refusal("nodes", text, sorted(missing)))
        return [], refusals
    return eligible, refusals


# --- the choice ---------------------------------------------------------------------------------


def _quickest(problem: Problem) -> list[tuple[tuple[Holder, ...], tuple[int, ...]]]:
    """Stages and cuts, best first; among equally quick ones the roomier first."""
    found = quickest(problem)
    if not found:
        return []
    count = LONG_PIPELINE_PLANS if len(found[0].stages) > MAX_PLANS else MAX_PLANS
    alone = [choice for choice in found if len(choice.stages) == 1][:2]
    first = [choice for choice in found[: count + 2] if choice not in alone][: count - len(alone)]
    tied = [_with_headroom(problem, choice) for choice in found if choice.cuts.cost == found[0].cuts.cost][:MAX_PLANS]
    same = {choice.members: choice for choice in tied}
    listed = [same.get(choice.members, choice) for choice in (*first, *alone)]
    listed.sort(key=lambda choice: (choice.cuts.cost, _fullest(problem, choice), choice.key))
    return [(choice.stages, choice.cuts.positions) for choice in listed]


def _with_headroom(problem: Problem, choice: Choice) -> Choice:
    if len(choice.stages) == 1:
        return choice
    rooms = [problem.room(stage.nodes[0]) for stage in choice.stages]
    bounds = problem.bounds

    def share(place: int, start: int, end: int) -> int:
        return rooms[place].share(bounds[start], bounds[end])

    return Choice(choice.stages, with_headroom(choice.stages, choice.cuts, share, problem.terms.further_chunks))


def _fullest(problem: Problem, choice: Choice) -> int:
    bounds, positions = problem.bounds, choice.cuts.positions
    return max(
        problem.room(stage.nodes[0]).share(bounds[start], bounds[end])
        for stage, start, end in zip(choice.stages, positions[:-1], positions[1:], strict=True)
    )


def _fitting(problem: Problem) -> list[tuple[tuple[Holder, ...], tuple[int, ...]]]:
    """Fewest nodes first, then the shortest way round, then headroom; two of one node more to compare."""
    nodes = range(len(problem.nodes))

    def hop(source: int, target: int) -> int:
        return hop_nanoseconds(problem.topology, problem.nodes[source].node_id, problem.nodes[target].node_id)

    price = [0 if holds(node, problem.card) else FETCH_PRICE for node in problem.nodes]
    found = cycles([problem.holder(index).latest for index in nodes], hop, price)
    found = [each for each in found if not problem.required & ~sum(1 << index for index in each.order)]
    best = [cycle for cycle in found if len(cycle.order) == len(found[0].order)]
    larger = found[len(best) :][:2]
    count = MAX_PLANS if not best or len(best[0].order) <= MAX_PLANS else LONG_PIPELINE_PLANS
    if best and len(best[0].order) == 1:
        best.sort(key=lambda cycle: (cycle.cost, -problem.nodes[cycle.order[0]].memory_free_bytes, cycle.order))
    chosen: list[tuple[tuple[Holder, ...], tuple[int, ...]]] = []
    for cycle in best[: count - len(larger)] + larger:
        cuts = balanced_cuts([problem.room(index) for index in cycle.order], problem.bounds)
        assert cuts is not None, "a closed cycle fits when every node is filled to the brim"
        chosen.append((tuple(problem.holder(index) for index in cycle.order), cuts))
    return chosen


def _kept(
    running: Placement,
    plans: Sequence[Plan],
    topology: Topology,
    card: ModelCard,
    workload: Workload,
    prefill_chunk_tokens: int,
) -> Plan | None:
    """The running placement as a plan, unless it cannot be any more, reserves too little, or is clearly beaten."""
    if running.context_tokens < workload.context_tokens or running.concurrency < workload.concurrency:
        return None
    verdict = validate_placement(
        running, topology, card, may_fetch=True, prefill_chunk_tokens=prefill_chunk_tokens, workload=workload
    )
    if not isinstance(verdict, Plan):
        return None
    assert verdict.prediction is not None
    assert plans[0].prediction is not None
    now, then = verdict.prediction.objective_seconds, plans[0].prediction.objective_seconds
    return None if worth_moving(now, then) else verdict


def _plan_of(problem: Problem, stages: Sequence[Holder], positions: Sequence[int]) -> Plan:
    placement = problem.placement(stages, positions)
    memory = memory_in_turn(problem.card, placement, problem.nodes, problem.prefill_chunk_tokens)
    prediction = predict_placement(
        placement, problem.topology, problem.card, problem.workload, problem.prefill_chunk_tokens
    )
    return _plan(problem.topology, placement, memory, prediction, "")


def _plan(
    topology: Topology, placement: Placement, memory: tuple[SeatMemory, ...], prediction: Prediction, reason: str
) -> Plan:
    return Plan(
        placement=placement,
        memory=memory,
        topology_digest=topology.digest,
        predicted_hop_seconds=sum(hop.seconds for hop in prediction.hops),
        binds=explain.binds(topology, memory, prediction),
        reason=reason,
        prediction=prediction,
    )


# --- the others ---------------------------------------------------------------------------------


def _declined(problem: Problem, choice: Plan) -> tuple[Declined, ...]:
    """Nodes that are free to take part and would slow the choice, each at its best place in it."""
    taking_part = set(choice.placement.node_ids)
    index_of = {node.node_id: index for index, node in enumerate(problem.nodes)}
    order = [problem.holder(index_of[node_id]) for node_id in choice.placement.node_ids if node_id in index_of]
    if len(order) != len(choice.placement.seats):
        return ()
    idle = [index for index, node in enumerate(problem.nodes) if node.node_id not in taking_part]
    idle.sort(key=lambda index: (problem.holder(index).run[-1], index))
    out: list[Declined] = []
    assert choice.prediction is not None
    # Another node can only lower the bottleneck; where it would not help, it is about what it is now.
    level = float(picoseconds(max(stage.chunk_seconds for stage in choice.prediction.stages)))
    for index in idle[:MAX_DECLINED]:
        best: Choice | None = None
        ways = [(*order[:place], problem.holder(index), *order[place:]) for place in range(len(order) + 1)]
        ranked = sorted((_hops(problem, stages), place) for place, stages in enumerate(ways))
        for hops, place in ranked[:PLACES_TRIED]:
            slowest = (
                max(problem.transfer(*pair) for pair in pairwise(ways[place])) if problem.terms.further_chunks else 0
            )
            cuts = cuts_near(ways[place], hops, slowest, problem.terms.further_chunks, level)
            if cuts is not None and (best is None or cuts.cost < best.cuts.cost):
                best = Choice(ways[place], cuts)
        if best is not None:
            with_it = _plan_of(problem, best.stages, best.cuts.positions).prediction
            assert with_it is not None
            out.append(explain.declined(problem.topology, problem.nodes[index], choice.prediction, with_it))
    return tuple(out)


def _hops(problem: Problem, stages: Sequence[Holder]) -> int:
    return sum(problem.hop(*pair) for pair in pairwise(stages)) + problem.back(stages[-1], stages[0])


def _grouped(problem: Problem, choice: Plan) -> list[Refusal]:
    """The best tensor and hybrid candidates, which this build cannot run."""
    if len(problem.nodes) < 2:
        return []
    if not problem.card.tensor_degrees:
        text = explain.cannot_be_sharded(problem.card)
        return [Refusal("tensor", "mlx-ring", tuple(node.node_id for node in problem.nodes)[:256], "tensor", text)]
    candidates = groups(problem)
    singles = [problem.holder(index) for index in sorted({i for group in candidates for i in group.nodes})]
    if len(problem.nodes) <= 8:
        singles = [problem.holder(index) for index in range(len(problem.nodes))]
    out: list[Refusal] = []
    for least_stages in (1, 2):
        found = quickest_with_groups(problem, candidates, singles, least_stages)
        if found:
            best = _plan_of(problem, found[0].stages, found[0].cuts.positions)
            out.append(explain.grouped(best, choice))
    return out


def _too_small(problem: Problem) -> list[NodeCard]:
    """Nodes that cannot hold it all, most free memory first."""
    everything = problem.card.layer_count
    small = [node for index, node in enumerate(problem.nodes) if not problem.room(index).fits(0, everything)]
    return _by_room(small)


def _too_small_alone(problem: Problem, node: NodeCard) -> Refusal:
    _, memory = _seat(problem, [node], (0, len(problem.bounds) - 1))
    return explain.too_small(problem.topology, problem.card, node, memory)


def _mesh_too_small(problem: Problem) -> Refusal:
    """The fairest cut over all nodes that can hold a block at all, with what each of them lacks."""
    everyone = _by_room(problem.nodes)
    useful = {
        node.node_id
        for index, node in enumerate(problem.nodes)
        if any(end > start for start, end in enumerate(problem.holder(index).latest))
    }
    parties = [node for node in everyone if node.node_id in useful] or everyone[:1]
    parties = parties[: min(len(problem.bounds) - 1, MAX_REFUSALS_PER_NODE)]
    room_of = {node.node_id: problem.room(index) for index, node in enumerate(problem.nodes)}
    cuts = balanced_cuts([room_of[node.node_id] for node in parties], problem.bounds, must_fit=False)
    assert cuts is not None, "there are at most as many nodes as blocks"
    _, memory = _seat(problem, parties, cuts)
    fitting = _context_that_fits(problem)
    text = explain.mesh_too_small(problem.topology, problem.card, problem.workload, memory, everyone, fitting)
    return explain.refusal("memory", text, [node.node_id for node in parties], memory)


def _context_that_fits(problem: Problem) -> int:
    # With less, also nodes have room for a part that have none for any now.
    nodes = _by_room(problem.nodes)[:MAX_REFUSALS_PER_NODE]
    return context_that_fits(problem.card, problem.workload, nodes, problem.prefill_chunk_tokens)


def _seat(problem: Problem, nodes: Sequence[NodeCard], cuts: Sequence[int]) -> tuple[Placement, tuple[SeatMemory, ...]]:
    layers = [problem.bounds[cut] for cut in cuts]
    placement = Placement(
        model_id=problem.card.model_id,
        model_digest=problem.card.digest,
        layer_count=problem.card.layer_count,
        strategy="pipeline",
        channel="libp2p",
        context_tokens=problem.workload.context_tokens,
        concurrency=problem.workload.concurrency,
        seats=tuple(
            Seat(node.node_id, start, end) for node, start, end in zip(nodes, layers[:-1], layers[1:], strict=True)
        ),
    )
    return placement, memory_in_turn(problem.card, placement, nodes, problem.prefill_chunk_tokens)


def _by_room(nodes: Sequence[NodeCard]) -> list[NodeCard]:
    """Most free memory first, then id."""
    return sorted(nodes, key=lambda node: (-node.memory_free_bytes, node.node_id))
