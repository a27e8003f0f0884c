"""Who has just come to: for how long a node takes the others' silence for its own."""

from __future__ import annotations

import pytest

from meshinfer.base.suspension import suspended_seconds
from meshinfer.mesh.waking import ALONE_SECONDS, HELD_DEAD_SECONDS, STALE_SECONDS, WAKING_SECONDS, Waking


def test_a_node_is_waking_until_it_has_heard_somebody() -> None:
    waking = Waking()
    assert not waking.is_on(0.0)
    waking.stood_still(60.0, 100.0, in_company=True)
    waking.heard(100.0 + STALE_SECONDS / 2)  # sent before, and read now
    assert waking.is_on(100.0 + WAKING_SECONDS + 1.0)
    waking.heard(100.0 + WAKING_SECONDS + 1.0)
    assert not waking.is_on(100.0 + WAKING_SECONDS + 1.0)


def test_it_waits_for_some_time_however_soon_somebody_is_heard() -> None:
    waking = Waking()
    waking.stood_still(60.0, 100.0, in_company=True)
    waking.heard(101.0)
    assert waking.is_on(101.0)
    assert not waking.is_on(100.0 + WAKING_SECONDS)


@pytest.mark.parametrize(("in_company", "seconds"), [(True, ALONE_SECONDS), (False, WAKING_SECONDS)])
def test_it_does_not_wait_for_ever_and_not_for_nobody(*, in_company: bool, seconds: float) -> None:
    waking = Waking()
    waking.stood_still(60.0, 100.0, in_company=in_company)
    assert waking.is_on(100.0 + seconds - 0.1)
    assert not waking.is_on(100.0 + seconds)


def test_a_lid_that_is_closed_again_at_once_makes_no_hermit() -> None:
    waking = Waking()
    waking.stood_still(60.0, 100.0, in_company=True)
    waking.stood_still(60.0, 101.0, in_company=False)
    assert waking.is_on(101.0 + WAKING_SECONDS + 1.0)


def test_a_short_standstill_is_no_sleep() -> None:
    waking = Waking()
    waking.stood_still(HELD_DEAD_SECONDS - 0.1, 100.0, in_company=True)
    assert not waking.is_on(100.0)


def test_how_long_the_machine_slept_does_not_grow_while_it_runs() -> None:
    before = suspended_seconds()
    assert abs(suspended_seconds() - before) < 0.1
