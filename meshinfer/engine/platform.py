"""The one place that knows how platforms differ for MLX; everything else asks `prepare_process`.

It is the first thing that a process with MLX does:
- Linux on the CPU: a fast BLAS is put under MLX before MLX is loaded (`engine.blas`), on one thread: its
  threads spin, and more than the machine has idle cores for cost far more than they bring (3 instead of
  15 tokens/s measured on a busy box). OPENBLAS_NUM_THREADS says otherwise.
- CPU: `mx.compile` off. It calls g++ at run time and is slower (21 instead of 14 ms per token).
- CPU: float parameters are computed in float32. A 4-bit model with bfloat16 scales runs 7 times slower
  there, with float16 scales 40 times.
- Importing mlx-lm lowers the process's limit of open files for good (to 4096); here it does not.
Which device it is, only MLX is asked.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshinfer.engine.blas import use_openblas


@dataclass(frozen=True, slots=True)
class Platform:
    """What this process computes on."""

    computes_float32: bool
    """Float parameters are cast to float32 (CPU)."""
    accelerator: str
    """For people: `Apple M3 Max`, `NVIDIA …`, or the processor and its BLAS."""
    device_memory_bytes: int
    """What the device says it can give to one process now; 0 if it has no memory of its own to speak of (CPU)."""
    blas: str
    """What multiplies matrices on a CPU, or why not better."""

    @property
    def timer(self) -> Callable[[], float]:
        """The clock that says how long a computation takes here when it has the machine to itself.

        On a CPU where one thread computes, the CPU time of this process: steady to 4 % on a machine with three times
        more to do than cores, where the wall's clock is off by a factor of 3. What others use is on the node's card as
        its load. Elsewhere (GPUs, several threads) the wall's clock.
        """
        one_thread = os.environ.get("OPENBLAS_NUM_THREADS") == "1" and sys.platform.startswith("linux")
        return time.process_time if self.computes_float32 and one_thread else time.perf_counter


@cache
def prepare_process() -> Platform:
    """Make this process ready for MLX and load it. Call it before anything imports `mlx` or `mlx_lm`."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    blas = use_openblas()
    import mlx.core as mx  # noqa: PLC0415 - only now: the BLAS had to come first

    _import_mlx_lm()
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu:
        mx.disable_compile()
    info: dict[str, Any] = dict(mx.device_info())
    name = str(info.get("device_name") or info.get("architecture") or mx.default_device())
    return Platform(
        computes_float32=on_cpu,
        accelerator=f"CPU ({name})" if on_cpu else name,
        # Metal says what one process may keep resident; CUDA what is free on the card.
        device_memory_bytes=int(info.get("max_recommended_working_set_size") or info.get("free_memory") or 0),
        blas=blas,
    )


def _import_mlx_lm() -> None:
    """Import mlx-lm, whose import would set RLIMIT_NOFILE to (2048, 4096): a hard limit cannot be raised again."""
    set_limit = resource.setrlimit
    resource.setrlimit = _leave_limits
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = set_limit


def _leave_limits(_resource: int, _limits: tuple[int, int], /) -> None: ...
