"""How long the head waits for a step's answer. Pure.

Steps are answered in order, so a step's own time runs from the later of two moments: when it was sent, and
when the step before it was answered. Decode steps take about the same time each; a chunk of prompts takes
time for its tokens. Five times the moving average, with a floor: what is slower than that has stopped, and
a stopped peer (unlike a dead one) closes no socket.
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 5.0
"""A step beside a long garbage collection or a busy neighbour takes 2 to 3 times its mean; 5 is not seen."""
FLOOR_SECONDS = 2.0
"""A laptop that swaps or whose Wi-Fi roams stalls for about a second. A node that is gone must be noticed in 3."""
FIRST_SECONDS = 60.0
"""Until three steps of a kind have been seen: kernels are compiled, pages come in from disk."""
FIRST_STEPS = 3
SMOOTHING = 0.2
"""Weight of the newest step: a mean over about the last ten."""


@dataclass(slots=True)
class _Mean:
    seconds: float = 0.0
    """Per unit: a step, or a token of a chunk."""
    seen: int = 0

    def add(self, seconds: float) -> None:
        self.seen += 1
        weight = max(SMOOTHING, 1 / self.seen)
        self.seconds += weight * (seconds - self.seconds)


class Patience:
    """Moving averages of one pipeline's steps."""

    def __init__(self) -> None:
        self._decode = _Mean()
        self._prefill = _Mean()

    @property
    def decode_seconds(self) -> float:
        """Of one step that samples; 0 if there was none."""
        return self._decode.seconds

    def allowance(self, chunk_tokens: int) -> float:
        """Seconds that a step may take; `chunk_tokens` 0 for one that samples (or runs nothing)."""
        mean, units = (self._prefill, chunk_tokens) if chunk_tokens else (self._decode, 1)
        if mean.seen < FIRST_STEPS:
            return FIRST_SECONDS
        return max(FLOOR_SECONDS, FACTOR * mean.seconds * units)

    def observe(self, chunk_tokens: int, seconds: float) -> None:
        """A step took `seconds`."""
        if chunk_tokens:
            self._prefill.add(seconds / chunk_tokens)
        else:
            self._decode.add(seconds)
