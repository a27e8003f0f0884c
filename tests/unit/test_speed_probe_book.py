"""What is measured when: a machine of pure values, by clock and card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import BadInput
from meshinfer.serving.speed_book import (
    FAILED_AGAIN_SECONDS,
    FINGERPRINTS_LIMIT,
    KINDS_LIMIT,
    UNSTEADY_AGAIN_SECONDS,
    UNSTEADY_TRIES,
    USUAL_KIND,
    SpeedBook,
    wanted_kinds,
)
from meshinfer.testing.cards import model_card, node_card
from meshinfer.topology.card import KindSpeed
from meshinfer.topology.speed import NodeSpeed
from meshinfer.wire.speed_probe import LayerShape, MeasuredKind, MemoryTrial, SpeedReport, is_kind, packing_of

SPEED = NodeSpeed(1e9, 1e11, 1e-4)
WANTED = {"q4g64": LayerShape(), "float32": LayerShape()}


def report(*kinds: str, spread: float = 0.01, speed: NodeSpeed = SPEED, memory: MemoryTrial | None = None):
    return SpeedReport(tuple(MeasuredKind(kind, speed, spread, 5) for kind in kinds), memory, 1.0)


# --- kinds and shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "q4g32", "q8g64", "q6g128", "mxfp4", "nvfp4"])
def test_kinds_that_engines_have(kind: str) -> None:
    assert is_kind(kind)
    assert (packing_of(kind) is None) == kind.startswith(("float", "bfloat"))


@given(st.text(max_size=40))
def test_any_other_name_is_refused(text: str) -> None:
    """Names of kinds come from other nodes' cards, and go into a command line."""
    if is_kind(text):
        assert text.isascii()
        assert text.isalnum()
    else:
        with pytest.raises(BadInput):
            packing_of(text)


@given(st.builds(lambda heads, ratio, width, i, v: LayerShape(heads * ratio * width, i, heads * ratio, heads, v),
                 st.integers(1, 8), st.integers(1, 8), st.integers(1, 128), st.integers(1, 99_999), st.integers(1, 10**6)))  # fmt: skip
def test_a_shape_survives_its_journey(shape: LayerShape) -> None:
    assert LayerShape.parse(str(shape)) == shape


@pytest.mark.parametrize("text", ["", "1x2x3", "0x1x1x1x1", "10x10x3x1x10", "8x8x4x3x10", "-1x1x1x1x1", "1x1x1x1x1;rm"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        LayerShape.parse(text)


def test_a_card_gives_its_layers_shape() -> None:
    card = model_card(
        hidden_size=576, intermediate_size=1536, attention_heads=9, vocab_size=49_152, kv_elements_per_token=384
    )
    assert LayerShape.of(card) == LayerShape(576, 1536, 9, 3, 49_152)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**5))
def test_any_card_gives_a_shape_that_can_be_run(hidden: int, inner: int, heads: int, kv: int) -> None:
    card = model_card(hidden_size=hidden, intermediate_size=inner, attention_heads=heads, kv_elements_per_token=kv)
    shape = LayerShape.of(card)
    assert shape.hidden % shape.heads == 0
    assert shape.heads % shape.kv_heads == 0


# --- what is wanted -------------------------------------------------------------------------------


def test_models_at_hand_come_first_then_what_others_know() -> None:
    small = model_card((1000,) * 2, weight_kind="q8g64", head_kind="bfloat16")
    large = model_card((5000,) * 2, weight_kind="q4g32", head_kind="q8g32")
    other = node_card("b", speeds=(KindSpeed("mxfp4", SPEED), KindSpeed("rm -rf", SPEED)))
    assert list(wanted_kinds([small, large], [other], computes_float32=False)) == [
        "q4g32", "q8g32", "q8g64", "bfloat16", "mxfp4",
    ]  # fmt: skip


def test_floats_are_float32_where_the_engine_makes_them_that() -> None:
    cards = [model_card(weight_kind=kind, head_kind=kind) for kind in ("bfloat16", "float16", "float32")]
    assert list(wanted_kinds(cards, [], computes_float32=True)) == ["float32"]


def test_a_node_without_models_knows_the_usual() -> None:
    assert list(wanted_kinds([], [], computes_float32=True)) == [USUAL_KIND]
    assert list(wanted_kinds([model_card()], [], computes_float32=True)) == [USUAL_KIND]


def test_others_cannot_make_a_node_measure_without_end() -> None:
    others = [
        node_card("b", speeds=tuple(KindSpeed(f"q{b}g{g}", SPEED) for b in (2, 3, 4, 5, 6, 8) for g in (16, 32, 64)))
    ]
    own = model_card(weight_kind="q4g128", head_kind="q8g128")
    wanted = wanted_kinds([own], others, computes_float32=False)
    assert len(wanted) == KINDS_LIMIT
    assert list(wanted)[:2] == ["q4g128", "q8g128"]


# --- what is due ----------------------------------------------------------------------------------


def test_what_is_known_is_not_measured_again() -> None:
    book = SpeedBook("m1")
    assert book.due(WANTED, 0) == WANTED
    assert book.measured(report("q4g64"), 0) == ("q4g64",)
    assert list(book.due(WANTED, 0)) == ["float32"]
    book.measured(report("float32"), 0)
    assert book.due(WANTED, 1e9) == {}


def test_another_fingerprint_is_measured_and_the_first_one_still_known() -> None:
    book = SpeedBook("plugged in")
    book.measured(report(*WANTED), 0)
    assert book.look("on battery")
    assert not book.look("on battery")
    assert book.due(WANTED, 1) == WANTED
    assert book.speeds(lambda _kind, speed: speed) == ()
    book.measured(report(*WANTED, speed=replace(SPEED, flops_per_second=1e10)), 1)
    book.look("plugged in")
    assert book.due(WANTED, 2) == {}
    assert book.by_kind["q4g64"].speed == SPEED


def test_unsteady_numbers_are_measured_again_a_few_times_and_the_steadiest_kept() -> None:
    book, now, spreads = SpeedBook("m"), 0.0, [0.5, 0.3, 0.4]
    for spread in spreads:
        assert "q4g64" in book.due(WANTED, now)
        book.measured(report("q4g64", spread=spread), now)
        assert "q4g64" not in book.due(WANTED, now + UNSTEADY_AGAIN_SECONDS - 1)
        now += UNSTEADY_AGAIN_SECONDS
    assert len(spreads) == UNSTEADY_TRIES
    assert "q4g64" not in book.due(WANTED, now + 1e9)
    assert book.by_kind["q4g64"].spread == 0.3


def test_a_worse_measurement_changes_nothing() -> None:
    book = SpeedBook("m")
    book.measured(report("q4g64", spread=0.2), 0)
    assert book.measured(report("q4g64", spread=0.9, speed=replace(SPEED, flops_per_second=1.0)), 1) == ()
    assert book.by_kind["q4g64"].speed == SPEED


def test_failures_are_repeated_with_growing_patience() -> None:
    book, now = SpeedBook("m"), 0.0
    for patience in (*FAILED_AGAIN_SECONDS, FAILED_AGAIN_SECONDS[-1]):
        assert book.failed(now) == patience
        assert book.due(WANTED, now + patience - 1) == {}
        now += patience
        assert book.due(WANTED, now) == WANTED
    book.measured(report("q4g64"), now)
    assert book.failed(now) == FAILED_AGAIN_SECONDS[0]


def test_a_refusal_of_memory_is_remembered_and_pressure_is_not() -> None:
    book = SpeedBook("m")
    assert not book.present.memory_tried
    book.measured(report("q4g64", memory=MemoryTrial(100, 40, "pressure")), 0)
    assert (book.present.memory_tried, book.present.memory_ceiling_bytes) == (True, 0)
    book.measured(report("float32", memory=MemoryTrial(100, 60, "refused")), 0)
    book.measured(report("q8g64"), 0)
    assert book.present.memory_ceiling_bytes == 60


# --- on disk --------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.sampled_from(["q4g64", "q8g64", "float32"]), st.floats(0, 1)), max_size=20
)


@given(steps)
def test_a_book_survives_a_restart(history: list[tuple[str, str, float]]) -> None:
    book = SpeedBook("a")
    for now, (fingerprint, kind, spread) in enumerate(history):
        book.look(fingerprint)
        book.measured(report(kind, spread=spread), float(now))
    read = SpeedBook.from_bytes(book.to_bytes(), book.fingerprint)
    assert read.machines == book.machines
    assert list(read.machines) == list(book.machines)
    assert len(book.machines) <= FINGERPRINTS_LIMIT


@given(st.binary(max_size=200))
def test_a_damaged_file_is_no_more_than_forgotten(data: bytes) -> None:
    assert SpeedBook.from_bytes(data, "m").due(WANTED, 0) == WANTED


def test_numbers_of_another_format_are_forgotten() -> None:
    book = SpeedBook("m")
    book.measured(report("q4g64"), 0)
    old = book.to_bytes().replace(b'"format":2', b'"format":1')
    assert SpeedBook.from_bytes(old, "m").machines == {}
    absurd = book.to_bytes().replace(b"1000000000.0", b"-1.0")
    assert SpeedBook.from_bytes(absurd, "m").machines == {}
