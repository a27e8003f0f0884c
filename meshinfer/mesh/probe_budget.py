"""Never more than so many bytes of probes in any hour, whichever hour one looks at. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 3600.0


class ProbeBudget:
    """What probes may still use, and what they used in the last hour."""

    def __init__(self, bytes_per_hour: int) -> None:
        self._limit = bytes_per_hour
        self._spent: deque[tuple[float, int]] = deque()
        """When and how much, oldest first; nothing older than an hour once somebody has looked."""
        self._total = 0
        self._reserved = 0

    def available(self, now: float) -> int:
        while self._spent and self._spent[0][0] <= now - WINDOW_SECONDS:
            self._total -= self._spent.popleft()[1]
        return max(0, self._limit - self._total - self._reserved)

    def reserve(self, wanted_bytes: int, now: float) -> int:
        """Set aside as much of `wanted_bytes` as there is; must be followed by `settle`."""
        granted = min(wanted_bytes, self.available(now))
        self._reserved += granted
        return granted

    def settle(self, reserved_bytes: int, used_bytes: int, now: float) -> None:
        """Of what was set aside, `used_bytes` were used. Round trips are counted too, and never refused."""
        self._reserved -= reserved_bytes
        self._total += used_bytes
        if used_bytes:
            self._spent.append((now, used_bytes))

    def spent(self, now: float) -> int:
        """In the last hour."""
        self.available(now)
        return self._total
