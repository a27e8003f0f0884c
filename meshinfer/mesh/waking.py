"""Whether this node has just come to: its lid was opened, or whatever held up its loop is over.

The others may have held it dead. Its connections are those of before, so everyone seems silent to it, and what it takes
for broken they may have made whole long ago. So for a moment it decides nothing that concerns them: until it has lost the
old connections, was dialled anew and has heard what they did. Pure.
"""

from __future__ import annotations

import math

from meshinfer.mesh.membership import Timing

HELD_DEAD_SECONDS = Timing().dead_min_seconds
"""Who stood still for less was held dead by nobody."""
WAKING_SECONDS = 1.5
"""At least: 0.5 s is too little on a busy machine to hear of the instances that others have placed anew."""
ALONE_SECONDS = 10.0
"""At most, while nobody answers and somebody did before: Wi-Fi is back some two to five seconds after the lid opens. Raising
it keeps a person waiting who has carried the laptop elsewhere."""
STALE_SECONDS = 0.3
"""What comes so soon after waking may have been sent before, and lain in a socket since."""


class Waking:
    """Of one node. `now` is seconds on any monotonic clock, never going back."""

    def __init__(self) -> None:
        self._woke_at = -math.inf
        self._heard_at = -math.inf
        self._had_company = False
        """Somebody was there before."""

    def stood_still(self, seconds: float, now: float, *, in_company: bool) -> None:
        """Until now, and whether there were neighbours when it began."""
        if seconds >= HELD_DEAD_SECONDS:
            was_waking = self.is_on(now)
            self._had_company = in_company or (was_waking and self._had_company)
            self._woke_at = now

    def heard(self, now: float) -> None:
        """Another node connected or answered."""
        self._heard_at = now

    def is_on(self, now: float) -> bool:
        since = now - self._woke_at
        if since < WAKING_SECONDS:
            return True
        has_heard = self._heard_at > self._woke_at + STALE_SECONDS
        return self._had_company and not has_heard and since < ALONE_SECONDS
