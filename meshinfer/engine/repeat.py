"""A measurement, repeated until it is steady or its time is up.

The median of several runs is what counts: one run may be disturbed by anything. The spread of the
middle half says how far to believe it, and ends the repeating early on a quiet machine. Pure but for
the two clocks that the caller brings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

Clock = Callable[[], float]
"""Seconds since some moment."""

STEADY_SPREAD = 0.02
LEAST_RUNS = 4
"""Before a spread says anything."""
MOST_RUNS = 25


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run, over several."""

    median: float
    spread: float
    """Half the width of the middle half, as a share of the median; 1 where too few runs say nothing."""
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        ordered = sorted(seconds)
        middle = median(ordered)
        if len(ordered) < LEAST_RUNS or not middle:
            return cls(middle, 1.0, len(ordered))
        quarter = len(ordered) // 4
        width = ordered[-1 - quarter] - ordered[quarter]
        return cls(middle, width / 2 / middle, len(ordered))


def repeat(run: Callable[[], object], allowed_seconds: float, *, now: Clock, timer: Clock) -> Times:
    """Time `run` until it is steady, at least once, and begin no run that would probably end too late.

    Args:
        run: what is measured. One run before the first that counts warms up whatever starts lazily, if there is
            time for two more.
        allowed_seconds: for all of it, on `now`.
        now: the wall's clock, for the time that is left.
        timer: the clock that measures; may be the process's CPU time, which no other process disturbs.
    """
    begin = now()
    seconds = [_timed(run, timer)]
    longest = now() - begin
    warmed_up = False
    while now() - begin + longest <= allowed_seconds and len(seconds) < MOST_RUNS:
        before = now()
        seconds.append(_timed(run, timer))
        longest = max(longest if warmed_up else 0.0, now() - before)
        if not warmed_up:
            del seconds[0]
            warmed_up = True
        if len(seconds) >= LEAST_RUNS and Times.of(seconds).spread <= STEADY_SPREAD:
            break
    return Times.of(seconds)


def _timed(run: Callable[[], object], timer: Clock) -> float:
    before = timer()
    run()
    return timer() - before
