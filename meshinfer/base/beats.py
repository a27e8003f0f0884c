"""When loops that only look now and then wake up: together.

An agent has a dozen such loops, and a wake-up of a process that slept costs more than what most of them do (caches
are cold: 0.3 ms and more). So they wait for whole beats of the node's clock instead of so many seconds each, and those of
one second share their wake-up with every fourth of those of a quarter.
"""

from __future__ import annotations

import math

import trio


def next_beat(seconds: float) -> float:
    """The next moment of trio's clock that is a whole multiple of `seconds`, itself a whole number of quarters."""
    return (math.floor(trio.current_time() / seconds) + 1) * seconds


async def sleep_to_beat(seconds: float) -> None:
    """Sleep until `next_beat`: `seconds` from one beat to the next, the first time less."""
    await trio.sleep_until(next_beat(seconds))
