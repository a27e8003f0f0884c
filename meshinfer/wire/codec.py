"""msgpack in and out, with strict validation on the way in.

`encode` turns any of our frozen dataclasses into bytes; `decode` turns bytes into one of a named
type or raises. Nothing is believed before it is decoded, validated and bounded: size is checked
before parsing, nesting is bounded by the parser, and every field carries its own bounds in its
type (`base.bounds`). Fields that this build does not know are ignored, so that mixed versions can
talk; a missing or wrong one is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from meshinfer.base.errors import ProtocolError

T = TypeVar("T")

MAX_MESSAGE_BYTES = 256 * 1024
"""A control message. Announcements are held to 64 KiB by the transport; model listings may be larger."""

_encoder = msgspec.msgpack.Encoder()


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, strict=True)


def encode(value: Any) -> bytes:
    """Msgpack bytes of a dataclass value."""
    return _encoder.encode(value)


def decode(kind: type[T], data: bytes | bytearray | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """The `kind` that `data` holds.

    Raises:
        ProtocolError: too large, not msgpack, or not a valid `kind`; it names the first wrong field.
    """
    if len(data) > max_bytes:
        raise ProtocolError(f"{len(data)} bytes of {kind.__name__}", expected=f"at most {max_bytes}")
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a valid {kind.__name__}: {error}") from error


class Registry:
    """A closed set of message types that share one pipe: each travels as (its name, its body)."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: Any) -> bytes:
        return _encoder.encode((type(message).__name__, msgspec.Raw(_encoder.encode(message))))

    def decode(self, data: bytes | bytearray | memoryview, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
        """The message in `data`.

        Raises:
            ProtocolError: not one of the kinds, or not a valid one.
        """
        if len(data) > max_bytes:
            raise ProtocolError(f"{len(data)} bytes of message", expected=f"at most {max_bytes}")
        try:
            name, body = _decoder(tuple[str, msgspec.Raw]).decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a message: {error}") from error
        if name not in self._kinds:
            raise ProtocolError(f"message {name[:64]!r}", expected=f"one of {', '.join(self._kinds)}")
        return decode(self._kinds[name], bytes(body), max_bytes)
