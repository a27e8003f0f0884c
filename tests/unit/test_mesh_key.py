"""Join codes: easy to say, hard to guess, never shown by accident."""

from __future__ import annotations

import copy
import logging
import math
import os
import pickle
import stat
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import BadInput
from meshinfer.transport.mesh_key import (
    JOIN_CODE_VARIABLE,
    WORDS_PER_CODE,
    JoinCode,
    MeshKey,
    join,
    load_or_make,
    new_join_code,
    parse_join_code,
    remember,
    remembered_code,
    word_list,
)

CODE = "abacus-abdomen-abdominal-abide-abiding-ability"
codes = st.lists(st.sampled_from(word_list()), min_size=WORDS_PER_CODE, max_size=WORDS_PER_CODE).map(tuple)


def test_a_code_has_77_bits():
    assert len(set(word_list())) == len(word_list())
    assert WORDS_PER_CODE * math.log2(len(word_list())) >= 77
    assert len({new_join_code().reveal() for _ in range(50)}) == 50


@given(
    codes,
    st.lists(st.sampled_from(["-", " ", " - ", "--", "_", ", ", "\n", "\t", ". "]), min_size=7, max_size=7),
    st.integers(0, 2**40),
)
def test_a_code_is_read_however_it_is_typed(words, separators, capitals):
    text = "".join(separator + word for separator, word in zip(separators, words, strict=False)) + separators[-1]
    typed = "".join(letter.upper() if capitals >> (i % 40) & 1 else letter for i, letter in enumerate(text))
    assert parse_join_code(typed) == JoinCode(words)
    assert parse_join_code(parse_join_code(typed).reveal()) == JoinCode(words)


@given(st.text(max_size=200))
def test_anything_else_is_bad_input_and_nothing_worse(text):
    try:
        parse_join_code(text)
    except BadInput as error:
        assert "meshinfer invite" in str(error)  # noqa: PT017 - most texts are wrong, not all


def test_a_mistyped_word_is_named_with_what_it_may_have_been():
    mistyped = "abacus abdoman abdominal abide abiding ability"
    with pytest.raises(BadInput, match=r"word 2 is not a word.*expected abdomen"):
        parse_join_code(mistyped, suggest=True)
    with pytest.raises(BadInput, match="word 2 is not a word") as caught:
        parse_join_code(mistyped)
    assert "abdomen" not in str(caught.value)  # it may be written to a log


def test_an_error_does_not_repeat_a_code_without_its_dashes():
    with pytest.raises(BadInput, match="dashes or spaces") as caught:
        parse_join_code(CODE.replace("-", ""), suggest=True)
    assert CODE[:8] not in str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 5, 7])
def test_too_few_or_too_many_words_are_counted(count):
    with pytest.raises(BadInput, match=rf"{count} words; expected 6 words"):
        parse_join_code(" ".join(["abacus"] * count))


def test_an_error_repeats_no_right_word():
    with pytest.raises(BadInput) as caught:
        parse_join_code("zombie zoom abdoman zoology zone zoning")
    for word in ("zombie", "zoom", "zoology", "zone", "zoning"):
        assert word not in str(caught.value)


def test_the_same_code_is_the_same_mesh_and_another_is_not():
    key, again = (MeshKey.from_join_code(parse_join_code(CODE)) for _ in range(2))
    other = MeshKey.from_join_code(parse_join_code("zoom " + CODE.partition("-")[2]))
    assert key.mesh_id == again.mesh_id != other.mesh_id
    assert len(key.mesh_id) == 16
    assert again.proves(key.mac(b"purpose", b"a", b"b"), b"purpose", b"a", b"b")
    assert not other.proves(key.mac(b"purpose", b"a", b"b"), b"purpose", b"a", b"b")
    for different in ((b"purpose", b"ab"), (b"purpose", b"a", b"", b"b"), (b"purposea", b"b"), (b"other", b"a", b"b")):
        assert not key.proves(key.mac(b"purpose", b"a", b"b"), *different)
    assert not key.proves(b"", b"purpose")


def test_the_open_mesh_is_open_to_all():
    assert MeshKey.open_mesh().mesh_id == "open"
    assert MeshKey.open_mesh().proves(MeshKey.open_mesh().mac(b"x"), b"x")


def test_neither_key_nor_code_shows_itself(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    membership = join(tmp_path, CODE)
    secret = membership.key._MeshKey__secret
    shown = "".join(traceback.format_exception(ValueError(membership, membership.key, membership.code)))
    shown += f"{membership} {membership!r} {membership.key} {membership.code} {caplog.text}"
    for word in CODE.split("-"):
        assert word not in shown
    assert secret.hex() not in shown
    assert repr(secret) not in shown
    for unwelcome in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError):
            unwelcome(membership.key)


def test_the_first_start_makes_a_mesh_and_the_next_is_in_it(tmp_path):
    made = load_or_make(tmp_path / "home", environment={})
    remember(tmp_path / "home", made)
    again = load_or_make(tmp_path / "home", environment={})
    assert (made.source, again.source) == ("made", "home")
    assert made.code == again.code == remembered_code(tmp_path / "home")
    assert made.key.mesh_id == again.key.mesh_id
    (file,) = (tmp_path / "home").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_a_start_that_fails_leaves_no_mesh_that_nobody_was_told_of(tmp_path):
    load_or_make(tmp_path / "home", environment={})
    assert not (tmp_path / "home").exists()
    assert load_or_make(tmp_path / "home", environment={}).source == "made"


def test_who_joins_while_the_first_start_runs_is_not_overruled(tmp_path):
    made = load_or_make(tmp_path, environment={})
    join(tmp_path, CODE)
    remember(tmp_path, made)
    assert remembered_code(tmp_path) == parse_join_code(CODE)


def test_joining_replaces_what_was_remembered(tmp_path):
    remember(tmp_path, load_or_make(tmp_path, environment={}))
    joined = join(tmp_path, CODE.upper().replace("-", " "))
    assert joined.code is not None
    assert joined.code.reveal() == CODE
    assert load_or_make(tmp_path, environment={}).code == joined.code
    with pytest.raises(BadInput):
        join(tmp_path, "not a code")
    assert load_or_make(tmp_path, environment={}).code == joined.code


def test_a_key_file_comes_before_the_environment_and_that_before_the_home(tmp_path):
    home = tmp_path / "home"
    remembered = load_or_make(home, environment={})
    remember(home, remembered)
    from_environment = load_or_make(home, environment={JOIN_CODE_VARIABLE: CODE})
    assert from_environment.source == "environment"
    assert from_environment.code == parse_join_code(CODE)
    file = tmp_path / "key"
    file.write_text("zoom zoom zoom zoom zoom zoom\n")
    file.chmod(0o600)
    from_file = load_or_make(home, key_file=file, environment={JOIN_CODE_VARIABLE: CODE})
    assert from_file.source == "file"
    assert from_file.code == parse_join_code("zoom " * 6)
    opened = load_or_make(home, key_file=file, environment={JOIN_CODE_VARIABLE: CODE}, open_mesh=True)
    assert (opened.source, opened.code, opened.key.mesh_id) == ("open", None, "open")
    assert load_or_make(home, environment={JOIN_CODE_VARIABLE: " "}).code == remembered.code


@pytest.mark.parametrize("environment", [{}, {JOIN_CODE_VARIABLE: "five words are not enough"}])
def test_a_code_that_cannot_be_used_is_an_error_and_not_a_new_mesh(tmp_path, environment):
    if not environment:
        (tmp_path / "join-code").write_text("garbage")
        (tmp_path / "join-code").chmod(0o600)
    with pytest.raises(BadInput, match=r"holds no join code"):
        load_or_make(tmp_path, environment=environment)


def test_a_missing_key_file_is_named(tmp_path):
    with pytest.raises(BadInput, match="nowhere"):
        load_or_make(tmp_path, key_file=tmp_path / "nowhere", environment={})


def test_a_code_that_others_could_read_is_not_used(tmp_path):
    join(tmp_path, CODE)
    (tmp_path / "join-code").chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        load_or_make(tmp_path, environment={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_home_that_cannot_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="cannot be written"):
        remember(tmp_path / "home", load_or_make(tmp_path / "home", environment={}))
