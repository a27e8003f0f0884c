"""Runners and probes of one machine, never at the same time; runners first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class GiveWay:
    """One probe at a time, and none while a runner is being started.

    That a runner *works* is not known here: who probes asks for that first, and whoever starts one counts it among
    those that do as soon as `start` returns.
    """

    def __init__(self) -> None:
        self._starting = 0
        self._probing: trio.CancelScope | None = None
        self._idle = trio.Event()
        """Set whenever no probe is under way."""
        self._idle.set()

    async def start(self, start: Callable[[], Awaitable[T]]) -> T:
        """Start a runner by `start`: a probe that is under way is cancelled and waited for."""
        self._starting += 1
        try:
            if self._probing is not None:
                self._probing.cancel()
            await self._idle.wait()
            return await start()
        finally:
            self._starting -= 1

    async def probe(self, probe: Callable[[], Awaitable[T]]) -> T | None:
        """What `probe` returns; None if a runner was to start before it was done."""
        assert self._probing is None, "two probes at once"
        if self._starting:
            return None
        self._idle = trio.Event()
        try:
            with trio.CancelScope() as self._probing:
                return await probe()
        finally:
            self._probing = None
            self._idle.set()
        return None
