"""How long this machine has slept (its lid was closed): the clock of all timers stands still meanwhile, so none of them tells.

Linux counts it in CLOCK_BOOTTIME and not in CLOCK_MONOTONIC (clock_gettime(2)); macOS counts it in CLOCK_MONOTONIC and
not in CLOCK_UPTIME_RAW (clock_gettime(3)), on which Python's own monotonic clocks go.
"""

from __future__ import annotations

import sys
import time


def suspended_seconds() -> float:
    """Since the machine was started; 0.0 where its system does not tell."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(time.CLOCK_UPTIME_RAW)
    return 0.0
