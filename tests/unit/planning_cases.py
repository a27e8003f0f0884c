"""Made-up meshes and models for the planner's properties, small enough to try everything by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

from hypothesis import strategies as st

from meshinfer.base.ids import NodeId
from meshinfer.base.units import MIB
from meshinfer.planning.hops import cycle_hops, hop_nanoseconds
from meshinfer.planning.memory import PREFILL_CHUNK_TOKENS, seat_memory
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes
from meshinfer.planning.planner import predict_placement
from meshinfer.planning.workload import Workload
from meshinfer.testing.cards import MODEL_DIGEST, MODEL_ID, model_card, node_card
from meshinfer.topology.card import KindSpeed, NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.topology.placement import Placement, Seat
from meshinfer.topology.speed import NodeSpeed

NAMES = ("ada", "bea", "cam", "dot", "eve", "fay", "gus", "hal")
RATES = st.sampled_from([0, 1_000_000, 20_000_000, 10**9]).map(float) | st.integers(1, 10**12).map(float)
SPEEDS = st.builds(
    NodeSpeed,
    st.sampled_from([1e8, 1e9, 3e9, 3e10]),
    st.sampled_from([1e9, 1e11, 5e12]),
    st.sampled_from([0.0, 1e-4, 3e-3]),
    st.sampled_from([0.0, 2e-4]),
    st.sampled_from([0.0, 5e-5]),
    st.sampled_from([0.0, 1e10]),
)
ROUND_TRIPS = st.sampled_from([0.0, 0.0002, 0.0005, 0.001, 0.004, 0.0041, 0.02, 0.3])


@st.composite
def tensor_bytes(draw: st.DrawFn, most_mib: int) -> TensorBytes:
    elements = draw(st.integers(0, most_mib)) * MIB // 4
    return TensorBytes(draw(st.integers(0, most_mib)) * MIB, elements, 2 * elements)


@st.composite
def models(draw: st.DrawFn, most_layers: int = 7) -> ModelCard:
    """Uneven layers, tied and untied, sliding windows, cuts anywhere or nowhere."""
    count = draw(st.integers(1, most_layers))
    layers = tuple(
        LayerCard(
            draw(tensor_bytes(6)),
            kv_elements_per_token=draw(st.sampled_from([0, 64, 256])),
            kv_tokens_limit=draw(st.sampled_from([0, 512])),
            state_elements=draw(st.sampled_from([0, 10_000])),
        )
        for _ in range(count)
    )
    cuts = [point for point in range(1, count) if draw(st.integers(0, 3))]
    card = model_card(
        (0,) * count, cut_points=cuts, tied_embeddings=draw(st.booleans()), weight_kind="q4g64", tensor_degrees=(2, 3)
    )
    return replace(
        card,
        layers=layers,
        embedding=draw(tensor_bytes(4)),
        head=draw(tensor_bytes(4)),
        every_stage=draw(st.sampled_from([TensorBytes(), TensorBytes(MIB, MIB // 4, MIB // 2)])),
    )


@st.composite
def nodes(draw: st.DrawFn, most: int = 5, most_mib: int = 40) -> list[NodeCard]:
    count = draw(st.integers(1, most))
    return [
        node_card(
            name,
            draw(st.integers(0, most_mib)) * MIB,
            runner_overhead_bytes=draw(st.sampled_from([0, MIB, 3 * MIB])),
            computes_float32=draw(st.booleans()),
            speeds=draw(st.sampled_from([(), (KindSpeed("q4g64", draw(SPEEDS)),)])),  # one in two is not measured
        )
        for name in NAMES[:count]
    ]


@st.composite
def topologies(draw: st.DrawFn, most: int = 5, most_mib: int = 40) -> Topology:
    """Directed links, some of them never measured."""
    cards = draw(nodes(most, most_mib))
    links = [
        Link(
            a.node_id,
            b.node_id,
            draw(ROUND_TRIPS),
            bandwidth_bytes_per_second=draw(RATES),
            channel_rtt_seconds=draw(ROUND_TRIPS),
            message_seconds=draw(st.sampled_from([0.0, 5e-5, 1e-3])),
        )
        for a, b in permutations(cards, 2)
        if draw(st.integers(0, 5))  # one in six is not measured
    ]
    return Topology.of(cards, links)


workloads = st.builds(
    Workload,
    context_tokens=st.sampled_from([1, 256, 1000, 4096]),
    concurrency=st.integers(1, 3),
    prompt_tokens=st.sampled_from([1, 256, 2000]),
    output_tokens=st.sampled_from([1, 256]),
    objective=st.sampled_from(["latency", "throughput", "fit"]),
)


def placement_of(card: ModelCard, workload: Workload, order: list[NodeId], layers: tuple[int, ...]) -> Placement:
    seats = tuple(Seat(n, a, b) for n, a, b in zip(order, layers[:-1], layers[1:], strict=True))
    return Placement(
        MODEL_ID, MODEL_DIGEST, card.layer_count, "pipeline", "libp2p",
        workload.context_tokens, workload.concurrency, seats,
    )  # fmt: skip


def by_brute_force(topology: Topology, card: ModelCard, workload: Workload) -> float | None:
    """The least objective over all orders and all legal cuts; None if nothing fits."""
    legal = [point for point in card.cut_points if 0 < point < card.layer_count]
    best: float | None = None
    for size in range(1, len(topology.nodes) + 1):
        for order in permutations([node.node_id for node in topology.nodes], size):
            for cuts in combinations(legal, size - 1):
                placement = placement_of(card, workload, list(order), (0, *cuts, card.layer_count))
                if fits(placement, topology, card):
                    seconds = predict_placement(placement, topology, card, workload).objective_seconds
                    best = seconds if best is None else min(best, seconds)
    return best


def cycle_nanoseconds(topology: Topology, order: Sequence[NodeId]) -> int:
    """Of one empty message through `order`."""
    return sum(hop_nanoseconds(topology, source, target) for source, target in cycle_hops(order))


def fewest_and_shortest(topology: Topology, card: ModelCard, workload: Workload) -> tuple[int, int] | None:
    """(fewest nodes, least nanoseconds of links) over all orders and all legal cuts; None if nothing fits."""
    legal = [point for point in card.cut_points if 0 < point < card.layer_count]
    for size in range(1, len(topology.nodes) + 1):
        fitting = [
            cycle_nanoseconds(topology, order)
            for order in permutations([node.node_id for node in topology.nodes], size)
            if any(
                fits(placement_of(card, workload, list(order), (0, *cuts, card.layer_count)), topology, card)
                for cuts in combinations(legal, size - 1)
            )
        ]
        if fitting:
            return size, min(fitting)
    return None


def fits(placement: Placement, topology: Topology, card: ModelCard) -> bool:
    return not any(
        seat_memory(card, placement, index, topology.by_id[seat.node_id], PREFILL_CHUNK_TOKENS).shortfall_bytes
        for index, seat in enumerate(placement.seats)
    )
