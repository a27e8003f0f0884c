"""A character split over tokens is never broken, and streaming loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshinfer.serving.requests import Generated
from meshinfer.serving.text import TextModel
from meshinfer.serving.text_answer import TextAnswer
from meshinfer.serving.text_bytes import Detokeniser, TokenBytes
from meshinfer.testing.text import sentencepiece_tokenizer, tiny_tokenizer


def _metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", "a", "b", "▁a", "▁hello", "😀", "."]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "hello": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


BYTE_LEVEL, FALLBACK = tiny_tokenizer(), sentencepiece_tokenizer()


def _stream(tokenizer: Tokenizer, ids: list[int], silent: tuple[int, ...] = ()) -> str:
    detokeniser = Detokeniser(TokenBytes(tokenizer, silent))
    pieces = [detokeniser.push(token_id) for token_id in ids]
    return "".join(pieces) + detokeniser.flush()


@given(ids=st.lists(st.integers(0, 262), max_size=40))
def test_any_tokens_of_a_byte_level_tokenizer_stream_to_what_they_decode_to(ids: list[int]):
    """Broken characters too: both follow the Unicode standard's rule for U+FFFD."""
    assert _stream(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


@given(text=st.text())
def test_any_text_survives_a_byte_level_tokenizer(text: str):
    assert _stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids) == text


@given(text=st.text(alphabet="ab é😀€ ", max_size=20))
def test_any_text_survives_a_tokenizer_with_byte_fallback(text: str):
    ids = FALLBACK.encode(text, add_special_tokens=False).ids
    assert _stream(FALLBACK, ids, (0, 1, 2)) == FALLBACK.decode(ids) == text


@pytest.mark.parametrize("make", [_metaspace, _word_pieces])
def test_other_decoders_keep_their_spaces(make):
    tokenizer = make()

    @given(ids=st.lists(st.integers(1, tokenizer.get_vocab_size() - 1), max_size=12))
    def check(ids: list[int]):
        assert _stream(tokenizer, ids) == tokenizer.decode(ids)

    check()


def test_each_piece_is_whole_characters():
    detokeniser = Detokeniser(TokenBytes(BYTE_LEVEL, ()))
    pieces = [detokeniser.push(token_id) for token_id in BYTE_LEVEL.encode("é😀!").ids]
    assert pieces == ["", "é", "", "", "", "😀", "!"]


def test_an_answer_that_ends_inside_a_character_says_so():
    ids = BYTE_LEVEL.encode("a😀").ids[:-1]
    assert _stream(BYTE_LEVEL, ids) == "a\ufffd"


def test_special_and_unknown_tokens_have_no_text():
    end = BYTE_LEVEL.token_to_id("<|im_end|>")
    assert _stream(BYTE_LEVEL, [*BYTE_LEVEL.encode("a").ids, end, 99_999], (end,)) == "a"


MODEL = TextModel(tiny_tokenizer(), None, {}, (265,), None, "secret")


@given(
    text=st.text(alphabet="ab😀é", max_size=16),
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=3), max_size=3),
)
def test_an_answer_and_its_tokens_end_before_the_stop_string(text: str, stops: list[str]):
    ids = BYTE_LEVEL.encode(text).ids
    answer = TextAnswer(MODEL, stops)
    deltas = [answer.push(Generated(index, token_id)) for index, token_id in enumerate(ids)]
    deltas.append(answer.finish())
    shown = "".join(delta.text for delta in deltas)
    tokens = [token.token_id for delta in deltas for token in delta.tokens]
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert (answer.stop is None) == (shown == text)
    # Log-probabilities show exactly the text that is shown.
    assert b"".join(MODEL.token_text(token_id)[1] for token_id in tokens).decode() == shown


def test_a_stop_token_ends_in_silence():
    answer = TextAnswer(MODEL, [])
    assert not answer.push(Generated(0, 265))


def test_special_tokens_in_log_probabilities_go_by_name():
    assert MODEL.token_text(BYTE_LEVEL.token_to_id("<|im_end|>")) == ("<|im_end|>", b"")
