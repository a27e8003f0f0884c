"""When loops that only look now and then wake up: together.

An agent has a dozen such loops, and a wake-up of a process that slept costs more than what most of them do (caches
are cold: 0.3 ms and more). So they wait for whole beats of their node instead of so many seconds each, and those of
one second share their wake-up with every fourth of those of a quarter.
"""

from __future__ import annotations

import math
from contextvars import ContextVar

import trio

_began: ContextVar[float] = ContextVar("beats_began", default=0.0)


def begin_beats() -> None:
    """The present task and all that it starts are one node, whose beats count from now: two nodes do not keep step."""
    _began.set(trio.current_time())


def next_beat(seconds: float) -> float:
    """The next moment, on trio's clock, that is a whole multiple of `seconds` (a whole number of quarters) away from when
    this node's beats began.
    """
    began, now = _began.get(), trio.current_time()
    beat = began + (math.floor((now - began) / seconds) + 1) * seconds
    return beat if beat > now else beat + seconds  # rounding: who slept until a beat may be a hair before it


async def sleep_to_beat(seconds: float) -> None:
    """Sleep until `next_beat`: `seconds` from one beat to the next, the first time less."""
    await trio.sleep_until(next_beat(seconds))
