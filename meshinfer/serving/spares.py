"""A runner process that waits for its seat.

Starting one takes about two seconds, nearly all of it Python importing MLX and mlx-lm; a process
that has done so already turns that into nothing. One is kept while there is memory for it. It is not
a seat: nobody can see it in the mesh, and it gives way as soon as its memory is promised.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import trio

from meshinfer.base.beats import sleep_to_beat
from meshinfer.serving.runners import Runner

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often it is looked whether a spare may be kept. A seat that needs its memory waits no longer than this, and in
truth not at all: the seat takes the spare itself."""
REFILL_SECONDS = 4.0
"""After one was taken, until the next is started: that is two seconds of a core, which after a failure would be taken
from the runner that reads all prompts again. Less lengthens that pause (by 0.5 to 1 s on two cores), more leaves a second
failure on the same node without a spare (1 s more)."""


class Spares:
    """At most one idle runner.

    Args:
        start: makes a fresh runner.
        may_start: whether there is memory for one now, and no better use of the time.
        may_keep: whether the one that is there may stay.
    """

    def __init__(
        self, start: Callable[[], Awaitable[Runner]], may_start: Callable[[], bool], may_keep: Callable[[], bool]
    ) -> None:
        self._start = start
        self._may_start = may_start
        self._may_keep = may_keep
        self._spare: Runner | None = None
        self._not_before = -math.inf

    async def take(self) -> Runner:
        """The spare, or a fresh one. Raises OSError if no process can be started."""
        spare, self._spare = self._spare, None
        self._not_before = trio.current_time() + REFILL_SECONDS
        if spare is not None and spare.is_alive:
            return spare
        if spare is not None:
            await spare.stop()
        log.debug("no spare runner is at hand; starting one takes some 2 s")
        return await self._start()

    async def run(self) -> None:
        """Keep one as long as that is allowed."""
        try:
            while True:
                await sleep_to_beat(LOOK_SECONDS)
                await self._look()
        finally:
            if self._spare is not None:
                await self._spare.stop()

    async def _look(self) -> None:
        spare = self._spare
        if spare is not None and not (spare.is_alive and self._may_keep()):
            self._spare = None
            log.debug("the spare runner ends: %s", "its memory is promised" if spare.is_alive else "it has died")
            await spare.stop()
        elif spare is None and trio.current_time() >= self._not_before and self._may_start():
            try:
                started = await self._start()
            except OSError as error:
                log.warning("no spare runner: %s", error)
                return
            self._spare = started
