"""Runs the membership machine on this node's clock: hands it what happens, and wakes it when one of its timers is due.

The clock is not to be trusted blindly. A lid closes, a core is taken away, and what this node then finds is everyone's
silence, which was its own. So before anything else is told, it is seen whether the loop stood still: it should have
shown itself a tick ago at most. A machine that was suspended does not count that on trio's clock, but knows it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import trio

from meshinfer.base.beats import next_beat
from meshinfer.base.suspension import suspended_seconds
from meshinfer.mesh.changes import Changes
from meshinfer.mesh.membership import Membership
from meshinfer.mesh.membership_events import Connected, Effect, Event, Late, PingAnswered, TimePassed
from meshinfer.mesh.waking import Waking

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
"""How often this node looks at least whether its own loop comes late. Costs 0.1 ms each; every ping looks too, so a
standstill of less than this beyond the lateness below may go unseen."""
LATE_SECONDS = 0.1
"""Lateness that counts: a garbage collection or a signature takes a quarter of it, a loop on a starved core many times."""
LATE_TO_TELL_SECONDS = 1.0
"""A person is told of that. Shorter ones are many on a busy laptop, and nothing is to be done about them."""


class MembershipDriver:
    """The one caller of `Membership.handle`."""

    def __init__(self, membership: Membership, perform: Callable[[Effect], None]) -> None:
        """`perform` does what the machine says, at once."""
        self._membership, self._perform = membership, perform
        self._news = Changes()
        """The next wake-up is another one."""
        self._ticked = math.inf
        """When this node's loop last showed that it runs; infinite before it does."""
        self._suspended_seconds = suspended_seconds()
        """Of the machine, when `_ticked` was set last."""
        self._waking = Waking()

    async def run(self) -> None:
        """Let time pass, until cancelled."""
        watch = self._news.watch()
        self._ticked = trio.current_time()
        while True:
            wakeup = self._membership.next_wakeup()
            tick = next_beat(TICK_SECONDS)
            with trio.move_on_at(tick if wakeup is None else min(tick, wakeup)):
                await watch.changed()
                continue
            self.tell(TimePassed())

    def tell(self, event: Event) -> None:
        """Hand `event` to the machine, and perform what it says."""
        before = self._membership.next_wakeup()
        now = trio.current_time()
        # Whatever comes first after a standstill: whose silence is whose is sorted out before any timer is looked at.
        late = self._stood_still(now)
        if late >= LATE_SECONDS:
            level = logging.INFO if late >= LATE_TO_TELL_SECONDS else logging.DEBUG
            log.log(level, "this node stood still for %.1f s", late)
            self._waking.stood_still(late, now, in_company=bool(self._membership.vouched()))
            self._handle(Late(late), now)
        if isinstance(event, Connected | PingAnswered):
            self._waking.heard(now)
        self._handle(event, now)
        if self._membership.next_wakeup() != before:
            self._news.notify()

    def is_waking(self) -> bool:
        """Whether this node has just come to, after others may have held it dead, and may not know yet what they did."""
        self.tell(TimePassed())  # whoever asks may run before the clock was looked at
        return self._waking.is_on(trio.current_time())

    def _handle(self, event: Event, now: float) -> None:
        for effect in self._membership.handle(event, now):
            self._perform(effect)

    def _stood_still(self, now: float) -> float:
        """For how long, since this was last asked."""
        suspended = suspended_seconds()
        late = max(0.0, now - self._ticked - TICK_SECONDS) + max(0.0, suspended - self._suspended_seconds)
        if self._ticked < math.inf:
            self._ticked, self._suspended_seconds = now, suspended
        return late
