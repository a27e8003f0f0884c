"""Bounds that fields carry in their types; `wire.codec` enforces them on everything that comes from outside."""

from __future__ import annotations

from msgspec import Meta


def at_least(low: float) -> Meta:
    """Numbers ≥ `low`."""
    return Meta(ge=low)


def between(low: float, high: float) -> Meta:
    """Numbers in [`low`, `high`]."""
    return Meta(ge=low, le=high)


def finite(low: float) -> Meta:
    """Floats ≥ `low` that JSON can show; infinity would break every page that it is on."""
    return Meta(ge=low, le=1e18)


def sized(low: int, high: int) -> Meta:
    """Text, bytes or tuples of `low` to `high` items."""
    return Meta(min_length=low, max_length=high)
