"""Bytes and seconds as people write them."""

from __future__ import annotations

import re

from meshinfer.base.errors import BadInput

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "t": 1024**4,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
# ASCII, and no more digits than memory can have.
_BYTES = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes in `text`: `512MiB`, `8g`, `1.5 GB`.

    Raises:
        BadInput: not a number with a unit of bytes.
    """
    match = _BYTES.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise BadInput(
            f"{text[:60]!r} is not an amount of memory", expected="a number and a unit, such as 512MiB or 8GiB"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """`count` bytes with three digits and a binary unit: `1.25 GiB`."""
    for unit, least_of_next in (("B", 1024), ("KiB", 1023.5), ("MiB", 1023.5)):
        # From there on it would be shown as 1024 of this unit.
        if abs(count) < least_of_next:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def format_seconds(seconds: float) -> str:
    """A duration with its fitting unit: `0.21 ms`, `1.40 s`."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.99995 else f"{seconds:.2f} s"
