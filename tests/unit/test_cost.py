"""The cost model: each term against its formula, and never slower for having more."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.planning.cost import (
    LayerWork,
    ModelWork,
    Stage,
    _power,
    all_reduce_seconds,
    decode_time,
    hop_seconds,
    layer_decode_seconds,
    layer_prefill_seconds,
    predict,
    prefill_time,
    tokens_per_second,
    worth_moving,
)
from meshinfer.testing.phantoms import FAST, MIDDLING, SLOW, dense_model
from meshinfer.topology.speed import LinkSpeed, NodeSpeed

LAYER = LayerWork(dense_bytes=1000.0, flops_per_token=2000.0, cache_bytes_per_token=10.0, attention_flops_per_pair=4.0)
NODE = NodeSpeed(1000.0, 1e6, 0.5, 0.25)
LINK = LinkSpeed(0.1, 1000.0, 0.02)
MODEL = ModelWork((LAYER,) * 4, 8.0, 500.0, 1000.0, 100.0)

speeds = st.builds(NodeSpeed, st.floats(1e9, 1e12), st.floats(1e11, 1e14), st.floats(0, 0.01), st.floats(0, 0.001))
links = st.builds(LinkSpeed, st.floats(0, 0.1), st.floats(1e-3, 1e18), st.floats(0, 0.001))
layers = st.builds(
    LayerWork,
    st.floats(1e6, 1e9),
    st.floats(1e6, 1e10),
    st.floats(0, 1e4),
    st.sampled_from([0, 1024]),
    st.floats(0, 1e6),
    st.floats(0, 1e5),
    st.sampled_from([0, 8]),
    st.integers(1, 8),
    st.floats(0, 1e8),
)


@st.composite
def models_and_stages(draw):
    model = ModelWork(tuple(draw(st.lists(layers, min_size=1, max_size=6))), 1e4, 1e8, 1e9, 16384.0)
    count = len(model.layers)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
    stages = []
    for start, end in zip([0, *cuts], [*cuts, count], strict=True):
        ranks = tuple(draw(st.lists(speeds, min_size=1, max_size=3)))
        stages.append(Stage(start, end, ranks, draw(links) if len(ranks) > 1 else None))
    hops = [draw(links) for _ in stages] if len(stages) > 1 else []
    return model, stages, hops


WORKLOAD = {"prompt_tokens": 1000, "output_tokens": 200, "concurrency": 4, "chunk_tokens": 512}


# --- each term ----------------------------------------------------------------------------------


def test_a_decode_step_streams_weights_and_caches():
    # (1000 weights + 2 sessions × 50 tokens × 10) / 1000 a second; the arithmetic hides behind it.
    assert layer_decode_seconds(LAYER, NODE, 2, 50) == pytest.approx(2.0)
    slow_at_sums = replace(NODE, flops_per_second=1000.0)
    assert layer_decode_seconds(LAYER, slow_at_sums, 2, 50) == pytest.approx(2 * (2000 + 50 * 4) / 1000)
    assert layer_decode_seconds(LAYER, NODE, 2, 50, share=0.5) == pytest.approx(1.0)


def test_a_sliding_window_stops_the_cache_from_growing():
    window = replace(LAYER, cache_tokens_limit=20)
    assert layer_decode_seconds(window, NODE, 1, 1e6) == layer_decode_seconds(LAYER, NODE, 1, 20)


def test_state_is_read_whatever_the_context():
    assert layer_decode_seconds(replace(LAYER, state_bytes=500.0), NODE, 1, 0) == pytest.approx(1.5)


def test_a_prefill_chunk_is_arithmetic_until_it_is_short():
    assert layer_prefill_seconds(LAYER, NODE, 10_000, 100) == pytest.approx(10_000 * (2000 + 400) / 1e6)
    assert layer_prefill_seconds(LAYER, NODE, 1, 100) == pytest.approx(1.0)  # the weights have to be read all the same


def test_a_layer_has_a_price_of_its_own_and_the_cache_its_own_rate() -> None:
    priced = replace(NODE, layer_overhead_seconds=0.25)
    for share in (1.0, 0.5):  # a rank that does half of a layer dispatches as much as one that does it all
        for seconds in (layer_decode_seconds, layer_prefill_seconds):
            assert seconds(LAYER, priced, 1, 50, share) == pytest.approx(seconds(LAYER, NODE, 1, 50, share) + 0.25)
    quick = replace(NODE, cache_bytes_per_second=1e12, flops_per_second=1e18)
    assert layer_decode_seconds(LAYER, quick, 1, 50) == pytest.approx(layer_decode_seconds(LAYER, quick, 1, 0))


def test_experts_are_read_as_often_as_they_are_visited():
    layer = LayerWork(100.0, 1.0, experts=8, experts_per_token=2, expert_bytes=10.0)
    assert layer.active_bytes(1) == pytest.approx(100 + 2 * 10)
    assert layer.active_bytes(2) == pytest.approx(100 + 8 * 10 * (1 - 0.75**2))
    assert layer.active_bytes(10_000) == pytest.approx(180)


def test_the_ends_of_a_pipeline_do_what_the_middle_does_not():
    first, middle, last = (decode_time(MODEL, Stage(a, a + 1, (NODE,)), 2, 0) for a in (0, 1, 3))
    assert middle.compute_seconds == pytest.approx(1.0)
    assert first.compute_seconds == pytest.approx(1.0 + 2 * 8 / 1000)
    assert last.compute_seconds == pytest.approx(1.0 + 500 / 1000 + 2 * 0.25)
    assert {first.overhead_seconds, middle.overhead_seconds, last.overhead_seconds} == {0.5}
    assert prefill_time(MODEL, Stage(2, 3, (NODE,)), 1, 0).compute_seconds == pytest.approx(1.0)
    assert prefill_time(MODEL, Stage(2, 4, (NODE,)), 1, 0).compute_seconds == pytest.approx(1.0), "keys and values only"


PACKED = replace(NODE, flops_per_second=1e4, row_bytes_per_second=2000.0, pass_bytes_per_second=500.0)
"""A CPU that unpacks: 1 s a row of LAYER, 0.5 s each further one, 2 s before a chunk and 0.2 s a token of it."""


@pytest.mark.parametrize(("chunk", "seconds"), [(1, 2.2), (10, 4.0), (100, 22.0)])
def test_a_chunk_is_unpacked_once_and_multiplied_for_each_token(chunk, seconds):
    assert layer_prefill_seconds(LAYER, PACKED, chunk, 0) == pytest.approx(seconds)


@pytest.mark.parametrize(("batch", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.0), (4, 2.5), (5, 3.0), (8, 3.6)])
def test_a_few_sessions_go_row_by_row_and_many_as_a_chunk(batch, seconds):
    assert layer_decode_seconds(LAYER, PACKED, batch, 0) == pytest.approx(seconds)


def test_rows_of_experts_read_again_what_others_read():
    """4 experts, 1 a token: two rows read 1.75 of them on average, so a quarter of one is read again."""
    layer = LayerWork(dense_bytes=0.0, flops_per_token=0.0, experts=4, experts_per_token=1, expert_bytes=1000.0)
    assert layer_decode_seconds(layer, PACKED, 2, 0) == pytest.approx(1.75 + 0.25 / 2)


def test_a_hop_is_latency_software_and_bytes():
    assert hop_seconds(LINK, 50) == pytest.approx(0.1 + 0.02 + 0.05)


@pytest.mark.parametrize(
    ("message_bytes", "seconds"),
    [
        (14_600, 0.00146),
        (14_601, 0.1 + 1e-7),
        (43_800, 0.1 + 0.00292),
        (500_000, 5 * 0.1 + (500_000 - 31 * 14_600) / 1e7),
    ],
)
def test_a_long_link_starts_slowly(message_bytes, seconds):
    """10 segments a round trip, then 20, 40, …"""
    long = LinkSpeed(0.05, 1e7)
    assert hop_seconds(long, message_bytes) == pytest.approx(0.05 + seconds)


def test_a_link_that_ten_segments_fill_never_waits():
    assert hop_seconds(LinkSpeed(0.001, 1e6), 1e6) == pytest.approx(0.001 + 1.0)


@given(links, st.floats(0, 1e8), st.floats(1, 100))
def test_more_bytes_take_longer_and_more_bandwidth_does_not(link, message_bytes, factor):
    told = hop_seconds(link, message_bytes)
    assert hop_seconds(link, message_bytes * factor) >= told * (1 - 1e-9)
    more = replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * factor)
    assert hop_seconds(more, message_bytes) <= told * (1 + 1e-9)


def test_one_stream_is_the_sum_of_its_parts():
    stages = [Stage(0, 2, (NODE,)), Stage(2, 4, (NODE,))]
    told = predict(MODEL, stages, [LINK, LINK], **WORKLOAD)
    steps = [stage.seconds for stage in told.stages]
    assert told.tpot_seconds == pytest.approx(sum(steps) + sum(told.hop_seconds))
    assert told.compute_seconds + told.overhead_seconds == pytest.approx(sum(steps))
    assert told.hop_seconds == pytest.approx((0.12 + 100 / 1000, 0.12 + 64 / 1000))


def test_prefill_chunks_overlap_over_the_stages():
    """K chunks cost one way through and K − 1 times the slowest stage."""
    stages = [Stage(0, 2, (NODE,)), Stage(2, 4, (NODE,))]
    quick = LinkSpeed(0.0, 1e15)
    # A prompt's last token is a step of its own: 4 chunks of 512, and one decode step.
    told = predict(MODEL, stages, [quick, quick], **{**WORKLOAD, "prompt_tokens": 2049})
    chunks = [prefill_time(MODEL, stage, 512, 2049 / 2).seconds for stage in stages]
    assert told.chunk_seconds == pytest.approx(chunks)
    assert told.ttft_seconds == pytest.approx(sum(chunks) + 3 * max(chunks) + told.tpot_seconds, rel=1e-6)


def test_a_slow_link_sets_the_pace_of_a_long_prompt():
    stages = [Stage(0, 2, (NODE,)), Stage(2, 4, (NODE,))]
    slow = LinkSpeed(0.0, 1.0)
    told = predict(MODEL, stages, [slow, LINK], **{**WORKLOAD, "prompt_tokens": 5120})
    assert told.ttft_seconds > 10 * 512 * 100 / 1.0


def test_micro_batches_fill_the_pipeline():
    stages = [Stage(0, 2, (NODE,)), Stage(2, 4, (NODE,))]
    quick = [LinkSpeed(0.0, 1e12)] * 2
    one, two = (tokens_per_second(MODEL, stages, quick, concurrency, 0, in_flight=2) for concurrency in (1, 2))
    assert two >= 1.6 * one
    # With one at a time, as in this build, two sessions share a step and no more.
    together = tokens_per_second(MODEL, stages, quick, 2, 0)
    assert together == pytest.approx(2 / sum(decode_time(MODEL, stage, 2, 0).seconds for stage in stages))


def test_a_ring_all_reduce():
    assert all_reduce_seconds(2, 1000, LINK) == pytest.approx(2 * 0.12 + 1.0)
    assert all_reduce_seconds(4, 1000, LINK) == pytest.approx(6 * 0.12 + 1.5)


def test_tensor_beats_one_node_only_on_quick_links():
    """A 70B in 4 bits at 50 ms a step on 2 nodes: 78 µs; TCP at 300 µs loses, RDMA under 50 µs wins."""
    limit = 0.05 / (4 * 80 * 2)
    model = dense_model().work
    node = NodeSpeed(sum(layer.dense_bytes for layer in model.layers) / 0.05, 1e15, 0.0)
    alone = decode_time(model, Stage(0, 80, (node,)), 1, 0).seconds
    for latency in (300e-6, 90e-6, 50e-6, 20e-6):
        pair = Stage(0, 80, (node, node), LinkSpeed(latency, 1e12))
        assert (decode_time(model, pair, 1, 0).seconds < alone) == (latency < limit)


def test_uneven_shares_suit_uneven_ranks():
    even = Stage(0, 4, (NODE, replace(NODE, stream_bytes_per_second=3000.0)), LinkSpeed(0.0, 1e12))
    uneven = replace(even, shares=(0.25, 0.75))
    assert decode_time(MODEL, uneven, 1, 0).compute_seconds < decode_time(MODEL, even, 1, 0).compute_seconds


def test_what_is_warm_stays_unless_the_gain_is_clear():
    assert not worth_moving(1.0, 0.86)
    assert worth_moving(1.0, 0.84)


# --- what holds always --------------------------------------------------------------------------


def _times(told):
    return (told.ttft_seconds, told.tpot_seconds, 1 / told.tokens_per_second)


@given(models_and_stages(), st.data())
def test_more_of_anything_is_never_slower(case, data):
    model, stages, hops = case
    before = predict(model, stages, hops, **WORKLOAD)
    factor = data.draw(st.floats(1, 10))
    index = data.draw(st.integers(0, len(stages) - 1))
    change = data.draw(st.sampled_from(["stream", "flops", "overhead", "latency", "bandwidth"]))
    if change in ("latency", "bandwidth") and hops:
        link = hops[index]
        hops[index] = (
            replace(link, latency_seconds=link.latency_seconds / factor)
            if change == "latency"
            else replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * factor)
        )
    else:
        field = {"flops": "flops_per_second", "overhead": "step_overhead_seconds"}.get(
            change, "stream_bytes_per_second"
        )
        by = 1 / factor if change == "overhead" else factor
        ranks = tuple(replace(node, **{field: getattr(node, field) * by}) for node in stages[index].ranks)
        stages[index] = replace(stages[index], ranks=ranks)
    after = predict(model, stages, hops, **WORKLOAD)
    assert all(a <= b * (1 + 1e-12) for a, b in zip(_times(after), _times(before), strict=True))


@given(models_and_stages(), st.integers(1, 16), st.integers(1, 4000))
def test_predictions_are_finite_and_their_parts_add_up(case, concurrency, prompt):
    model, stages, hops = case
    told = predict(
        model, stages, hops, prompt_tokens=prompt, output_tokens=100, concurrency=concurrency, chunk_tokens=512
    )
    assert all(math.isfinite(value) and value > 0 for value in _times(told))
    steps = [stage.seconds for stage in told.stages]
    assert told.tpot_seconds == pytest.approx(sum(steps) + sum(told.hop_seconds))
    # No stage takes a step more often than it can.
    assert told.tokens_per_second <= concurrency / max(steps) * (1 + 1e-9)
    assert told.tokens_per_second >= 1 / predict(model, stages, hops, **{**WORKLOAD, "prompt_tokens": prompt,
        "output_tokens": 100, "concurrency": 1}).tpot_seconds * (1 - 1e-9)  # fmt: skip


@given(models_and_stages(), st.integers(1, 512))
def test_a_longer_prompt_takes_longer(case, tokens):
    model, stages, hops = case
    shorter, longer = (
        predict(model, stages, hops, **{**WORKLOAD, "prompt_tokens": n}).ttft_seconds for n in (tokens * 2, tokens * 4)
    )
    assert shorter <= longer * (1 + 1e-12)


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_powers_are_multiplied_out(base, exponent):
    assert _power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)


def test_one_fast_node_beats_a_pipeline_with_slow_ones():
    work = dense_model(layers=32, hidden=4096, inner=14_336).work
    alone = predict(work, [Stage(0, 32, (FAST,))], [], **WORKLOAD)
    wire = LinkSpeed(2e-4, 117e6, 5e-5)
    rng = Random(1)
    for _ in range(20):
        cut = rng.randint(1, 31)
        pair = predict(work, [Stage(0, cut, (FAST,)), Stage(cut, 32, (rng.choice((SLOW, MIDDLING)),))], [wire] * 2,
                       **WORKLOAD)  # fmt: skip
        assert pair.tpot_seconds > alone.tpot_seconds
