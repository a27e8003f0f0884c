"""What a standstill of this node's own loop does: it is told before anything else, once, and for what it was."""

from __future__ import annotations

import pytest
from trio.testing import wait_all_tasks_blocked

from meshinfer.base.ids import NodeId
from meshinfer.mesh import membership_driver
from meshinfer.mesh.membership import Membership
from meshinfer.mesh.membership_driver import TICK_SECONDS, MembershipDriver
from meshinfer.mesh.membership_events import Blamed, Connected, Effect, Event, Late, TimePassed
from meshinfer.mesh.waking import HELD_DEAD_SECONDS

N = NodeId("n")


class Listening(Membership):
    """Remembers what it was told, time aside."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, TimePassed):
            self.heard.append(event)
        return super().handle(event, now)


def lateness(event: Event) -> float:
    assert isinstance(event, Late)
    return event.seconds


async def test_a_standstill_is_told_before_what_was_found_after_it(mock_clock, nursery) -> None:
    membership = Listening()
    driver = MembershipDriver(membership, lambda _effect: None)
    nursery.start_soon(driver.run)
    await wait_all_tasks_blocked()
    driver.tell(Connected(N))
    mock_clock.jump(10.0)
    driver.tell(Blamed(N))
    driver.tell(Blamed(N))
    connected, late, *rest = membership.heard
    assert connected == Connected(N)
    assert lateness(late) == pytest.approx(10.0 - TICK_SECONDS)
    assert rest == [Blamed(N), Blamed(N)]
    assert driver.is_waking()


async def test_sleep_that_no_timer_counts_is_a_standstill_too(monkeypatch, mock_clock, nursery) -> None:
    slept = 5.0
    monkeypatch.setattr(membership_driver, "suspended_seconds", lambda: slept)
    membership = Listening()
    driver = MembershipDriver(membership, lambda _effect: None)
    nursery.start_soon(driver.run)
    await wait_all_tasks_blocked()
    slept += HELD_DEAD_SECONDS
    driver.tell(TimePassed())
    assert [lateness(event) for event in membership.heard] == [pytest.approx(HELD_DEAD_SECONDS)]


async def test_before_it_runs_no_standstill_is_told_of(mock_clock) -> None:
    membership = Listening()
    driver = MembershipDriver(membership, lambda _effect: None)
    mock_clock.jump(60.0)
    driver.tell(Connected(N))
    assert membership.heard == [Connected(N)]
    assert not driver.is_waking()
