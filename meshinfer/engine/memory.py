"""What a runner's memory holds now, as MLX and as the kernel count it: for heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import psutil


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes."""

    active: int
    """Arrays that are alive: weights and caches."""
    cached: int
    """Freed buffers that MLX keeps for the next arrays."""
    resident: int
    """The whole process (RSS)."""


def read_memory() -> MemoryReading:
    return MemoryReading(
        active=mx.get_active_memory(),
        cached=mx.get_cache_memory(),
        resident=psutil.Process().memory_info().rss,
    )


def bound_freed_buffers(limit_bytes: int) -> None:
    """Keep at most this much freed memory for reuse; MLX's own default is nearly all of the machine's."""
    mx.set_cache_limit(limit_bytes)
