"""How much memory the engine can really allocate, found out by allocating.

What the operating system calls available is a guess, and engines have limits of their own (a Mac's GPU
gets two thirds to three quarters of the memory, a container has its group's limit). So blocks are
allocated by the engine and written to, in some big steps, until all that was asked for is there or
something stands against it. All of it is freed with the process.

It must not harm: it stops before the machine runs short, when the machine begins to swap, and after a
bounded time, since writing 20 GB takes seconds and what is far below the limit need not be written to.
The caller asks for what the control group allows (a group over its limit kills, it does not refuse).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import psutil

from meshinfer.engine.repeat import Clock
from meshinfer.wire.speed_probe import MemoryTrial, StoppedBy

STEPS = 64
"""300 MB each on a machine with 20 GB free: 0.1 s of page faults, 0.5 s on a slow virtual machine."""
TRIAL_SECONDS = 1.0
LEFT_SHARE = 0.05
"""Of the machine's memory that must stay available in the middle of a trial: less, and systems begin to kill."""
SWAPPED_BYTES = 64 * 2**20
"""More swapped out than before the trial: it is us whom the machine makes room for."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the machine says of its memory, in bytes."""

    total: int
    available: int
    swapped: int

    @classmethod
    def now(cls) -> Pressure:
        memory = psutil.virtual_memory()
        return cls(memory.total, memory.available, psutil.swap_memory().used)


def try_memory(
    asked_bytes: int,
    allocate: Callable[[int], object] | None = None,
    pressure: Callable[[], Pressure] = Pressure.now,
    now: Clock = time.monotonic,
) -> MemoryTrial:
    """Allocate up to `asked_bytes`, as the engine would; freed again when this returns."""
    before = pressure()
    end = now() + TRIAL_SECONDS
    step = max(1, asked_bytes // STEPS)
    blocks: list[object] = []
    stopped_by: StoppedBy = ""
    got = 0
    while got < asked_bytes:
        size = min(step, asked_bytes - got)
        machine = pressure()
        if machine.available - size < LEFT_SHARE * machine.total or machine.swapped > before.swapped + SWAPPED_BYTES:
            stopped_by = "pressure"
            break
        if now() >= end:
            stopped_by = "time"
            break
        try:
            blocks.append((allocate or _block)(size))
        except (MemoryError, RuntimeError):  # MLX's own word for it
            stopped_by = "refused"
            break
        got += size
    blocks.clear()
    mx.clear_cache()
    return MemoryTrial(asked_bytes, got, stopped_by)


def _block(size_bytes: int) -> mx.array:
    """A block of the engine's, written to: pages that nobody writes to are no memory yet."""
    # Ones: a kernel may know that zeroed pages are zero.
    block = mx.ones((size_bytes // 8,), mx.int64)
    mx.eval(block)
    return block
