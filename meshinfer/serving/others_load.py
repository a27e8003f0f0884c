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
    """By this process and what it started."""
    possible: float
    """With nothing idle."""
    children: frozenset[int] = frozenset()
    """Processes that `own` counts besides this one."""


def others_share(before: CpuSeconds, now: CpuSeconds) -> float | None:
    """Of all cores between two looks, 0 to 1; None if that cannot be told.

    When a runner has ended, macOS counts its time nowhere: it would seem to be others'.
    """
    possible = now.possible - before.possible
    if possible <= 0 or not before.children <= now.children:
        return None
    others = (now.all - before.all) - (now.own - before.own)
    return max(0.0, min(1.0, others / possible))


def read_cpu_seconds() -> CpuSeconds:
    """As the system counts."""
    machine = psutil.cpu_times()._asdict()
    # A guest's time is counted in its host's already; what a hypervisor took is nobody's here, and gone all the same.
    counted = {name: seconds for name, seconds in machine.items() if not name.startswith("guest")}
    possible = sum(counted.values())
    busy = possible - counted.get("idle", 0.0) - counted.get("iowait", 0.0)
    this = psutil.Process(os.getpid())
    own = sum(this.cpu_times()[:4])  # with those of children that have ended, where the system counts them
    children: set[int] = set()
    for child in this.children(recursive=True):
        try:
            own += sum(child.cpu_times()[:4])
        except psutil.Error:  # it ends just now
            continue
        children.add(child.pid)
    return CpuSeconds(busy, own, possible, frozenset(children))


class OthersLoad:
    """Looks now and then, and smooths."""

    def __init__(self) -> None:
        self._before = read_cpu_seconds()
        self.share = 0.0

    def look(self) -> float:
        """The share as of now."""
        now = read_cpu_seconds()
        share = others_share(self._before, now)
        if share is not None:
            self.share += SMOOTHING * (share - self.share)
        self._before = now
        return round(self.share, 2)
