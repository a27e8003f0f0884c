"""Sizes of a model: parts add up to the whole, and embeddings are counted where they live."""

from hypothesis import given
from hypothesis import strategies as st
from planning_cases import models

from meshinfer.base.units import MIB
from meshinfer.planning.model_card import CACHE_BLOCK_TOKENS, LayerCard, ModelCard, TensorBytes
from meshinfer.testing.cards import model_card
from meshinfer.wire.codec import decode, encode


@given(models(), st.booleans(), st.data())
def test_the_parts_weigh_what_the_whole_weighs(card, wide, data):
    whole = card.weight_bytes(0, card.layer_count, wide)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, card.layer_count - 1)), max_size=4)) - {card.layer_count})
    parts = sum(
        card.weight_bytes(start, end, wide) for start, end in zip([0, *cuts], [*cuts, card.layer_count], strict=True)
    )
    again = card.embedding.resident(wide) if cuts and card.tied_embeddings else 0
    everywhere = len(cuts) * card.every_stage.resident(wide)
    assert parts == whole + again + everywhere


@given(models(), st.integers(1, 9000), st.integers(1, 8), st.booleans(), st.data())
def test_caches_add_up_over_layers_and_sessions(card, context, sessions, wide, data):
    middle = data.draw(st.integers(0, card.layer_count))

    def cache(start, end, count=sessions):
        return card.cache_bytes(start, end, context, count, wide)

    assert cache(0, card.layer_count) == cache(0, middle) + cache(middle, card.layer_count)
    assert cache(0, card.layer_count) == sessions * cache(0, card.layer_count, 1)
    assert cache(0, card.layer_count) <= card.cache_bytes(0, card.layer_count, context + 1, sessions, wide)


@given(models())
def test_a_card_travels(card):
    assert decode(ModelCard, encode(card)) == card


def test_float_parameters_take_four_bytes_where_the_engine_computes_in_fp32():
    assert TensorBytes(100, 10, 20).resident(False) == 120
    assert TensorBytes(100, 10, 20).resident(True) == 140


def test_a_tied_embedding_is_held_at_both_ends_and_once_by_one_node():
    card = model_card([MIB] * 4, embedding_bytes=7 * MIB, tied_embeddings=True)
    assert card.weight_bytes(0, 2, False) == 9 * MIB
    assert card.weight_bytes(2, 4, False) == 9 * MIB
    assert card.weight_bytes(1, 3, False) == 2 * MIB
    assert card.weight_bytes(0, 4, False) == 11 * MIB


def test_an_untied_head_is_held_by_the_last_stage():
    card = model_card([MIB] * 4, embedding_bytes=7 * MIB, head_bytes=5 * MIB)
    assert [card.weight_bytes(a, b, False) // MIB for a, b in ((0, 2), (2, 4), (0, 4))] == [9, 7, 16]


def test_caches_grow_in_blocks_stop_at_the_window_and_hold_fixed_state():
    grown = LayerCard(TensorBytes(), kv_elements_per_token=10)
    window = LayerCard(TensorBytes(), kv_elements_per_token=10, kv_tokens_limit=100)
    state = LayerCard(TensorBytes(), kv_elements_per_token=0, state_elements=77)
    card = model_card([0, 0, 0])
    card = ModelCard(**{**{f: getattr(card, f) for f in ModelCard.__slots__}, "layers": (grown, window, state)})
    assert card.cache_bytes(0, 1, 1, 1, False) == 10 * CACHE_BLOCK_TOKENS * 2
    assert card.cache_bytes(0, 1, 257, 1, True) == 10 * 2 * CACHE_BLOCK_TOKENS * 4
    assert card.cache_bytes(1, 2, 5000, 3, False) == 10 * 100 * 3 * 2
    assert card.cache_bytes(2, 3, 5000, 2, False) == 77 * 2 * 2
