"""The planner against everything there is: all orders, all cuts, all tensor groups of random small meshes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import models, topologies, workloads

from meshinfer.base.ids import NodeId
from meshinfer.base.units import MIB
from meshinfer.planning import choice as choice_module
from meshinfer.planning.choice import Choice, quickest, quickest_with_groups
from meshinfer.planning.cost import hop_seconds
from meshinfer.planning.groups import groups
from meshinfer.planning.holders import Holder
from meshinfer.planning.measured import link_rates
from meshinfer.planning.plan import Plan
from meshinfer.planning.planner import plan, predict_placement, validate_placement
from meshinfer.planning.problem import Problem
from meshinfer.planning.quickest import quickest_cuts
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing.cards import model_card, node_card
from meshinfer.topology.card import KindSpeed
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.topology.speed import NodeSpeed

ANYTHING = Constraints()
CLOSE = 1.01
"""What is promised: within 1 %. The searches leave out less."""


def random_problem(seed: int, nodes: int, layers: int) -> Problem:
    """Machines and links that differ by factors of a hundred, memory from ample to hardly enough."""
    rng = random.Random(seed)
    low, high = rng.choice([(150, 450), (100, 1200), (250, 300), (200, 700)])
    cards = [
        node_card(
            f"n{index}",
            int(rng.uniform(low, high) * MIB),
            runner_overhead_bytes=rng.choice([0, 20 * MIB]),
            computes_float32=rng.random() < 0.2,
            speeds=(
                KindSpeed(
                    "q4g64",
                    NodeSpeed(
                        10 ** rng.uniform(9.5, 11.5),
                        10 ** rng.uniform(11.5, 13.5),
                        rng.choice([5e-4, 2e-3]),
                        2e-4,
                        rng.choice([0.0, 5e-5]),
                        rng.choice([0.0, 1e11]),
                    ),
                ),
            ),
        )
        for index in range(nodes)
    ]
    links = [
        Link(
            a.node_id,
            b.node_id,
            10 ** rng.uniform(-4.5, -1.7),
            bandwidth_bytes_per_second=10 ** rng.uniform(6.5, 9.5),
            message_seconds=rng.choice([0.0, 5e-5]),
        )
        for a in cards
        for b in cards
        if a is not b and rng.random() < 0.95
    ]
    card = model_card(
        [rng.choice([100, 100, 120, 60]) * MIB for _ in range(layers)],
        kv_elements_per_token=1024,
        hidden_size=2048,
        intermediate_size=5632,
        attention_heads=32,
        vocab_size=32_000,
        weight_kind="q4g64",
        embedding_bytes=60 * MIB,
        head_bytes=80 * MIB,
        activation_elements_per_token=2048,
        tensor_degrees=rng.choice([(2, 4), (2, 3)]),
        head_flops_per_token=2 * 2048 * 32_000,
        tied_embeddings=rng.random() < 0.3,
    )
    workload = Workload(
        context_tokens=4096,
        concurrency=rng.choice([1, 4]),
        prompt_tokens=rng.choice([100, 2000, 3000]),
        output_tokens=rng.choice([16, 200]),
        objective=rng.choice(["latency", "throughput"]),
    )
    return Problem(Topology.of(cards, links), card, workload, ANYTHING, Topology.of(cards, links).nodes, 512)


def chain_cost(holders: list[Holder], positions: tuple[int, ...], hops: int, slowest_transfer: int, k: int) -> int:
    """J of given cuts, whether they fit or not; `k` further chunks."""
    stages = [(holder, start, end) for holder, (start, end) in zip(holders, pairwise(positions), strict=True)]
    slowest_chunk = max(holder.chunk_cost(start, end) for holder, start, end in stages)
    return (
        sum(holder.cost(start, end) for holder, start, end in stages) + hops + k * max(slowest_transfer, slowest_chunk)
    )


def by_brute_force(
    problem: Problem, holders: list[Holder], least_stages: int = 1, *, grouped: bool = False
) -> int | None:
    """Least J over all sequences of holders that share no node, and all cuts."""
    last, further = len(problem.bounds) - 1, problem.terms.further_chunks
    best: int | None = None
    for size in range(least_stages, len(problem.nodes) + 1):
        for order in permutations(holders, size):
            members = [node for holder in order for node in holder.nodes]
            if len(set(members)) < len(members) or (grouped and len(members) == size):
                continue
            pairs = list(pairwise(order))
            hops = sum(problem.hop(*pair) for pair in pairs) + (problem.back(order[-1], order[0]) if pairs else 0)
            slowest = max((problem.transfer(*pair) for pair in pairs), default=0) if further else 0
            for cuts in combinations(range(1, last), size - 1):
                positions = (0, *cuts, last)
                if all(holder.allows(*ends) for holder, ends in zip(order, pairwise(positions), strict=True)):
                    cost = chain_cost(list(order), positions, hops, slowest, further)
                    best = cost if best is None else min(best, cost)
    return best


def check(found: list[Choice], best: int | None) -> None:
    if best is None:
        assert not found
        return
    assert found
    assert best <= found[0].cuts.cost <= best * CLOSE


@pytest.mark.parametrize("seed", range(150))
def test_pipelines_of_up_to_five_nodes_are_the_quickest(seed: int):
    problem = random_problem(seed, 2 + seed % 4, 7)
    check(quickest(problem), by_brute_force(problem, [problem.holder(i) for i in range(len(problem.nodes))]))


@pytest.mark.parametrize("seed", range(50))
def test_pipelines_of_six_nodes_are_the_quickest(seed: int):
    problem = random_problem(1000 + seed, 6, 6)
    check(quickest(problem), by_brute_force(problem, [problem.holder(i) for i in range(6)]))


@pytest.mark.parametrize("seed", range(16))
def test_deep_models_with_long_prompts_too(seed: int):
    """Beyond what the exact search takes on: against all orders, each with its best cuts."""
    shallow = random_problem(7000 + seed, 3 + seed % 2, layers := 90 - 20 * (seed % 2))
    cards = [replace(node, memory_usable_bytes=node.memory_usable_bytes * layers // 7) for node in shallow.nodes]
    topology = Topology.of(cards, shallow.topology.links)
    workload = replace(shallow.workload, prompt_tokens=3000)
    problem = Problem(topology, shallow.card, workload, ANYTHING, topology.nodes, 512)
    assert len(cards) * len(problem.bounds) > choice_module.EXACT_CHUNKED_WORK
    best: int | None = None
    holders = [problem.holder(index) for index in range(len(cards))]
    for size in range(1, len(cards) + 1):
        for order in permutations(holders, size):
            pairs = list(pairwise(order))
            hops = sum(problem.hop(*pair) for pair in pairs) + (problem.back(order[-1], order[0]) if pairs else 0)
            slowest = max((problem.transfer(*pair) for pair in pairs), default=0)
            cuts = quickest_cuts(order, hops, slowest, problem.terms.further_chunks)
            if cuts is not None and (best is None or cuts.cost < best):
                best = cuts.cost
    check(quickest(problem), best)


@pytest.mark.parametrize("seed", range(100))
def test_tensor_groups_are_the_quickest(seed: int):
    problem = random_problem(2000 + seed, 2 + seed % 5, 6)
    every = [problem.group(m) for n in problem.card.tensor_degrees for m in combinations(range(len(problem.nodes)), n)]
    whole = len(problem.bounds) - 1
    priced = [
        chain_cost([group], (0, whole), 0, 0, problem.terms.further_chunks) for group in every if group.allows(0, whole)
    ]
    check(quickest_with_groups(problem, groups(problem), (), 1), min(priced, default=None))


@pytest.mark.parametrize("seed", range(60))
def test_hybrids_are_the_quickest(seed: int):
    problem = random_problem(3000 + seed, 3 + seed % 2, 5)
    singles = [problem.holder(i) for i in range(len(problem.nodes))]
    every = [problem.group(m) for n in problem.card.tensor_degrees for m in combinations(range(len(problem.nodes)), n)]
    best = by_brute_force(problem, [*every, *singles], 2, grouped=True)
    check(quickest_with_groups(problem, groups(problem), singles, 2), best)


def test_what_larger_meshes_are_searched_with_is_good_in_small_ones_too(monkeypatch: pytest.MonkeyPatch):
    """Moves alone, without the exact search that follows them in small meshes: good on average, and never far off."""
    ratios: list[float] = []
    for seed in range(40):
        problem = random_problem(4000 + seed, 5, 7)
        best = by_brute_force(problem, [problem.holder(i) for i in range(5)])
        with monkeypatch.context() as patched:
            patched.setattr(choice_module, "EXACT_NODES", 0)
            found = plan(problem.topology, problem.card, problem.workload, ANYTHING).plans
        # Where only one way to fill every node fits, it is found all the same.
        assert bool(found) == (best is not None)
        if best is not None:
            ratios.append(found[0].prediction.objective_seconds * 1e12 / best)
    assert max(ratios) < 1.25
    assert sum(ratios) / len(ratios) < 1.02


@pytest.mark.parametrize("seed", range(40))
def test_what_is_minimised_is_what_is_predicted(seed: int):
    """The searches' picoseconds against the cost model's seconds, for pipelines, groups and both."""
    problem = random_problem(5000 + seed, 4, 6)
    singles = [problem.holder(i) for i in range(4)]
    for found in (
        quickest(problem),
        quickest_with_groups(problem, groups(problem), (), 1),
        quickest_with_groups(problem, groups(problem), singles, 2),
    ):
        for each in found[:3]:
            placement = problem.placement(each.stages, each.cuts.positions)
            told = predict_placement(placement, problem.topology, problem.card, problem.workload)
            assert told.objective_seconds == pytest.approx(each.cuts.cost / 1e12, rel=1e-6)


# --- more is never worse ------------------------------------------------------------------------


def seconds(topology: Topology, card, workload: Workload) -> float:
    plans = plan(topology, card, workload, ANYTHING).plans
    assert all(each.prediction is not None for each in plans)
    return plans[0].prediction.objective_seconds if plans else float("inf")


timed = workloads.map(lambda w: replace(w, objective="latency" if w.objective == "fit" else w.objective))
# What the exact search may leave out; nothing else.
SLACK = 1.003


@given(
    st.builds(
        Link,
        st.just(NodeId("ada")),
        st.just(NodeId("bea")),
        st.floats(0, 3600),
        bandwidth_bytes_per_second=st.floats(0, exclude_min=True, allow_infinity=False),
        loss=st.floats(0, 1),
        channel_rtt_seconds=st.floats(0, 3600),
        message_seconds=st.floats(0, 3600),
    ),
    st.floats(0, exclude_min=True, allow_infinity=False),
    st.floats(0, 1e12),
)
def test_a_link_with_more_bandwidth_is_never_slower_for_any_message(link, rate, message_bytes):
    low, high = sorted((link.bandwidth_bytes_per_second, rate))
    slow, quick = (
        Topology.of([node_card("ada"), node_card("bea")], [replace(link, bandwidth_bytes_per_second=each)])
        for each in (low, high)
    )
    assert hop_seconds(link_rates(quick, link.source, link.target).speed, message_bytes) <= hop_seconds(
        link_rates(slow, link.source, link.target).speed, message_bytes
    )


@settings(max_examples=60)
@given(topologies(), models(), timed, st.floats(1, 20), st.data())
def test_more_bandwidth_never_predicts_worse(topology, card, workload, factor, data):
    if not topology.links:
        return
    chosen = data.draw(st.sampled_from(topology.links))
    if not chosen.bandwidth_bytes_per_second:
        return
    quicker = replace(chosen, bandwidth_bytes_per_second=chosen.bandwidth_bytes_per_second * factor)
    after = Topology.of(topology.nodes, [quicker if link is chosen else link for link in topology.links])
    assert seconds(after, card, workload) <= seconds(topology, card, workload) * SLACK


@settings(max_examples=60)
@given(topologies(), models(), timed, st.data())
def test_a_faster_machine_never_predicts_worse(topology, card, workload, data):
    node = data.draw(st.sampled_from(topology.nodes))
    if not node.speeds:
        return
    told = node.speeds[0].speed
    faster = replace(
        told,
        stream_bytes_per_second=told.stream_bytes_per_second * data.draw(st.floats(1, 10)),
        flops_per_second=told.flops_per_second * data.draw(st.floats(1, 10)),
    )
    cards = [replace(n, speeds=(KindSpeed("q4g64", faster),)) if n is node else n for n in topology.nodes]
    after = Topology.of(cards, topology.links)
    assert seconds(after, card, workload) <= seconds(topology, card, workload) * SLACK


@settings(max_examples=60)
@given(topologies(), models(), timed, st.data())
def test_dropping_a_node_never_improves_on_the_optimum_with_it(topology, card, workload, data):
    gone = data.draw(st.sampled_from(topology.nodes))
    after = Topology.of([node for node in topology.nodes if node is not gone], topology.links)
    assert seconds(topology, card, workload) <= seconds(after, card, workload) * SLACK


@settings(max_examples=60)
@given(topologies(most=4), models(), timed)
def test_whoever_is_declined_would_have_slowed_the_choice(topology, card, workload):
    preview = plan(topology, card, workload, ANYTHING)
    for each in preview.declined:
        assert each.node_id not in preview.plans[0].placement.node_ids
        assert each.with_it >= each.without_it * (2 - SLACK)
        assert each.without_it == preview.plans[0].prediction.objective_seconds


# --- what runs already ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(topologies(), models(), timed, st.data())
def test_what_runs_stays_unless_the_gain_is_clear(topology, card, workload, data):
    free = plan(topology, card, workload, ANYTHING)
    if not free.plans:
        return
    running = data.draw(st.sampled_from(free.plans))
    best, now = free.plans[0].prediction.objective_seconds, running.prediction.objective_seconds
    kept = plan(topology, card, workload, ANYTHING, running=running.placement)
    stays = kept.plans[0].placement == running.placement
    assert stays or now - best > 0.15 * now
    assert not stays or running == free.plans[0] or now - best <= 0.15 * now
    if stays:
        assert "runs already" in kept.plans[0].reason
    more = replace(workload, concurrency=workload.concurrency + 1)
    larger = plan(topology, card, more, ANYTHING, running=running.placement)
    assert not larger.plans or larger.plans[0].placement.concurrency == more.concurrency


# --- what the operator wants ----------------------------------------------------------------------


@settings(max_examples=60)
@given(topologies(), models(), workloads, st.data())
def test_layers_that_the_operator_sets_are_as_set(topology, card, workload, data):
    free = plan(topology, card, workload, ANYTHING)
    if not free.plans:
        return
    wanted = data.draw(st.sampled_from(free.plans)).placement
    pins = tuple((seat.node_id, seat.layers) for seat in wanted.seats if data.draw(st.booleans()))
    pinned = plan(topology, card, workload, Constraints(layers=pins))
    if workload.objective != "fit":
        assert pinned.plans, "the placement that the numbers are from is one"
    for each in pinned.plans:
        held = {seat.node_id: seat.layers for seat in each.placement.seats}
        assert all(held.get(node_id) == layers for node_id, layers in pins)
        assert isinstance(validate_placement(each.placement, topology, card), Plan)


@settings(max_examples=40)
@given(topologies(), models(), workloads, st.integers(0, 30))
def test_a_memory_limit_is_kept(topology, card, workload, mib):
    node = topology.nodes[0]
    preview = plan(topology, card, workload, Constraints(memory_limits=((node.node_id, mib * MIB),)))
    for each in preview.plans:
        for seat in each.memory:
            assert seat.node_id != node.node_id or seat.need_bytes <= mib * MIB


def test_layers_that_cannot_be_are_refused_with_what_was_asked():
    card = model_card([100 * MIB] * 8)
    topology = Topology.of([node_card("ada"), node_card("bea")], [])
    pins = ((topology.nodes[0].node_id, 5), (topology.nodes[1].node_id, 4))
    refused = plan(topology, card, Workload(256, 1), Constraints(layers=pins))
    assert refused.plans == ()
    assert refused.refusals[0].constraint == "layers"
    assert "ada=5, bea=4" in refused.refusals[0].explanation
