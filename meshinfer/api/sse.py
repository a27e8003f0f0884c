"""Server-sent events, the part of them that JSON protocols use. Pure.

No `id:` lines, and a comment is one line without a blank one after it: older clients take the blank
line after a comment for an empty event.
"""

from __future__ import annotations

from typing import Any

import msgspec

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Compact JSON in one line, UTF-8."""
    return _encoder.encode(value)


def data_event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def comment(text: str) -> bytes:
    return f": {text}\n".encode()
