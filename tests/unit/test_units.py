"""Bytes, seconds, ids and errors as people write and read them."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import ERRORS_BY_CODE, BadInput, MeshinferError, NoRoom
from meshinfer.base.ids import digest_hex, instance_id_for, parse_model_id
from meshinfer.base.units import GIB, KIB, MIB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("512", 512), ("512MiB", 512 * MIB), ("8g", 8 * GIB), ("8 GiB", 8 * GIB), ("1.5 GB", 1_500_000_000),
        (" 2k ", 2 * KIB), ("1TiB", 1024 * GIB), ("3 b", 3),
    ],
)  # fmt: skip
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "8 apples", "8GiB!", "1,5GB", "0x10", "٣", "nan", "1" * 400])
def test_what_is_no_amount_of_memory_is_said(text):
    with pytest.raises(BadInput):
        parse_bytes(text)


@given(st.text(max_size=20))
def test_any_text_is_an_amount_or_bad_input(text):
    with contextlib.suppress(BadInput):
        assert parse_bytes(text) >= 0


@given(st.integers(0, 2**60))
def test_shown_bytes_read_back_about_the_same(count):
    shown = format_bytes(count)
    assert parse_bytes(shown) == pytest.approx(count, rel=0.06, abs=1)
    assert len(shown) <= 18


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 * MIB, "300 MiB"), (412.4 * MIB, "412 MiB"),
     (1023.9 * MIB, "1.00 GiB"), (1.25 * GIB, "1.25 GiB"), (-2 * MIB, "-2.0 MiB"), (1024 * KIB - 1, "1.0 MiB")],
)  # fmt: skip
def test_bytes_as_people_write_them(count, shown):
    assert format_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 µs"), (0.00021, "210 µs"), (0.0021, "2.1 ms"), (0.9, "900.0 ms"), (1.4, "1.40 s"), (0.00099999, "1.0 ms"),
     (0.99999, "1.00 s")],
)  # fmt: skip
def test_durations_as_people_write_them(seconds, shown):
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize("text", ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b", "Qwen2.5_1-x"])
def test_model_ids(text):
    assert parse_model_id(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "/", "a/", "/a", "a/b/c", "..", "../a", "a/..", ".hidden", "-option", "a b", "a\n", "a\x00", "a/.b", "a..b",
     "a--b", "ä", "C:\\x", "a" * 97, "models--x"],
)  # fmt: skip
def test_what_is_no_model_id_reaches_no_path(text):
    with pytest.raises(BadInput, match="is not a model id"):
        parse_model_id(text)


@given(st.text(max_size=40))
def test_a_model_id_is_safe_in_a_path_whatever_was_said(text):
    try:
        parsed = parse_model_id(text)
    except BadInput:
        return
    assert re.fullmatch(r"[A-Za-z0-9._/-]+", parsed)
    assert all(part and part[0] not in ".-" for part in parsed.split("/"))


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_digests_of_different_parts_differ(a, b):
    assert (digest_hex(*a) == digest_hex(*b)) == (a == b)
    assert len(digest_hex(*a)) == 32


def test_instances_of_one_model_have_one_name_per_replica():
    ids = {instance_id_for(parse_model_id("a/b"), replica) for replica in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"[0-9a-f]{16}", each) for each in ids)


def test_an_error_says_what_was_wrong_expected_and_to_be_done():
    error = NoRoom("412 MiB are needed", expected="at most 300 MiB", do="free memory")
    assert str(error) == "412 MiB are needed; expected at most 300 MiB. Free memory."
    assert str(BadInput("no")) == "no"


def test_every_error_has_its_own_code():
    def family(kind):
        return {kind}.union(*(family(child) for child in kind.__subclasses__()))

    ours = {kind for kind in family(MeshinferError) if kind.__module__ == "meshinfer.base.errors"}
    assert set(ERRORS_BY_CODE.values()) == ours
    assert all(ERRORS_BY_CODE[kind.code] is kind for kind in ours)
