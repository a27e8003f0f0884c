"""A card says what a seat will hold, and describing reads no weight."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import CONFIGS, VOCABULARY, config_of, write_model

from meshinfer.base.errors import CorruptModel
from meshinfer.base.ids import ModelId
from meshinfer.engine.describe import describe_model
from meshinfer.engine.loader import load_seat, open_model, parameters_read_by
from meshinfer.engine.stage import Stage
from meshinfer.engine.structure import Structure, arrays_in
from meshinfer.planning.memory import cache_bytes
from meshinfer.planning.model_card import ModelCard, TensorBytes
from meshinfer.wire.codec import decode, encode

NAME = ModelId("tests/tiny")
POSITIONS = {"gpt2"}
"""Has position embeddings beside a tied one, which the last stage does not need."""


def described(directory: Path, name: str, dtype: mx.Dtype = mx.bfloat16) -> ModelCard:
    write_model(directory, name, dtype)
    gc.collect()
    return describe_model(directory, NAME)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_card_says_what_seats_will_hold(name: str, tmp_path: Path) -> None:
    card = described(tmp_path, name)
    bounds = {(0, card.layer_count)}
    for cut in card.cut_points[:2]:
        bounds |= {(0, cut), (cut, card.layer_count)}
    bounds |= set(pairwise(card.cut_points))
    for start, end in bounds:
        seat = load_seat(tmp_path, start, end, computes_float32=True)
        narrow = parameters_read_by(Stage(open_model(tmp_path)[0], start, end))
        for holds, wide in ((seat.weight_bytes, True), (sum(array.nbytes for array in narrow.values()), False)):
            promised = card.weight_bytes(start, end, wide)
            # With tied embeddings the last seat is charged all that the first one reads outside its layers.
            more = card.embedding.resident(wide) if name in POSITIONS and end == card.layer_count else 0
            assert holds <= promised <= holds + more, f"{name} [{start}, {end}) {wide}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_card_says_what_caches_will_hold(name: str, tmp_path: Path) -> None:
    """Against the real cache of a real run, in a multiple of the block that mlx-lm allocates in."""
    card = described(tmp_path, name, mx.float32)
    tokens = 256
    seat = load_seat(tmp_path, 0, None, computes_float32=True)
    cache = seat.stage.make_cache()
    for start in range(0, tokens, 64):
        mx.eval(seat.stage(mx.full((1, 64), start % VOCABULARY), None, cache), seat.stage.state_arrays(cache))
    # One at a time at the end, as in decoding: windows shrink to their own size.
    mx.eval(seat.stage(mx.zeros((1, 1), mx.int32), None, cache), seat.stage.state_arrays(cache))
    held = sum(array.nbytes for array in seat.stage.state_arrays(cache) if array.ndim > 1)
    promised = card.cache_bytes(0, card.layer_count, tokens, 1, True)
    more_block = card.cache_bytes(0, card.layer_count, tokens + 1, 1, True)
    assert promised <= held <= more_block


@pytest.mark.parametrize("name", ["llama-sliding", "gemma3_text", "gpt_oss", "cohere2"])
def test_windows_hold_a_chunk_beside_themselves_while_a_prompt_is_read(name: str, tmp_path: Path) -> None:
    card = described(tmp_path, name, mx.float32)
    tokens, chunk = 256, 64
    seat = load_seat(tmp_path, 0, None, computes_float32=True)
    cache = seat.stage.make_cache()
    held: list[int] = []
    for start in range(0, tokens, chunk):
        mx.eval(seat.stage(mx.full((1, chunk), start % VOCABULARY), None, cache), seat.stage.state_arrays(cache))
        held.append(sum(array.nbytes for array in seat.stage.state_arrays(cache) if array.ndim > 1))
    windows_only = card.cache_bytes(0, card.layer_count, tokens, 1, True)
    promised = cache_bytes(card, 0, card.layer_count, tokens, 1, True, chunk)
    assert windows_only < max(held) <= promised, "counting windows alone would have been too little"
    one_token_each = sum(4 * layer.kv_elements_per_token for layer in card.layers if layer.kv_tokens_limit)
    assert promised - max(held) <= one_token_each, "and no more than is needed"


@pytest.mark.parametrize("name", CONFIGS)
def test_describing_reads_no_weight(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    card = describe_model(tmp_path, NAME)
    least = min(layer.weights.resident(False) for layer in card.layers)
    assert mx.get_peak_memory() - before < max(least / 2, 4096), "not even the smallest layer"


def test_a_plain_card(tmp_path: Path) -> None:
    card = described(tmp_path, "llama")
    config = config_of("llama")
    assert (card.model_id, card.model_type) == (NAME, "llama")
    assert (card.hidden_size, card.vocab_size, card.max_context_tokens) == (32, VOCABULARY, 512)
    assert (card.intermediate_size, card.attention_heads) == (64, 4)
    assert card.cut_points == (1, 2, 3, 4)
    assert not card.tied_embeddings
    assert card.embedding.float_elements == VOCABULARY * 32
    assert card.head.float_elements == VOCABULARY * 32 + 32, "output weights and the final norm"
    assert (card.embedding.float_bytes, card.float_bytes_per_element) == (VOCABULARY * 32 * 2, 2)
    assert card.activation_elements_per_token == 32
    per_token = 2 * config["num_key_value_heads"] * config["head_dim"]
    assert [(c.kv_elements_per_token, c.kv_tokens_limit, c.state_elements) for c in card.layers] == [
        (per_token, 0, 0)
    ] * 5
    assert decode(ModelCard, encode(card)) == card


def test_a_card_says_what_a_token_costs(tmp_path: Path) -> None:
    card = described(tmp_path, "llama")
    assert (card.weight_kind, card.head_kind) == ("bfloat16", "bfloat16")
    attention, mlp = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64
    assert {layer.flops_per_token for layer in card.layers} == {2 * (attention + mlp)}, "norms are next to nothing"
    heads, width = 4, 8
    assert {layer.attention_flops_per_pair for layer in card.layers} == {4 * heads * width}
    assert {(layer.experts, layer.experts_per_token, layer.expert) for layer in card.layers} == {(0, 0, TensorBytes())}
    assert card.head_flops_per_token == 2 * VOCABULARY * 32
    assert card.embedding_row == TensorBytes(float_elements=32, float_bytes=64)
    assert card.tensor_degrees == (2,), "two heads of keys and values"


def test_a_token_visits_some_experts_only(tmp_path: Path) -> None:
    card = described(tmp_path, "qwen3_moe")
    attention, router, expert = 2 * 32 * 32 + 2 * 32 * 16, 32 * 4, 3 * 32 * 16
    for layer in card.layers:
        assert (layer.experts, layer.experts_per_token) == (4, 2)
        assert layer.expert == TensorBytes(float_elements=expert, float_bytes=2 * expert)
        assert layer.flops_per_token == 2 * (attention + router + 2 * expert)
        assert layer.weights.float_elements > 4 * expert, "all of them are held"


def test_costs_of_other_families(tmp_path: Path) -> None:
    latent = described(tmp_path / "latent", "deepseek_v3")
    assert [layer.experts for layer in latent.layers] == [0, 4, 4, 4, 4]
    scored, summed = 16 + 8, 16
    assert {layer.attention_flops_per_pair for layer in latent.layers} == {2 * 4 * (scored + summed)}
    hybrid = described(tmp_path / "hybrid", "nemotron_h")
    assert [bool(layer.attention_flops_per_pair) for layer in hybrid.layers] == [False, False, True] * 2
    assert hybrid.layers[0].flops_per_token > 2 * hybrid.layers[0].weights.float_elements, "and the scan"
    assert hybrid.tensor_degrees == (), "mlx-lm cannot shard it"


def test_families_differ_where_they_should(tmp_path: Path) -> None:
    def card(name: str) -> ModelCard:
        return described(tmp_path / name, name)

    sliding = card("gpt_oss")
    assert [layer.kv_tokens_limit for layer in sliding.layers] == [6, 0] * 3
    assert {layer.kv_elements_per_token for layer in card("mamba2").layers} == {0}
    hybrid = card("nemotron_h")
    assert [bool(layer.state_elements) for layer in hybrid.layers] == [True, False, False] * 2
    assert [bool(layer.kv_elements_per_token) for layer in hybrid.layers] == [False, False, True] * 2
    latent = card("deepseek_v3")
    assert {layer.kv_elements_per_token for layer in latent.layers} == {16 + 8}, "the latent and the rotary part"
    assert latent.layers[0].weights != latent.layers[1].weights, "the first layer is dense"
    assert latent.intermediate_size == 64
    assert card("rwkv7").activation_elements_per_token == 64
    shared = card("gemma4_text")
    assert [bool(layer.kv_elements_per_token) for layer in shared.layers] == [True] * 6 + [False] * 2


def test_embeddings_that_each_layer_is_fed_are_charged_to_every_stage(tmp_path: Path) -> None:
    card = described(tmp_path, "gemma3n")
    assert card.every_stage.float_elements > VOCABULARY * 6 * 8
    assert card.weight_bytes(1, 2, True) > card.every_stage.resident(True)
    assert described(tmp_path / "plain", "llama").every_stage.resident(True) == 0


def test_packed_and_float_bytes_stand_apart(tmp_path: Path) -> None:
    write_model(tmp_path, "llama", quantization={"group_size": 32, "bits": 4})
    card = describe_model(tmp_path, NAME)
    assert (card.weight_kind, card.head_kind) == ("q4g32", "q4g32")
    assert card.embedding_row == TensorBytes(packed_bytes=16, float_elements=2, float_bytes=4)
    assert card.head_flops_per_token == 2 * VOCABULARY * 32
    assert card.tensor_degrees == (), "a half of 32 is no whole group of 32"
    layer = card.layers[2].weights
    linear = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    assert layer.packed_bytes == linear // 2
    assert layer.float_elements == linear // 32 * 2 + 2 * 32, "scales and biases, and two norms"
    assert (layer.float_bytes, layer.resident(True)) == (
        2 * layer.float_elements,
        layer.packed_bytes + 4 * layer.float_elements,
    )


def test_the_digest_is_of_config_and_every_file(tmp_path: Path) -> None:
    write_model(tmp_path, files=2)
    card = describe_model(tmp_path, NAME)
    last = max(tmp_path.glob("*.safetensors"))
    stored = last.read_bytes()
    last.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    assert describe_model(tmp_path, NAME).digest != card.digest
    last.write_bytes(stored)
    assert describe_model(tmp_path, NAME).digest == card.digest
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + " ")
    assert describe_model(tmp_path, NAME).digest != card.digest


def test_a_broken_model_has_no_card(tmp_path: Path) -> None:
    write_model(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptModel, match="cut short"):
        describe_model(tmp_path, NAME)


def test_structure_and_caches_agree(tmp_path: Path) -> None:
    """What `describe` reads off mlx-lm's caches: keys [batch, heads, tokens, width], or a list of arrays."""
    for name in CONFIGS:
        model = write_model(tmp_path / name, name)
        cache = make_prompt_cache(model)
        model(mx.zeros((1, 3), mx.int32), cache=cache)
        used = {index for wiring in Structure.probe(model).layers for index in wiring.cache_indices}
        assert used == {index for index, entry in enumerate(cache) if list(arrays_in(entry.state))}, name
