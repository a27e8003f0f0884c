"""What a heartbeat tells. The MLX thread writes it, the control thread sends it.

So a heartbeat means progress: when the MLX thread hangs, its numbers stand still while `busy_seconds` grows.
Plain attributes, each written by one thread; a reader may see them a moment apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from meshinfer.wire.runner_control import Heartbeat

_SMOOTHING = 0.1
"""Of the newest step; the first ten weigh the same, since the very first takes many times what later ones do."""


@dataclass(slots=True)
class Progress:
    """Counters of one runner."""

    steps: int = 0
    busy_since: float | None = None
    """Monotonic; None when idle."""
    busy_tokens: int = 0
    """Of a prompt."""
    prompt_seconds: float = 0.0
    """The longest step of a prompt so far. The first of all, the rehearsal, is only what is known until there is another."""
    prompt_tokens: int = 0
    """That it read."""
    sessions: int = 0
    waiting: int = 0
    active_bytes: int = 0
    cache_bytes: int = 0
    """Of sessions: what keys, values and states hold."""
    step_seconds: float = 0.0
    tokens: int = 0
    recomputed_tokens: int = 0
    kept_bytes: int = 0
    timer: Callable[[], float] = time.perf_counter
    """Of the engine: what a step takes if nothing else is done here."""
    computing_seconds: float = 0.0
    _computing_since: float = 0.0
    _decode_steps: int = 0
    _prompt_steps: int = 0

    def begin_step(self, tokens: int) -> None:
        """`tokens`: of a prompt; 0 for a step that samples."""
        self.busy_tokens, self.busy_since = tokens, time.monotonic()
        self._computing_since = self.timer()

    def end_step(self, *, decode: bool) -> None:
        """A step is through this stage."""
        assert self.busy_since is not None
        seconds, computing = time.monotonic() - self.busy_since, self.timer() - self._computing_since
        tokens = self.busy_tokens
        self.be_idle()
        self.steps += 1
        if tokens:
            self._prompt_steps += 1
            if self._prompt_steps <= 2 or seconds > self.prompt_seconds:
                self.prompt_seconds, self.prompt_tokens = seconds, tokens
        if decode:
            self._decode_steps += 1
            weight = max(_SMOOTHING, 1 / self._decode_steps)
            self.step_seconds += weight * (seconds - self.step_seconds)
            self.computing_seconds += weight * (computing - self.computing_seconds)

    def be_idle(self) -> None:
        """No step is under way: it ended, or its instance did."""
        self.busy_since, self.busy_tokens = None, 0

    def heartbeat(self) -> Heartbeat:
        since = self.busy_since
        return Heartbeat(
            steps=self.steps,
            busy_seconds=0.0 if since is None else time.monotonic() - since,
            sessions=self.sessions,
            waiting=self.waiting,
            active_bytes=self.active_bytes,
            cache_bytes=self.cache_bytes,
            resident_bytes=psutil.Process().memory_info().rss,
            step_seconds=self.step_seconds,
            tokens=self.tokens,
            busy_tokens=self.busy_tokens,
            prompt_seconds=self.prompt_seconds,
            prompt_tokens=self.prompt_tokens,
            recomputed_tokens=self.recomputed_tokens,
            kept_bytes=self.kept_bytes,
            computing_seconds=self.computing_seconds,
        )
