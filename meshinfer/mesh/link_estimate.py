"""From samples to an estimate of one path, and which of several paths to take. Pure.

A *path* is one pair of addresses between two nodes; an edge has as many as the nodes have networks in
common (a cable, a Wi-Fi). Of each path the deciding end keeps a few figures, each estimated alike:

- the **median of the last five** samples: one probe beside a busy moment changes nothing;
- but **two successive samples that agree with each other and not with the rest** begin anew: a cable that was
  moved, a laptop carried out of the room. So a lie of one sample costs nothing, and the truth needs two.

Paths are compared by one number, the time of a message of 256 KiB: between a decode step's few KiB, which
only latency counts for, and a prefill chunk's megabytes. Another path is taken when it beats the present one by a
fifth: less is noise, and a change opens new channels.

An edge is *degraded* when its path has for a minute been worse than half of its best.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW = 5
DISAGREE = 1.5
"""Factor. Probes of an idle link repeat within 10 to 20 %; a change that matters to a plan is larger than this."""
REFERENCE_BYTES = 256 * 1024
SWITCH_SHARE = 0.8
"""Another path is taken when its message takes less than this share of the present one's."""
DEGRADED_FACTOR = 2.0
DEGRADED_AFTER_SECONDS = 60.0
DEGRADED_SLACK_SECONDS = 2e-3
"""A round trip that grew by less is a busy machine, whatever the factor."""
FAILURES_TO_LOSE = 2
"""Probes in a row without an answer, after which a path does not count: one may have met a restart."""


class Figure:
    """One positive quantity, from noisy samples."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def add(self, sample: float) -> None:
        """Positive samples count, others say nothing."""
        if sample <= 0:
            return
        *older, last = self._samples or (sample,)
        if older and _far(sample, rest := statistics.median(older)) and _far(last, rest) and not _far(sample, last):
            self._samples = deque((last,), maxlen=WINDOW)
        self._samples.append(sample)

    @property
    def value(self) -> float:
        """0 before the first sample."""
        return statistics.median(self._samples) if self._samples else 0.0

    @property
    def samples(self) -> int:
        """That it rests on."""
        return len(self._samples)

    @property
    def in_doubt(self) -> bool:
        """The last sample disagrees with the rest: another one would tell whether the link has changed."""
        *older, last = self._samples or (0.0,)
        return bool(older) and _far(last, statistics.median(older))


def _far(one: float, other: float) -> bool:
    return max(one, other) > DISAGREE * min(one, other)


@dataclass
class Path:
    """One pair of addresses, as measured so far."""

    rtt: Figure = field(default_factory=Figure)
    message: Figure = field(default_factory=Figure)
    bandwidth_out: Figure = field(default_factory=Figure)
    """Of this end's bytes, as the other end saw them arrive."""
    bandwidth_in: Figure = field(default_factory=Figure)
    tried_at: float | None = None
    """Last round-trip probe, whatever came of it; None before the first."""
    bulk_at: float | None = None
    """Last time that real frames or bursts told its bandwidth."""
    failures: int = 0
    """In a row."""
    doubts: int = 0
    """Bursts in a row that settled nothing: a link that is never the same twice is not worth the whole budget."""
    rtt_doubts: int = 0
    """Round-trip probes in a row that settled nothing: between busy machines no two are alike."""

    @property
    def works(self) -> bool:
        return self.rtt.value > 0 and self.failures < FAILURES_TO_LOSE

    @property
    def in_doubt(self) -> bool:
        return self.rtt.in_doubt or self.bandwidth_out.in_doubt or self.bandwidth_in.in_doubt

    def carried(self, out_bytes_per_second: float, in_bytes_per_second: float, now: float) -> None:
        """Bursts or real frames told its bandwidth; 0 for a direction that they did not."""
        self.bandwidth_out.add(out_bytes_per_second)
        self.bandwidth_in.add(in_bytes_per_second)
        self.bulk_at = now
        self.doubts = self.doubts + 1 if self.in_doubt else 0

    def answered(self, rtt_seconds: float, message_seconds: float, now: float) -> None:
        self.rtt.add(rtt_seconds)
        self.message.add(message_seconds)
        self.tried_at, self.failures = now, 0
        self.rtt_doubts = self.rtt_doubts + 1 if self.rtt.in_doubt else 0

    def failed(self, now: float) -> None:
        self.tried_at = now
        self.failures += 1

    def message_seconds(self) -> float:
        """Time of a message of `REFERENCE_BYTES`, mean of both directions; latency alone where no bandwidth is known."""
        rates = [rate for rate in (self.bandwidth_out.value, self.bandwidth_in.value) if rate]
        transfer = sum(REFERENCE_BYTES / rate for rate in rates) / len(rates) if rates else 0.0
        return self.rtt.value / 2 + transfer


def best_path(paths: Mapping[str, Path], present: str | None) -> str | None:
    """The host whose path to take; `present` unless another is clearly better. None if none works.

    Paths whose bandwidth is known compete with each other; until it is, they are only better than none.
    """
    working = {host: path for host, path in paths.items() if path.works}
    measured = {host: path for host, path in working.items() if path.bandwidth_out.value or path.bandwidth_in.value}
    return _quickest(measured or working, present)


def _quickest(paths: Mapping[str, Path], present: str | None) -> str | None:
    if not paths:
        return None
    best = min(sorted(paths), key=lambda host: paths[host].message_seconds())
    held = paths.get(present) if present is not None else None
    if held is not None and paths[best].message_seconds() >= SWITCH_SHARE * held.message_seconds():
        return present
    return best


class Health:
    """Whether an edge has become much worse than it was."""

    def __init__(self) -> None:
        self._best_rtt = float("inf")
        self._best_rate = 0.0
        self._bad_since: float | None = None

    def look(self, rtt_seconds: float, bytes_per_second: float, now: float) -> None:
        """The path's estimates as they are now; 0 for what is not known."""
        if rtt_seconds > 0:
            self._best_rtt = min(self._best_rtt, rtt_seconds)
        self._best_rate = max(self._best_rate, bytes_per_second)
        slow = 0 < bytes_per_second < self._best_rate / DEGRADED_FACTOR
        late = rtt_seconds > DEGRADED_FACTOR * self._best_rtt + DEGRADED_SLACK_SECONDS
        if not slow and not late:
            self._bad_since = None
        elif self._bad_since is None:
            self._bad_since = now

    def is_degraded(self, now: float) -> bool:
        return self._bad_since is not None and now - self._bad_since >= DEGRADED_AFTER_SECONDS
