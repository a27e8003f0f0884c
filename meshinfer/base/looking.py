"""To wait for what no event tells (silence, time, what others count): to look again and again."""

from __future__ import annotations

from collections.abc import Callable

import trio


async def until(is_so: Callable[[], bool], look_seconds: float) -> None:
    """Returns at once if it is so, else as soon as a look, each so many seconds, finds it so. The caller has the deadline."""
    while not is_so():  # noqa: ASYNC110 - that is what it is for
        await trio.sleep(look_seconds)
