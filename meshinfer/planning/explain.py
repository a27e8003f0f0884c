"""What a plan binds on and why it is the choice, why another is not, why one cannot be: in sentences and numbers.

Every sentence is bounded (its field travels), names at most eight nodes, and a refusal ends with
what a person can do about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshinfer.base.ids import NodeId
from meshinfer.base.units import format_bytes, format_seconds
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Declined, Plan, Refusal, SeatMemory
from meshinfer.planning.prediction import Prediction
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement

NAMED_NODES = 8


def refusal(
    constraint: str,
    explanation: str,
    nodes: Iterable[NodeId] = (),
    memory: Sequence[SeatMemory] = (),
    placement: Placement | None = None,
) -> Refusal:
    """A refusal of a pipeline, or of `placement`'s strategy, within its fields' bounds."""
    return Refusal(
        strategy=placement.strategy if placement else "pipeline",
        channel=placement.channel if placement else "libp2p",
        nodes=tuple(nodes)[:256],
        constraint=constraint,
        explanation=_clip(explanation, 2048),
        memory=tuple(memory)[:256],
    )


def name(topology: Topology, node_id: NodeId) -> str:
    """What people call a node; with the end of its id where the name is empty or not its alone."""
    card = topology.by_id.get(node_id)
    if card is None or not card.name:
        return f"…{node_id[-8:]}"
    shared = Counter(node.name for node in topology.nodes)[card.name] > 1
    return f"{card.name} (…{node_id[-8:]})" if shared else card.name


def names(topology: Topology, node_ids: Sequence[NodeId]) -> str:
    """`a`, `a and b`, `a, b and 5 more`."""
    shown = [name(topology, node_id) for node_id in node_ids[:NAMED_NODES]]
    if len(node_ids) > NAMED_NODES:
        shown.append(f"{len(node_ids) - NAMED_NODES} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


# --- plans --------------------------------------------------------------------------------------


def binds(topology: Topology, memory: Sequence[SeatMemory], prediction: Prediction) -> str:
    """What limits this candidate: the stage or link that most of a token's time goes to, and the fullest memory."""
    fullest = max(memory, key=lambda seat: seat.need_bytes / max(1, seat.free_bytes))
    share = fullest.need_bytes / max(1, fullest.free_bytes)
    text = (
        f"memory of {name(topology, fullest.node_id)}: {format_bytes(fullest.need_bytes)} of "
        f"{format_bytes(fullest.free_bytes)} free ({share:.0%})"
    )
    stage = max(prediction.stages, key=lambda each: each.seconds)
    slowest, assumed = stage.seconds, stage.assumed
    what = f"compute of {names(topology, stage.nodes)}"
    if prediction.hops:
        hop = max(prediction.hops, key=lambda each: each.seconds)
        if hop.seconds > slowest:
            slowest, assumed = hop.seconds, hop.assumed
            what = f"link {name(topology, hop.source)} → {name(topology, hop.target)}"
    doubt = f" (assumed: {assumed})" if assumed else ""
    whole = format_seconds(prediction.tpot_seconds)
    # Above four fifths there is no room for more layers or sessions there, so memory is the next thing to bind.
    also = f"; next {text}" if share > 0.8 else f"; the fullest {text}"
    return _clip(f"{what}: {format_seconds(slowest)} of {whole} per token{doubt}{also}", 512)


def reasons(
    topology: Topology,
    card: ModelCard,
    plans: Sequence[Plan],
    too_tight: Sequence[Refusal],
    *,
    is_running: bool = False,
) -> list[str]:
    """Why the first of `plans` is the choice, and why each other is not."""
    choice = plans[0]
    why = _why_kept(plans) if is_running else _why_chosen(topology, plans, too_tight)
    return [
        _clip((why if each is choice else _why_not(topology, choice, each)) + _fetching(topology, card, each), 512)
        for each in plans
    ]


def _figures(plan: Plan) -> str:
    told = plan.prediction
    assert told is not None
    speed = f"{told.tokens_per_second_alone:.3g} tokens/s alone, first token after {format_seconds(told.ttft_seconds)}"
    together = f", {told.served_tokens_per_second:.3g} tokens/s for {told.concurrency} at once"
    return speed + (together if told.objective == "throughput" else "")


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.objective_seconds


def _why_kept(plans: Sequence[Plan]) -> str:
    better = min((_seconds(each) for each in plans[1:]), default=None)
    if better is None or better >= _seconds(plans[0]):
        return f"it runs already, and nothing is quicker: {_figures(plans[0])}"
    gain = 1 - better / _seconds(plans[0])
    return f"it runs already, and the quickest other is only {gain:.0%} quicker: {_figures(plans[0])}"


def _why_chosen(topology: Topology, plans: Sequence[Plan], too_tight: Sequence[Refusal]) -> str:
    choice = plans[0]
    told = choice.prediction
    assert told is not None
    if len(choice.memory) == 1:
        seat = choice.memory[0]
        return (
            f"{name(topology, seat.node_id)} holds all {choice.placement.layer_count} layers alone, in "
            f"{format_bytes(seat.need_bytes)} of {format_bytes(seat.free_bytes)} free; no link slows it: "
            f"{_figures(choice)}"
        )
    alone = next((each for each in plans[1:] if len(each.memory) == 1), None)
    before = ""
    if alone is not None and told.objective != "fit":
        before = (
            f"quicker than {name(topology, alone.memory[0].node_id)} alone ({format_seconds(_seconds(alone))} against "
            f"{format_seconds(_seconds(choice))}); "
        )
    elif too_tight:
        seat = too_tight[0].memory[0]
        before = (
            f"no node holds it alone (the largest, {name(topology, seat.node_id)}, lacks "
            f"{format_bytes(seat.shortfall_bytes)}); "
        )
    links = f"{format_seconds(choice.predicted_hop_seconds)} of links per token"
    if told.objective == "fit":
        return f"{before}{len(choice.memory)} nodes are the fewest that do, in the order with least latency: {links}"
    return f"{before}{len(choice.memory)} nodes are the quickest that do: {_figures(choice)}, {links}"


def _why_not(topology: Topology, choice: Plan, other: Plan) -> str:
    more = len(other.memory) - len(choice.memory)
    links = f"{format_seconds(other.predicted_hop_seconds)} of links per token"
    told = other.prediction
    assert told is not None
    if told.objective == "fit" and more:
        return f"{more} node more than needed: {links}"
    if told.objective != "fit" and _seconds(other) > _seconds(choice) * (1 + 1e-9):
        what = "a full house" if told.objective == "throughput" else "a request"
        nodes = f"{more:+d} node{'s' if abs(more) > 1 else ''}, " if more else ""
        return (
            f"slower: {format_seconds(_seconds(other))} for {what} against {format_seconds(_seconds(choice))}; "
            f"{nodes}{told.tokens_per_second_alone:.3g} tokens/s alone, {links}"
        )
    if len(other.memory) == len(choice.memory) == 1:
        here, there = other.memory[0], choice.memory[0]
        return (
            f"{name(topology, here.node_id)} holds all layers too, with {format_bytes(here.free_bytes)} free against "
            f"{format_bytes(there.free_bytes)} of the choice"
        )
    return f"as quick as the choice: {links} against {format_seconds(choice.predicted_hop_seconds)}"


def declined(topology: Topology, node: NodeCard, without: Prediction, with_it: Prediction) -> Declined:
    """A node that would only slow the choice."""
    of = "a full house" if without.objective == "throughput" else "a request"
    slower = with_it.objective_seconds / without.objective_seconds - 1 if without.objective_seconds else 0.0
    verdict = f"{slower:.2%} slower" if slower > 0 else "no quicker"
    text = (
        f"{name(topology, node.node_id)} adds nothing: with it {of} takes "
        f"{format_seconds(with_it.objective_seconds)} instead of {format_seconds(without.objective_seconds)} "
        f"({verdict}; {with_it.tokens_per_second_alone:.3g} instead of {without.tokens_per_second_alone:.3g} tokens/s "
        f"alone)"
    )
    return Declined(node.node_id, with_it.objective_seconds, without.objective_seconds, _clip(text, 512))


def grouped(best: Plan, choice: Plan) -> Refusal:
    """The best candidate with tensor groups: this build cannot run it, and this is what it would do."""
    told, against = best.prediction, choice.prediction
    assert told is not None
    assert against is not None
    placement = best.placement
    quicker = told.objective_seconds < against.objective_seconds
    comparison = (
        f"It would be {'quicker' if quicker else 'slower'} than the choice: {format_seconds(told.objective_seconds)} "
        f"against {format_seconds(against.objective_seconds)}, {told.tokens_per_second_alone:.3g} tokens/s against "
        f"{against.tokens_per_second_alone:.3g}; {format_seconds(told.link_seconds)} of each token on links."
    )
    text = f"{build_runs_only(placement.strategy, placement.channel)} {comparison}"
    whole = refusal("build", text, placement.node_ids, best.memory, placement)
    return replace(whole, placement=placement, prediction=told)


def cannot_be_sharded(card: ModelCard) -> str:
    """No tensor groups for this model."""
    return f"The layers of {card.model_id} cannot be sharded over the ranks of a tensor group."


def illegal_degrees(card: ModelCard, degrees: Sequence[int]) -> str:
    """A tensor group of a size that the model does not divide into."""
    legal = ", ".join(str(degree) for degree in card.tensor_degrees) or "none"
    return f"{card.model_id} cannot be sharded over {', '.join(map(str, degrees))} ranks. Legal numbers: {legal}."


def layers_cannot_be(topology: Topology, card: ModelCard, constraints: Constraints) -> str:
    """The operator's numbers of layers do not go together with cut points, memory, or each other."""
    wanted = ", ".join(f"{name(topology, node_id)}={count}" for node_id, count in constraints.layers[:NAMED_NODES])
    return (
        f"No placement of the {card.layer_count} layers of {card.model_id} has --layers {wanted}: they do not add up, "
        f"a cut falls where the model has none, or a node lacks memory for its part. Name fewer nodes, or other numbers."
    )


def _fetching(topology: Topology, card: ModelCard, each: Plan) -> str:
    fetching = [
        node_id
        for node_id in each.placement.node_ids
        if all((held.model_id, held.digest) != (card.model_id, card.digest) for held in topology.by_id[node_id].models)
    ]
    verb = "fetches" if len(fetching) == 1 else "fetch"
    return f"; {names(topology, fetching)} {verb} the files first" if fetching else ""


# --- memory -------------------------------------------------------------------------------------


def too_small(topology: Topology, card: ModelCard, node: NodeCard, memory: tuple[SeatMemory, ...]) -> Refusal:
    """One node that cannot hold the model alone."""
    seat = memory[0]
    return refusal(
        "memory",
        f"{name(topology, node.node_id)} alone: {card.model_id} needs {_parts(memory)}; "
        f"{format_bytes(seat.free_bytes)} are free, {format_bytes(seat.shortfall_bytes)} short.",
        (node.node_id,),
        memory,
    )


def mesh_too_small(
    topology: Topology,
    card: ModelCard,
    workload: Workload,
    memory: Sequence[SeatMemory],
    nodes: Sequence[NodeCard],
    fitting_context: int,
) -> str:
    """Why all nodes together cannot hold it. `memory`: the fairest cut; `nodes`: all that may take part."""
    need = sum(seat.need_bytes for seat in memory)
    free = sum(node.memory_free_bytes for node in nodes)
    shown = ", ".join(
        f"{name(topology, node.node_id)} {format_bytes(node.memory_free_bytes)}" for node in nodes[:NAMED_NODES]
    )
    more = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
    worst = max(memory, key=lambda seat: (seat.shortfall_bytes, seat.node_id))
    # Else nobody sees why 358 MiB do not fit into 3 x 200 MiB.
    why = (
        f" Every node that takes part needs memory for a runner of its own ({format_bytes(worst.overhead_bytes)} on "
        f"{name(topology, worst.node_id)}) before its first layer."
    )
    if need <= free:
        why += (
            f" So the layers cannot be cut so that every node can hold its part: at best "
            f"{name(topology, worst.node_id)} is {format_bytes(worst.shortfall_bytes)} short."
        )
    return (
        f"{card.model_id} needs {_parts(memory)} for {workload.concurrency} × {workload.context_tokens} tokens; "
        f"the mesh has {format_bytes(free)} free: {shown}{more}.{why} "
        f"{_less_context(fitting_context)}Free memory, lower --context or --concurrency, or add a laptop."
    )


def cannot_be_cut(topology: Topology, card: ModelCard, alone: Sequence[SeatMemory], fitting_context: int) -> Refusal:
    """No legal cut, and no node holds it whole. `alone`: the whole model on each node, largest first."""
    seat = alone[0]
    text = (
        f"{card.model_id} cannot be cut into stages, so one node must hold all of it: {_parts((seat,))}; the largest, "
        f"{name(topology, seat.node_id)}, has {format_bytes(seat.free_bytes)} free. "
        f"{_less_context(fitting_context)}Free memory there, or lower --context or --concurrency."
    )
    return refusal("cut", text, [each.node_id for each in alone], alone)


def _less_context(fitting: int) -> str:
    """The first thing to try, if it is known to help."""
    return f"It would fit with --context {fitting}. " if fitting else ""


def seats_too_large(topology: Topology, memory: Sequence[SeatMemory]) -> str:
    """A manual placement whose seats do not fit."""
    short = [seat for seat in memory if seat.shortfall_bytes]
    listed = "; ".join(
        f"{name(topology, seat.node_id)} needs {_parts((seat,))} and has {format_bytes(seat.free_bytes)} free, "
        f"{format_bytes(seat.shortfall_bytes)} short"
        for seat in short[:NAMED_NODES]
    )
    return f"{listed}. Give these nodes fewer layers, or lower --context or --concurrency."


def _parts(memory: Sequence[SeatMemory]) -> str:
    """`412 MiB in all (weights 114 MiB, …)`."""
    stages = f" as {len(memory)} stages" if len(memory) > 1 else ""
    return (
        f"{format_bytes(sum(seat.need_bytes for seat in memory))} in all{stages} "
        f"(weights {format_bytes(sum(seat.weight_bytes for seat in memory))}, "
        f"cache {format_bytes(sum(seat.cache_bytes for seat in memory))}, "
        f"prefill {format_bytes(sum(seat.activation_bytes for seat in memory))}, "
        f"runners {format_bytes(sum(seat.overhead_bytes for seat in memory))})"
    )


# --- nodes, files, cuts, build ------------------------------------------------------------------


def not_alive(topology: Topology, node_ids: Sequence[NodeId]) -> str:
    """Nodes that were named and are not there."""
    return (
        f"{names(topology, node_ids)} {_is(node_ids)} not in the mesh now. "
        f"`meshinfer status` shows the {len(topology.nodes)} live nodes."
    )


def are_leaving(topology: Topology, nodes: Sequence[NodeCard]) -> str:
    """Nodes that take nothing new."""
    takes = "takes" if len(nodes) == 1 else "take"
    return f"{names(topology, [node.node_id for node in nodes])} {_is(nodes)} leaving the mesh and {takes} nothing new."


def none_allowed(topology: Topology, constraints: Constraints) -> str:
    """The constraints leave nobody."""
    if not topology.nodes:
        return "No node is alive."
    return (
        f"The constraints leave none of the {len(topology.nodes)} live nodes "
        f"({len(constraints.exclude)} are excluded). Allow at least one."
    )


def nobody_holds(card: ModelCard, topology: Topology) -> str:
    """No files of this digest in the mesh."""
    others = [node.node_id for node in topology.nodes if any(held.model_id == card.model_id for held in node.models)]
    other = f" ({names(topology, others)} {_hold(others)} another revision)" if others else ""
    return (
        f"No live node holds the files of {card.model_id} with digest {card.digest[:16]}{other}. "
        f"`meshinfer models pull {card.model_id}` on a node with room for it."
    )


def without_files(topology: Topology, card: ModelCard, nodes: Sequence[NodeCard]) -> str:
    """Nodes that lack the files, or have others."""
    return (
        f"{names(topology, [node.node_id for node in nodes])} {_hold(nodes, negated=True)} the files of "
        f"{card.model_id} with digest {card.digest[:16]}. `meshinfer models pull {card.model_id}` there."
    )


def other_model(placement: Placement, card: ModelCard) -> str:
    """A placement of another model or revision."""
    return (
        f"The placement is of {placement.model_id} with digest {placement.model_digest[:16]}; this mesh has "
        f"{card.model_id} with digest {card.digest[:16]}. Take a placement from a new preview."
    )


def illegal_cuts(card: ModelCard, illegal: Sequence[int], bounds: Sequence[int]) -> str:
    """Cuts where the model cannot be cut."""
    if len(bounds) == 2:
        return f"{card.model_id} cannot be cut into stages: one node must hold all {card.layer_count} layers."
    legal = ", ".join(str(point) for point in bounds[1:-1][:32])
    more = ", …" if len(bounds) > 34 else ""
    return f"{card.model_id} cannot be cut before layer {illegal[0]}. It can be cut before layers {legal}{more}."


def build_runs_only(strategy: str, channel: str) -> str:
    """A strategy or channel that has no runner yet."""
    return f"This build runs pipelines over libp2p; {strategy} over {channel} is not in it yet."


def _is(items: Sequence[object]) -> str:
    return "is" if len(items) == 1 else "are"


def _hold(items: Sequence[object], negated: bool = False) -> str:
    if negated:
        return "does not hold" if len(items) == 1 else "do not hold"
    return "holds" if len(items) == 1 else "hold"


def _clip(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
