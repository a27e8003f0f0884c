"""The planner: what holds for every mesh and model, then the tales that a person would tell of it."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from planning_cases import (
    by_brute_force,
    cycle_nanoseconds,
    fewest_and_shortest,
    models,
    placement_of,
    topologies,
    workloads,
)

from meshinfer.base.ids import ModelId, NodeId
from meshinfer.base.units import GIB, MIB
from meshinfer.planning.measured import UNMEASURED_DISK
from meshinfer.planning.memory import PREFILL_CHUNK_TOKENS, seat_memory
from meshinfer.planning.plan import Plan, Preview, Refusal
from meshinfer.planning.planner import plan, validate_placement
from meshinfer.planning.problem import Problem
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing.cards import MODEL_DIGEST, MODEL_ID, model_card, node_card
from meshinfer.topology.card import KindSpeed, NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.topology.speed import NodeSpeed
from meshinfer.wire.codec import decode, encode

ANYTHING = Constraints()
SMALL = Workload(context_tokens=256, concurrency=1)


def mesh(*cards, rtt_seconds=0.001, links=()):
    named = {(link.source, link.target) for link in links}
    rest = [
        Link(a.node_id, b.node_id, rtt_seconds, bandwidth_bytes_per_second=1e9)
        for a in cards
        for b in cards
        if a is not b and (a.node_id, b.node_id) not in named
    ]
    return Topology.of(cards, [*links, *rest])


# --- what holds for every mesh and model --------------------------------------------------------


@given(topologies(), models(), workloads)
def test_every_plan_is_whole_legal_and_within_memory(topology, card, workload):
    preview = plan(topology, card, workload, ANYTHING)
    event(f"plans of {len(preview.plans[0].memory) if preview.plans else 0} stages")
    for each in preview.plans:
        placement = each.placement
        placement.validate()  # every layer exactly once
        assert all(seat.start in (0, *card.cut_points) for seat in placement.seats)
        for index, seat in enumerate(placement.seats):
            node = topology.by_id[seat.node_id]
            recounted = seat_memory(card, placement, index, node, PREFILL_CHUNK_TOKENS)
            assert recounted == each.memory[index]
            assert recounted.need_bytes <= node.memory_free_bytes
        assert len(set(placement.node_ids)) == len(placement.seats)
    assert len({each.placement.placement_id for each in preview.plans}) == len(preview.plans) <= 8


@given(topologies(), models(), workloads)
def test_the_choice_is_what_brute_force_finds(topology, card, workload):
    """Within the part in a thousand that the search leaves out."""
    workload = replace(workload, objective="latency" if workload.objective == "fit" else workload.objective)
    preview = plan(topology, card, workload, ANYTHING)
    best = by_brute_force(topology, card, workload)
    if best is None:
        assert preview.plans == ()
        assert preview.refusals[0].explanation
    else:
        assert best * (1 - 1e-9) <= preview.plans[0].prediction.objective_seconds <= best * 1.002


@settings(max_examples=25)
@given(topologies(most=6), models(most_layers=8), workloads)
def test_to_fit_is_the_fewest_nodes_and_the_shortest_way_round(topology, card, workload):
    preview = plan(topology, card, replace(workload, objective="fit"), ANYTHING)
    best = fewest_and_shortest(topology, card, workload)
    chosen = preview.plans[0] if preview.plans else None
    assert best == (chosen and (len(chosen.memory), cycle_nanoseconds(topology, chosen.placement.node_ids)))


@given(topologies(most=8), models(), workloads, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(topology, card, workload, rng):
    cards, links = list(topology.nodes), list(topology.links)
    rng.shuffle(cards)
    rng.shuffle(links)
    assert encode(plan(Topology.of(cards, links), card, workload, ANYTHING)) == encode(
        plan(topology, card, workload, ANYTHING)
    )


@given(topologies(), models(), workloads, st.data())
def test_more_memory_never_turns_a_plan_into_a_refusal(topology, card, workload, data):
    before = plan(topology, card, workload, ANYTHING)
    richer = [
        replace(node, memory_usable_bytes=node.memory_usable_bytes + data.draw(st.integers(0, 20 * MIB)))
        for node in topology.nodes
    ]
    after = plan(Topology.of(richer, topology.links), card, workload, ANYTHING)
    if before.plans:
        assert after.plans
        if workload.objective == "fit":
            assert len(after.plans[0].memory) <= len(before.plans[0].memory)
        else:
            told, then = after.plans[0].prediction, before.plans[0].prediction
            assert told.objective_seconds <= then.objective_seconds * 1.002


@given(topologies(), models(), workloads)
def test_a_node_that_is_not_used_changes_nothing_by_going(topology, card, workload):
    before = plan(topology, card, workload, ANYTHING)
    if not before.plans:
        return
    choice = before.plans[0]
    for idle in topology.nodes:
        if idle.node_id in choice.placement.node_ids:
            continue
        fewer = Topology.of([node for node in topology.nodes if node is not idle], topology.links)
        after = plan(fewer, card, workload, ANYTHING).plans[0]
        assert (after.placement, after.memory) == (choice.placement, choice.memory)


@given(topologies(), models(), workloads)
def test_a_plan_passes_as_a_manual_placement_too(topology, card, workload):
    for each in plan(topology, card, workload, ANYTHING).plans:
        verdict = validate_placement(each.placement, topology, card, workload=workload)
        assert isinstance(verdict, Plan)
        assert replace(verdict, reason=each.reason) == each


@given(topologies(), models(), workloads, st.booleans())
def test_previews_travel(topology, card, workload, may_fetch):
    preview = plan(topology, card, workload, ANYTHING, may_fetch=may_fetch)
    assert decode(Preview, encode(preview)) == preview


# --- one node -----------------------------------------------------------------------------------


def test_one_node_that_holds_it_all_is_enough_and_the_roomiest_is_taken():
    card = model_card([100 * MIB] * 8)
    preview = plan(
        mesh(node_card("ada", 2 * GIB), node_card("bea", 4 * GIB), node_card("cam", GIB // 2)), card, SMALL, ANYTHING
    )
    assert [seat.node_id for seat in preview.plans[0].placement.seats] == ["bea"]
    assert preview.plans[0].predicted_hop_seconds == 0
    assert "bea holds all 8 layers alone" in preview.plans[0].reason
    assert [seat.node_id for seat in preview.plans[1].placement.seats] == ["ada"]
    assert "against 4.00 GiB of the choice" in preview.plans[1].reason
    # What a second node would cost is said in numbers.
    assert len(preview.plans[2].memory) == 2
    assert "slower: " in preview.plans[2].reason
    assert "+1 node, " in preview.plans[2].reason
    assert "1.0 ms of links per token" in preview.plans[2].reason
    assert "cam alone" in preview.refusals[0].explanation


def test_promised_memory_counts_as_taken():
    card = model_card([100 * MIB] * 8)
    busy = node_card("ada", 4 * GIB, memory_promised_bytes=7 * GIB // 2)
    assert plan(mesh(busy, node_card("bea", 2 * GIB)), card, SMALL, ANYTHING).plans[0].placement.node_ids == ("bea",)


# --- several nodes ------------------------------------------------------------------------------


def test_the_pair_with_the_quick_link_is_taken():
    card = model_card([100 * MIB] * 8)
    cards = [node_card(name, 700 * MIB) for name in ("ada", "bea", "cam")]
    quick = [
        Link(NodeId(a), NodeId(b), 0.0004, bandwidth_bytes_per_second=1e9) for a, b in (("cam", "ada"), ("ada", "cam"))
    ]
    preview = plan(mesh(*cards, rtt_seconds=0.02, links=quick), card, SMALL, ANYTHING)
    assert set(preview.plans[0].placement.node_ids) == {"ada", "cam"}
    assert preview.plans[0].predicted_hop_seconds == pytest.approx(0.0004, rel=1e-3)
    assert "no node holds it alone" in preview.plans[0].reason
    others = [each for each in preview.plans if set(each.placement.node_ids) != {"ada", "cam"}]
    assert others[0].predicted_hop_seconds == pytest.approx(0.02, rel=1e-3)
    assert "20.0 ms of links per token" in others[0].reason


def test_the_token_s_way_back_is_a_hop_too():
    """Up the fast way, back the slow one: the other direction round is better where the return is quick."""
    card = model_card([100 * MIB] * 3)
    cards = [node_card(name, 150 * MIB) for name in ("ada", "bea", "cam")]
    ring = [("ada", "cam"), ("cam", "bea"), ("bea", "ada")]
    links = [Link(NodeId(a), NodeId(b), 0.001, bandwidth_bytes_per_second=1e9) for a, b in ring]
    preview = plan(mesh(*cards, rtt_seconds=0.1, links=links), card, SMALL, ANYTHING)
    assert preview.plans[0].placement.node_ids in {("ada", "cam", "bea"), ("cam", "bea", "ada"), ("bea", "ada", "cam")}
    assert preview.plans[0].predicted_hop_seconds == pytest.approx(0.0015, rel=1e-3)


def test_layers_go_by_free_memory_so_that_the_fullest_node_keeps_most_headroom():
    card = model_card([100 * MIB] * 12)
    preview = plan(mesh(node_card("big", 1100 * MIB), node_card("low", 500 * MIB)), card, SMALL, ANYTHING)
    assert {seat.node_id: seat.layers for seat in preview.plans[0].placement.seats} == {"big": 8, "low": 4}


def test_a_link_that_nobody_measured_is_used_but_said():
    card = model_card([100 * MIB] * 12)
    topology = Topology.of([node_card("ada", 2000 * MIB // 2), node_card("bea", 2000 * MIB // 2)], [])
    chosen = plan(topology, card, SMALL, ANYTHING).plans[0]
    assert chosen.predicted_hop_seconds == pytest.approx(0.15, rel=1e-3)
    assert [hop.assumed for hop in chosen.prediction.hops] == ["nobody has measured it yet"] * 2
    assert "nobody has measured it yet" in chosen.binds
    assert not chosen.prediction.is_measured


def test_kv_headroom_counts_and_concurrency_changes_the_placement():
    card = model_card([10 * MIB] * 8, kv_elements_per_token=1024)  # 2 KiB a token and layer
    topology = mesh(node_card("ada", 200 * MIB), node_card("bea", 200 * MIB))
    one = plan(topology, card, Workload(context_tokens=4096, concurrency=1), ANYTHING)
    assert len(one.plans[0].memory) == 1
    two = plan(topology, card, Workload(context_tokens=4096, concurrency=3), ANYTHING)
    assert len(two.plans[0].memory) == 2
    many = plan(topology, card, Workload(context_tokens=4096, concurrency=8), ANYTHING)
    assert many.plans == ()
    assert "for 8 × 4096 tokens" in many.refusals[0].explanation


# --- who may take part --------------------------------------------------------------------------


def test_a_node_that_leaves_gets_nothing_new():
    card = model_card([MIB] * 4)
    topology = mesh(node_card("ada", 4 * GIB, leaving=True), node_card("bea"))
    preview = plan(topology, card, SMALL, ANYTHING)
    assert preview.plans[0].placement.node_ids == ("bea",)
    assert any("ada is leaving the mesh and takes nothing new" in refusal.explanation for refusal in preview.refusals)


def test_only_nodes_with_the_same_files_take_part_unless_they_may_fetch():
    card = model_card([100 * MIB] * 8)
    topology = mesh(
        node_card("ada", 500 * MIB),
        node_card("bea", 500 * MIB, holds=[(MODEL_ID, "other" * 8)]),
        node_card("cam", 500 * MIB, holds=[]),
        node_card("dot", 500 * MIB),
    )
    assert set(plan(topology, card, SMALL, ANYTHING).plans[0].placement.node_ids) == {"ada", "dot"}
    alone = Constraints(nodes=(NodeId("ada"), NodeId("cam")))
    refused = plan(topology, card, SMALL, alone)
    assert refused.plans == ()
    assert any("cam does not hold the files" in refusal.explanation for refusal in refused.refusals)
    fetched = plan(topology, card, SMALL, alone, may_fetch=True).plans[0]
    assert set(fetched.placement.node_ids) == {"ada", "cam"}
    assert "cam fetches the files first" in fetched.reason
    both = Constraints(nodes=(NodeId("ada"), NodeId("bea"), NodeId("cam")), layers=((NodeId("ada"), 2),))
    told = plan(topology, card, SMALL, both, may_fetch=True).plans[0].reason
    assert "bea and cam fetch the files first" in told or "cam and bea fetch the files first" in told
    # Who has the files goes first even over a quicker link.
    quick = [Link(NodeId("ada"), NodeId("cam"), 1e-5), Link(NodeId("cam"), NodeId("ada"), 1e-5)]
    chosen = plan(mesh(*topology.nodes, links=quick), card, SMALL, ANYTHING, may_fetch=True).plans[0]
    assert set(chosen.placement.node_ids) == {"ada", "dot"}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), workloads)
def test_layers_that_the_operator_sets_are_found_wherever_they_fit(layers, workload):
    workload = replace(workload, context_tokens=256, concurrency=1)
    card = model_card([MIB] * sum(layers))
    cards = [node_card(name, 2 * GIB) for name in ("ada", "bea", "cam", "dot")[: len(layers)]]
    wanted = {node.node_id: count for node, count in zip(cards, layers, strict=True)}
    preview = plan(mesh(*cards), card, workload, Constraints(layers=tuple(wanted.items())))
    assert {seat.node_id: seat.end - seat.start for seat in preview.plans[0].placement.seats} == wanted


@pytest.mark.parametrize("rate", ["cache_bytes_per_second", "row_bytes_per_second", "pass_bytes_per_second"])
@pytest.mark.parametrize("workload", [SMALL, Workload(256, 4, objective="throughput")])
def test_a_node_that_says_nonsense_about_its_speed_spoils_no_plan(rate, workload):
    kind = KindSpeed("q4g64", replace(NodeSpeed(1e9, 1e11, 0.0), **{rate: 1e-320}))
    odd = decode(NodeCard, encode(node_card("odd", 200 * MIB, speeds=(kind,))))
    card = model_card([8 * MIB] * 6, weight_kind="q4g64")
    assert plan(mesh(node_card("ada", 200 * MIB), odd), card, workload, ANYTHING).plans


def test_constraints_choose_and_exclude():
    card = model_card([MIB] * 4)
    topology = mesh(node_card("ada", 2 * GIB), node_card("bea", GIB), node_card("cam", GIB // 2))
    only = plan(topology, card, SMALL, Constraints(nodes=(NodeId("cam"),)))
    assert only.plans[0].placement.node_ids == ("cam",)
    without = plan(topology, card, SMALL, Constraints(exclude=(NodeId("ada"),)))
    assert without.plans[0].placement.node_ids == ("bea",)
    nobody = plan(topology, card, SMALL, Constraints(exclude=tuple(node.node_id for node in topology.nodes)))
    assert "leave none of the 3 live nodes" in nobody.refusals[0].explanation


def test_a_constraint_on_an_unknown_node_is_said():
    card = model_card([MIB] * 4)
    preview = plan(mesh(node_card("ada")), card, SMALL, Constraints(nodes=(NodeId("nobody-by-this-name"),)))
    assert preview.plans == ()
    assert preview.refusals[0].constraint == "nodes"
    assert "…his-name is not in the mesh now" in preview.refusals[0].explanation


# --- refusals -----------------------------------------------------------------------------------


def test_a_mesh_too_small_says_need_have_and_what_to_do():
    card = model_card([100 * MIB] * 8, kv_elements_per_token=1024, max_context_tokens=8192)
    preview = plan(
        mesh(node_card("alpha", 300 * MIB), node_card("beta", 100 * MIB)),
        card,
        Workload(context_tokens=4096, concurrency=2),
        ANYTHING,
    )
    refusal = preview.refusals[0]
    assert refusal.constraint == "memory"
    for words in (
        "phantom/model needs ",
        "weights 800 MiB",
        "cache 128 MiB",
        "for 2 × 4096 tokens",
        "the mesh has 400 MiB free: alpha 300 MiB, beta 100 MiB",
        "Every node that takes part needs memory for a runner of its own (",
        "Free memory, lower --context or --concurrency, or add a laptop",
    ):
        assert words in refusal.explanation
    assert sum(seat.need_bytes for seat in refusal.memory) > 928 * MIB
    assert all(seat.shortfall_bytes > 0 for seat in refusal.memory)
    assert [each.nodes for each in preview.refusals[1:3]] == [("alpha",), ("beta",)]


@given(topologies(), models(), workloads)
def test_a_context_that_a_refusal_names_does_fit(topology, card, workload):
    roomy = replace(workload, context_tokens=min(4 * workload.context_tokens + 1024, card.max_context_tokens or 2**20))
    refusal = next(iter(plan(topology, card, roomy, ANYTHING).refusals), None)
    named = re.search(r"It would fit with --context (\d+)\.", refusal.explanation) if refusal else None
    event(f"a context is named: {bool(named)}")
    if named:
        assert int(named[1]) < roomy.context_tokens
        assert plan(topology, card, replace(roomy, context_tokens=int(named[1])), ANYTHING).plans


def test_the_longest_context_that_fits_is_named_and_none_where_none_fits():
    card = model_card([10 * MIB] * 8, kv_elements_per_token=1024)  # 2 KiB a token and layer
    small = Workload(context_tokens=4096, concurrency=4)
    told = plan(mesh(node_card("ada", 100 * MIB), node_card("bea", 100 * MIB)), card, small, ANYTHING).refusals[0]
    named = int(re.search(r"It would fit with --context (\d+)\.", told.explanation)[1])
    more = replace(small, context_tokens=named + 256)
    assert not plan(mesh(node_card("ada", 100 * MIB), node_card("bea", 100 * MIB)), card, more, ANYTHING).plans
    # Also where no node has room for a single layer, as long as the whole context is reserved.
    thin = mesh(*(node_card(name, 40 * MIB) for name in ("ada", "bea", "cam")))
    assert (
        "It would fit with --context"
        in plan(thin, replace(card, layers=card.layers[:3], cut_points=(1, 2)), small, ANYTHING).refusals[0].explanation
    )
    tiny = plan(mesh(node_card("ada", 30 * MIB), node_card("bea", 30 * MIB)), card, small, ANYTHING).refusals[0]
    assert "--context or --concurrency" in tiny.explanation
    assert "It would fit" not in tiny.explanation


def test_a_mesh_large_enough_in_sum_says_that_no_cut_fits():
    card = model_card([100 * MIB] * 3)
    refusal = plan(mesh(node_card("ada", 190 * MIB), node_card("bea", 190 * MIB)), card, SMALL, ANYTHING).refusals[0]
    assert "cannot be cut so that every node can hold its part" in refusal.explanation


def test_a_model_without_cuts_needs_one_node():
    card = model_card([100 * MIB] * 4, cut_points=())
    topology = mesh(node_card("ada", 300 * MIB), node_card("bea", 350 * MIB))
    refusal = plan(topology, card, SMALL, ANYTHING).refusals[0]
    assert refusal.constraint == "cut"
    assert "one node must hold all of it" in refusal.explanation
    assert "bea, has 350 MiB free" in refusal.explanation
    assert plan(mesh(node_card("ada")), card, SMALL, ANYTHING).plans


def test_a_context_beyond_the_model_s_is_refused():
    card = model_card([MIB] * 4, max_context_tokens=2048)
    refused = plan(mesh(node_card("ada")), card, Workload(context_tokens=4096), ANYTHING)
    assert refused.refusals[0].constraint == "context"
    assert "2048 tokens at most; 4096 were asked for" in refused.refusals[0].explanation


def test_files_that_nobody_holds_are_refused():
    other = node_card("ada", holds=[(MODEL_ID, "other" * 8)])
    refused = plan(mesh(other), model_card(), SMALL, ANYTHING, may_fetch=True)
    assert refused.refusals[0].constraint == "model"
    assert "ada holds another revision" in refused.refusals[0].explanation


def test_an_empty_mesh_is_refused():
    assert plan(Topology.of([], []), model_card(), SMALL, ANYTHING).plans == ()


def test_strategies_that_this_build_cannot_run_are_listed():
    card = model_card(tensor_degrees=(2, 4))
    preview = plan(mesh(node_card("ada"), node_card("bea"), node_card("cam")), card, SMALL, ANYTHING)
    assert {refusal.strategy for refusal in preview.refusals if refusal.constraint == "build"} == {"tensor", "hybrid"}


# --- manual placements --------------------------------------------------------------------------

CARD = model_card([100 * MIB] * 8, cut_points=(2, 4, 6))
MESH = mesh(node_card("ada", 900 * MIB), node_card("bea", 500 * MIB), node_card("old", GIB, leaving=True))


def by_hand(*order: str, layers: tuple[int, ...], workload: Workload = SMALL):
    return placement_of(CARD, workload, [NodeId(name) for name in order], layers)


def test_a_manual_placement_may_be_worse_than_the_planner_s():
    verdict = validate_placement(by_hand("bea", "ada", layers=(0, 2, 8)), MESH, CARD)
    assert isinstance(verdict, Plan)
    assert verdict.topology_digest == MESH.digest


@pytest.mark.parametrize(
    ("placement", "constraint", "words"),
    [
        (by_hand("ada", "bea", layers=(0, 3, 8)), "cut", "cannot be cut before layer 3. It can be cut before layers 2"),
        (by_hand("ada", "bea", layers=(0, 2, 7)), "cut", "all 8 layers"),
        (by_hand("ada", "old", layers=(0, 4, 8)), "nodes", "old is leaving"),
        (by_hand("ada", "eve", layers=(0, 4, 8)), "nodes", "not in the mesh"),
        (by_hand("ada", "bea", layers=(0, 2, 8)), "memory", "bea needs 60"),
        (by_hand("ada", "ada", layers=(0, 4, 8), workload=Workload(131_073, 1)), "context", "131072 tokens at most"),
        (replace(by_hand("ada", layers=(0, 8)), model_digest="f" * 8), "model", "with digest ffffffff"),
        (replace(by_hand("ada", layers=(0, 8)), layer_count=9), "cut", "8 layers, not 9"),
        (replace(by_hand("ada", layers=(0, 8)), strategy="tensor"), "build", "tensor over libp2p is not in it"),
        (replace(by_hand("ada", layers=(0, 8)), model_id=ModelId("m")), "model", "is of m "),
    ],
)  # fmt: skip
def test_a_manual_placement_is_checked(placement, constraint, words):
    verdict = validate_placement(placement, MESH, CARD)
    assert isinstance(verdict, Refusal)
    assert verdict.constraint == constraint
    assert words in verdict.explanation


def test_two_seats_of_one_node_add_up():
    roomy = mesh(node_card("ada", 1000 * MIB))
    tight = mesh(node_card("ada", 801 * MIB))
    twice = by_hand("ada", "ada", layers=(0, 4, 8))
    assert isinstance(validate_placement(twice, roomy, CARD), Plan)
    refused = validate_placement(twice, tight, CARD)
    assert isinstance(refused, Refusal)
    assert refused.memory[1].free_bytes < 402 * MIB


def test_a_manual_placement_needs_the_files():
    topology = mesh(node_card("ada"), node_card("bea", holds=[]))
    placement = by_hand("ada", "bea", layers=(0, 4, 8))
    refused = validate_placement(placement, topology, CARD)
    assert isinstance(refused, Refusal)
    assert refused.constraint == "model"
    assert isinstance(validate_placement(placement, topology, CARD, may_fetch=True), Plan)


# --- large meshes -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("free_mib", [(2700, 2800), (4000, 24_000), (16_000, 16_001)])
def test_a_large_mesh_gets_a_sound_plan(seed, free_mib):
    rng = random.Random(seed)
    cards = [node_card(f"n{i:02}", rng.randint(*free_mib) * MIB) for i in range(32)]
    links = [Link(a.node_id, b.node_id, rng.uniform(3e-4, 2e-2)) for a in cards for b in cards if a is not b]
    card = model_card([450 * MIB] * 80, kv_elements_per_token=2048, embedding_bytes=200 * MIB, head_bytes=200 * MIB)
    preview = plan(Topology.of(cards, links), card, Workload(context_tokens=8192), ANYTHING)
    capacities = sorted(node.memory_free_bytes // (578 * MIB) for node in cards)[::-1]
    fewest = next(n for n in range(1, 33) if sum(capacities[:n]) >= 80)
    # Embedding, head and activations may cost one node more than layers alone would.
    assert fewest <= len(preview.plans[0].memory) <= fewest + 1
    stages = len(preview.plans[0].memory)
    average = sum(link.rtt_seconds for link in links) / len(links) / 2
    # With two to four stages there may be no choice of links.
    assert stages < 5 or preview.plans[0].predicted_hop_seconds < average * stages / 2
    for each in preview.plans:
        each.placement.validate()
        assert not any(seat.shortfall_bytes for seat in each.memory)


def test_every_node_of_a_large_mesh_is_used_where_all_are_needed():
    cards = [node_card(f"n{i:02}", 250 * MIB) for i in range(20)]
    card = model_card([120 * MIB] * 40)
    preview = plan(mesh(*cards), card, SMALL, ANYTHING)
    assert sorted(preview.plans[0].placement.node_ids) == [node.node_id for node in cards]


def test_the_digest_of_the_topology_is_on_the_plan():
    topology = mesh(node_card("ada"))
    assert plan(topology, model_card(), SMALL, ANYTHING).plans[0].topology_digest == topology.digest
    assert plan(topology, model_card(), SMALL, ANYTHING).plans[0].placement.model_digest == MODEL_DIGEST


def test_files_come_no_quicker_than_a_disk_takes_them():
    """Term 10: bytes to move / min(disk, link)."""
    card = model_card([100 * MIB] * 8)

    def rate(bandwidth: float) -> float:
        cards = [node_card("ada", 2 * GIB), node_card("bea", 2 * GIB, holds=[])]
        links = [
            Link(NodeId(a), NodeId(b), 0.001, bandwidth_bytes_per_second=bandwidth)
            for a, b in (("ada", "bea"), ("bea", "ada"))
        ]
        topology = Topology.of(cards, links)
        problem = Problem(topology, card, SMALL, ANYTHING, topology.nodes, PREFILL_CHUNK_TOKENS)
        return problem.candidate(1).fetch_bytes_per_second

    assert rate(1e8) == 1e8
    assert rate(1e10) == UNMEASURED_DISK
