"""What others use of this machine's CPU: neither this agent nor its runners and probes.

A speed probe measures the machine for itself, and runners have it to themselves but for this. The run queue
would not do: a node's own runners stand in it, so a node that serves would look busy to whoever plans for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

LOOK_SECONDS = 10.0
"""Between two looks, each of which finds all of this process's children: 5 ms where 300 processes run."""
SMOOTHING = 0.5
"""Weight of the newest look: after half a minute older ones count an eighth."""


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Used since the machine's start, all cores together."""

    all: float
    own: float
    """By this process and what it started, what has ended included."""
    possible: float
    """With nothing idle."""


def others_share(before: CpuSeconds, now: CpuSeconds) -> float:
    """Of all cores between two looks, 0 to 1."""
    possible = now.possible - before.possible
    others = (now.all - before.all) - (now.own - before.own)
    return max(0.0, min(1.0, others / possible)) if possible > 0 else 0.0


def read_cpu_seconds() -> CpuSeconds:
    """As the system counts."""
    machine = psutil.cpu_times()._asdict()
    # A guest's time is counted in its host's already; what a hypervisor took is nobody's here, and gone all the same.
    counted = {name: seconds for name, seconds in machine.items() if not name.startswith("guest")}
    possible = sum(counted.values())
    return CpuSeconds(possible - counted.get("idle", 0.0) - counted.get("iowait", 0.0), _own_seconds(), possible)


def _own_seconds() -> float:
    this = psutil.Process(os.getpid())
    total = sum(this.cpu_times()[:4])  # with those of children that have ended
    for child in this.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:  # it ends just now
            continue
    return total


class OthersLoad:
    """Looks now and then, and smooths."""

    def __init__(self) -> None:
        self._before = read_cpu_seconds()
        self.share = 0.0

    def look(self) -> float:
        """The share as of now."""
        now = read_cpu_seconds()
        self.share += SMOOTHING * (others_share(self._before, now) - self.share)
        self._before = now
        return round(self.share, 2)
