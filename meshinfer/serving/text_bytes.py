"""Tokens back to text, one at a time. A token is bytes, and text is those bytes as UTF-8.

Seen this way, everything that goes wrong in streaming is one rule. A character that is split over
tokens stays in the UTF-8 decoder until it is whole; at the end an unfinished one becomes U+FFFD; and
since every answer, streamed or not, goes through here, both have the same text. It also gives the
`bytes` of log-probabilities their exact value.

How a token's bytes are found depends on the tokenizer's decoder:

| decoder       | a token's bytes                                                          |
|---------------|--------------------------------------------------------------------------|
| ByteLevel     | its characters through GPT-2's table of 256 printable stand-ins          |
| ByteFallback  | `<0x41>` is the byte 0x41; other tokens as below                         |
| anything else | what the decoder makes of it after an ordinary token (the *anchor*), so  |
|               | that a leading space is kept; the first token of an answer is decoded    |
|               | alone, since such decoders strip the text's first space                  |

Why not tokenizers' own `DecodeStream`: it cannot flush, so an answer that ends inside a character
loses it; it cannot tell the bytes of a token; and after a broken character it raises and stays broken.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every token of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, silent_ids: Collection[int]) -> None:
        """`silent_ids`: tokens without text in an answer (special tokens)."""
        self._tokenizer = tokenizer
        self._silent = frozenset(silent_ids)
        kinds = _decoder_kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor = None if self._byte_level else _find_anchor(tokenizer, self._silent)
        # An answer reuses few tokens, a vocabulary has up to 256 k: 8 k entries are ~1 MB.
        self.of = lru_cache(maxsize=8192)(self._of)

    def _of(self, token_id: int, first: bool) -> bytes | None:
        """Bytes that `token_id` adds; `first`: nothing came before it. None for silent and unknown tokens."""
        piece = None if token_id in self._silent else self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        if self._byte_level:
            return _byte_level_bytes(piece)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        decode = self._tokenizer.decode
        if first or self._anchor is None:
            return decode([token_id], skip_special_tokens=False).encode()
        anchor_id, anchor_text = self._anchor
        after = decode([anchor_id, token_id], skip_special_tokens=False)
        return after.removeprefix(anchor_text).encode()


class Detokeniser:
    """One answer's tokens on their way to text."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def push(self, token_id: int) -> str:
        """The whole characters that this token completes."""
        added = self._bytes.of(token_id, self._first)
        if added is None:
            return ""
        self._first = False
        return self._utf8.decode(added)

    @property
    def unfinished(self) -> bool:
        """A character has begun and is not whole yet."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The end: U+FFFD for a character that never became whole, else nothing."""
        return self._utf8.decode(b"", final=True)


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = [kind for part in decoder.get("decoders", []) for kind in _decoder_kinds(part)]
    return {str(decoder.get("type")), *inner}


def _find_anchor(tokenizer: Tokenizer, silent: frozenset[int]) -> tuple[int, str] | None:
    """A plain token to decode others after, with its text.

    A byte token where there are some: it cannot merge with what follows. Else any letter.
    """
    for piece in ("<0x41>", "a", "▁a", "e", "▁the", "the", "A", "1"):
        token_id = tokenizer.token_to_id(piece)
        if token_id is not None and token_id not in silent:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if text and tokenizer.decode([token_id, token_id], skip_special_tokens=False).startswith(text):
                return token_id, text
    return None


def _byte_level_table() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 bytes stand for themselves, the rest for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_level_table()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in piece)
    except KeyError:  # an added token: its text is written out as it is
        return piece.encode()
