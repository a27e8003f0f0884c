"""The machine's battery, where the platform tells of one: a laptop leaves the mesh before it switches itself off.

Whoever pulls a plug has told nobody. With a few percent left there is still time to have this node's
layers loaded elsewhere and to let answers end (a minute); once the machine is asleep, the others can only repair.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil
import trio

LOOK_SECONDS = 30.0
"""A laptop at work loses a percent in a minute or two."""


@dataclass(frozen=True, slots=True)
class Battery:
    percent: float
    plugged_in: bool


def battery() -> Battery | None:
    """As it is now. None: there is none, or its driver tells no sense."""
    try:
        seen = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except (OSError, ValueError):  # drivers that show half a battery
        return None
    if seen is None or not math.isfinite(seen.percent):
        return None
    # None: psutil cannot tell. Then it may as well be plugged in, and a node that leaves for nothing is a loss.
    return Battery(seen.percent, seen.power_plugged is not False)


async def _look() -> Battery | None:
    return await trio.to_thread.run_sync(battery)  # firmware is asked, which takes its time on some machines


async def until_low(percent: float, look: Callable[[], Awaitable[Battery | None]] = _look) -> Battery:
    """Once no more than `percent` is left and nothing charges it, twice in a row: a plug that is moved is no reason."""
    low_before = False
    while True:
        seen = await look()
        is_low = seen is not None and not seen.plugged_in and seen.percent <= percent
        if seen is not None and is_low and low_before:
            return seen
        low_before = is_low
        await trio.sleep(LOOK_SECONDS)
