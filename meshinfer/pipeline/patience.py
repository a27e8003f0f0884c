"""How long the head waits for a step's answer. Pure.

Steps are answered in order, so a step's own time runs from the later of two moments: when it was sent, and
when the step before it was answered. What that time means depends on the pipeline. A step sent into an idle
one takes the sum of all stages; behind others on their way, it follows at the pace of the slowest stage. So
decode steps, which the head sends one by one, are measured when the pipeline was idle; chunks of prompts
are measured per token and stage, and allowed for all stages.

Five times the moving average, with a floor: what is slower than that has stopped. A process that stops
closes no socket, unlike one that dies. First steps have more time (docs/decisions/patience-before-anything-is-usual.md).
"""

from __future__ import annotations

from dataclasses import dataclass

FACTOR = 5.0
"""A step beside a busy neighbour takes 2 to 4 times its mean (measured with eight jobs on two cores)."""
FLOOR_SECONDS = 2.0
"""A laptop that swaps or whose Wi-Fi roams stalls for about a second. A node that is gone must be noticed in 3."""
UNKNOWN_SECONDS = 30.0
"""For the very first step beside what it would take if all stages were like the head's own: another may be much slower
(512 tokens at 20 a second take 26 s), and the links too. Each stage's own agent knows better, and is first."""
UNKNOWN_FACTOR = 2.0
FIRST_STEPS = 3
FIRST_FACTOR = 10.0
FIRST_FLOOR_SECONDS = 5.0
"""Until three steps of a kind have been seen: first ones wait for pages, kernels and caches that later ones find."""
SMOOTHING = 0.2
"""Weight of the newest step: a mean over about the last ten."""


@dataclass(slots=True)
class _Mean:
    seconds: float = 0.0
    seen: int = 0

    def add(self, seconds: float) -> None:
        self.seen += 1
        self.seconds += max(SMOOTHING, 1 / self.seen) * (seconds - self.seconds)


class Patience:
    """Moving averages of the steps of a pipeline of `stages` stages."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._decode = _Mean()
        """Of a step through all stages."""
        self._prefill = _Mean()
        """Of a token in one stage."""
        self._chunk_seconds = 0.0
        """The longest that a chunk has taken through all stages."""
        self._expected_seconds = 0.0
        """Of a token in the head's own stage, told before there was a step."""

    def expect(self, seconds_per_token: float) -> None:
        self._expected_seconds = seconds_per_token

    def allowance(self, chunk_tokens: int) -> float:
        """Seconds that a step may take; `chunk_tokens` 0 for one that samples, or runs nothing."""
        mean = self._prefill if chunk_tokens else self._decode
        usual = mean.seconds * (chunk_tokens * self._stages if chunk_tokens else 1)
        if mean.seen >= FIRST_STEPS:
            return max(FLOOR_SECONDS, FACTOR * usual)
        if not mean.seen and not chunk_tokens:
            usual = self._chunk_seconds  # a step that samples takes no longer than a chunk
        if usual:
            return max(FIRST_FLOOR_SECONDS, FIRST_FACTOR * usual)
        return UNKNOWN_SECONDS + UNKNOWN_FACTOR * self._expected_seconds * chunk_tokens * self._stages

    def observe(self, chunk_tokens: int, seconds: float, *, was_idle: bool) -> None:
        """A step took `seconds` of its own time.

        Args:
            chunk_tokens: as for `allowance`.
            seconds: from the later of its sending and the answer before it.
            was_idle: nothing else was on its way when it was sent.
        """
        if chunk_tokens:
            self._prefill.add(seconds / chunk_tokens / (self._stages if was_idle else 1))
            self._chunk_seconds = max(self._chunk_seconds, seconds * (1 if was_idle else self._stages))
        elif was_idle:
            self._decode.add(seconds)
