"""The places of a head of the exact engine, and who waits for one.

What it does not model: places that are held or given up for answers that have begun.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio

MAX_WAITING, MAX_RETURNING = 64, 256
"""How many a head lets wait before it refuses a new session, and one that was open before; as real ones."""


class FakePlaces:
    """As many as are asked for: a seat that goes on in another epoch has other ones, and the same queue."""

    def __init__(self) -> None:
        self.taken = 0
        self._waiting: list[tuple[int, int]] = []
        """(rank, ticket) of all and only those that wait; the least goes first."""
        self._tickets = itertools.count()
        self._moves_up = trio.lowlevel.ParkingLot()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def one_of(self, places: int, rank: int) -> AsyncGenerator[None]:
        """One of so many, once it is free and nobody goes before."""
        turn = (rank, next(self._tickets))
        self._waiting.append(turn)
        try:
            while self.taken >= places or min(self._waiting) != turn:
                await self._moves_up.park()
        finally:
            self._waiting.remove(turn)
            self._moves_up.unpark_all()
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._moves_up.unpark_all()
