"""What real runs say of the probe's numbers: one factor per kind of weights, pure.

A probe measures a machine by itself for seconds; a runner at work is the truth, as long as it works. So
each runner's decode steps are held against what the cost model makes of the probe's numbers for that
seat, and the ratio, smoothed, goes into what the node publishes: probe × factor. It takes in whatever
the probe cannot know, from heat to a browser with forty tabs.

Smoothed in the logarithm, so that twice as slow and twice as fast weigh the same and order matters
little. Weighed by steps: a minute of decoding says more than one second of it. Evidence fades with a
half-life, so that new runs count the more the older the last ones are; the factor itself does not
drift back while nothing runs, since nothing new is known. Never more than a factor of four: beyond
that something is wrong that a factor does not mend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, isfinite, log

from meshinfer.topology.speed import NodeSpeed

GREATEST_FACTOR = 4.0
LEAST_STEPS = 32
"""Of one kind, before they change anything: the first steps of a runner pay for what starts lazily."""
MOST_STEPS = 2000.0
"""What all past evidence weighs at most: about a minute of a fast model. Raising it makes the factor slower to follow."""
HALF_LIFE_SECONDS = 900.0
"""Of the weight of past evidence: laptops heat up, are unplugged and carried about within a quarter of an hour."""
KINDS_LIMIT = 16
"""As many as a card publishes."""


@dataclass(frozen=True, slots=True)
class _Evidence:
    steps: int
    """Ever."""
    weight: float
    """Of `log_ratio`, in steps, as of `at`."""
    log_ratio: float
    at: float


class Calibration:
    """Factors of time, measured / predicted, by kind of weights."""

    def __init__(self) -> None:
        self._evidence: dict[str, _Evidence] = {}

    def observe(self, kind: str, predicted_seconds: float, measured_seconds: float, steps: int, now: float) -> None:
        """Take in that `steps` steps took `measured_seconds` each, where the probe's numbers give `predicted_seconds`.

        What cannot be a ratio (nothing measured yet, nothing predicted) is passed over.
        """
        if steps <= 0 or not (predicted_seconds > 0 and measured_seconds > 0):
            return
        ratio = measured_seconds / predicted_seconds
        if not (isfinite(ratio) and ratio > 0):
            return
        bound = log(GREATEST_FACTOR)
        seen = max(-bound, min(bound, log(ratio)))
        past = self._evidence.get(kind)
        if past is None:
            if len(self._evidence) >= KINDS_LIMIT:
                oldest = min(self._evidence, key=lambda known: self._evidence[known].at)
                del self._evidence[oldest]
            past = _Evidence(0, 0.0, 0.0, now)
        kept = min(past.weight, MOST_STEPS) * 0.5 ** (max(0.0, now - past.at) / HALF_LIFE_SECONDS)
        weight = kept + steps
        mean = past.log_ratio + (seen - past.log_ratio) * steps / weight
        self._evidence[kind] = _Evidence(past.steps + steps, weight, mean, max(now, past.at))

    def factor(self, kind: str) -> float:
        """Of time: 2 means that real steps take twice as long as predicted. 1 until enough is known."""
        known = self._evidence.get(kind)
        return exp(known.log_ratio) if known and known.steps >= LEAST_STEPS else 1.0

    def forget(self, kind: str) -> None:
        """Its probe has been repeated: the factor was to the old numbers."""
        self._evidence.pop(kind, None)

    def applied(self, kind: str, speed: NodeSpeed) -> NodeSpeed:
        """The probe's `speed` as real runs bear it out."""
        factor = self.factor(kind)
        return replace(
            speed,
            stream_bytes_per_second=_rate(speed.stream_bytes_per_second / factor),
            flops_per_second=_rate(speed.flops_per_second / factor),
            step_overhead_seconds=_seconds(speed.step_overhead_seconds * factor),
            sampling_seconds=_seconds(speed.sampling_seconds * factor),
            layer_overhead_seconds=_seconds(speed.layer_overhead_seconds * factor),
            cache_bytes_per_second=min(1e18, speed.cache_bytes_per_second / factor),
            row_bytes_per_second=min(1e18, speed.row_bytes_per_second / factor),
            pass_bytes_per_second=min(1e18, speed.pass_bytes_per_second / factor),
        )


def _rate(value: float) -> float:
    """Within what a card may say."""
    return max(1e-3, min(1e18, value))


def _seconds(value: float) -> float:
    return min(3600.0, value)
