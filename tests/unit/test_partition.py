"""Where to cut: held against all cuts by hand."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import models, nodes, placement_of, workloads

from meshinfer.base.units import MIB
from meshinfer.planning.memory import FULL, RangeNeeds, Room, activation_bytes, seat_memory
from meshinfer.planning.partition import balanced_cuts, boundaries, furthest
from meshinfer.testing.cards import model_card


def rooms_of(cards, card, workload, chunk=512):
    return [
        Room(
            RangeNeeds.of(card, workload.context_tokens, workload.concurrency, node.computes_float32, chunk),
            node.runner_overhead_bytes,
            node.memory_free_bytes,
        )
        for node in cards
    ]


@given(models(), nodes(), workloads, st.integers(1, 2048), st.data())
def test_the_table_of_needs_is_the_seat_s_memory(card, cards, workload, chunk, data):
    """The searches and the leases count the same bytes."""
    start = data.draw(st.integers(0, card.layer_count - 1))
    end = data.draw(st.integers(start + 1, card.layer_count))
    for node, room in zip(cards, rooms_of(cards, card, workload, chunk), strict=True):
        seat = placement_of(card, workload, [node.node_id], (start, end))
        memory = seat_memory(card, seat, 0, node, chunk)
        assert room.need(start, end) == memory.need_bytes
        assert room.fits(start, end) == (memory.shortfall_bytes == 0) == (room.share(start, end) <= FULL)


@given(models(), nodes(), workloads)
def test_widening_a_seat_never_makes_it_smaller(card, cards, workload):
    last = card.layer_count
    for room in rooms_of(cards, card, workload):
        for start, end in combinations(range(last + 1), 2):
            assert end == last or room.need(start, end) <= room.need(start, end + 1)
            assert start == 0 or room.need(start, end) <= room.need(start - 1, end)


@given(models(), nodes(), workloads)
def test_furthest_is_the_furthest(card, cards, workload):
    bounds = boundaries(card)
    for room in rooms_of(cards, card, workload):
        for start, end in enumerate(furthest(room, bounds)):
            fitting = [j for j in range(start + 1, len(bounds)) if room.fits(bounds[start], bounds[j])]
            assert end == max(fitting, default=start)


@given(models(), nodes(most=4), workloads, st.booleans())
def test_balanced_cuts_are_the_best_of_all_cuts(card, cards, workload, must_fit):
    rooms = rooms_of(cards, card, workload)
    bounds = boundaries(card)
    last = len(bounds) - 1

    def shares(cuts):
        return [room.share(bounds[a], bounds[b]) for room, (a, b) in zip(rooms, pairwise(cuts), strict=True)]

    every = [(0, *inner, last) for inner in combinations(range(1, last), len(rooms) - 1)]
    fitting = [cuts for cuts in every if not must_fit or max(shares(cuts)) <= FULL]
    cuts = balanced_cuts(rooms, bounds, must_fit)
    if not fitting:
        assert cuts is None
        return
    assert cuts in fitting
    worst = max(shares(cuts))
    assert worst == min(max(shares(other)) for other in fitting)
    squares = [sum(share**2 for share in shares(other)) for other in fitting if max(shares(other)) == worst]
    assert sum(share**2 for share in shares(cuts)) == min(squares)


@given(st.lists(st.integers(-3, 12)), st.integers(1, 10))
def test_boundaries_are_a_partition_whatever_the_card_says(cut_points, count):
    bounds = boundaries(model_card([MIB] * count, cut_points=cut_points))
    assert bounds[0] == 0
    assert bounds[-1] == count
    assert all(a < b for a, b in pairwise(bounds))
    assert set(bounds[1:-1]) <= set(cut_points)


def test_sixty_one_layers_on_two_equal_nodes():
    """What an averaged split loses (layer 30 with nobody, in a peer's code), a partition by bytes cannot."""
    card = model_card([MIB] * 61)
    needs = RangeNeeds.of(card, 1, 1, False, 1)
    room = Room(needs, 0, 100 * MIB)
    cuts = balanced_cuts([room, room], boundaries(card))
    assert cuts is not None
    assert cuts in {(0, 30, 61), (0, 31, 61)}


@pytest.mark.parametrize(
    ("layers", "chunk", "context", "prompts", "measured_mb"),
    [
        (4, 512, 2048, 1, 62.6),
        (8, 512, 2048, 1, 62.9),
        (4, 256, 2048, 1, 32.0),
        (4, 512, 4096, 1, 104.1),
        (6, 256, 1024, 4, 86.7),
    ],
)
def test_activation_peak_agrees_with_what_was_measured(layers, chunk, context, prompts, measured_mb):
    """Llama layers of SmolLM2-135M's width on the CPU engine: peak above weights and the chunk's own cache."""
    card = model_card(
        [MIB] * layers,
        kv_elements_per_token=2 * 3 * 64,
        hidden_size=576,
        intermediate_size=1536,
        attention_heads=9,
        vocab_size=2000,
    )
    predicted = activation_bytes(card, context, prompts, True, chunk) / 1e6
    assert measured_mb <= predicted <= measured_mb * 1.2


def test_a_card_that_does_not_know_its_widths_is_counted_generously():
    known = model_card(hidden_size=4096, intermediate_size=14_336, attention_heads=32)
    unknown = model_card(hidden_size=4096, intermediate_size=0, attention_heads=0)
    for wide in (False, True):
        assert activation_bytes(unknown, 4096, 1, wide, 512) >= activation_bytes(known, 4096, 1, wide, 512)
