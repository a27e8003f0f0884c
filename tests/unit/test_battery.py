"""A laptop whose battery runs out leaves before it switches itself off, and for nothing less."""

from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import trio
import trio.testing

from meshinfer.serving.battery import LOOK_SECONDS, Battery, battery, until_low

Clock = trio.testing.MockClock

FULL = Battery(100.0, plugged_in=False)
LOW = Battery(4.0, plugged_in=False)
CHARGING = Battery(4.0, plugged_in=True)


async def looks_until_low(*told: Battery | None) -> int:
    """How many looks it took; the last of `told` stays."""
    seen: list[Battery | None] = []
    rest: Iterator[Battery | None] = iter(told)

    async def look() -> Battery | None:
        seen.append(next(rest, told[-1]))
        return seen[-1]

    with trio.move_on_after(20 * LOOK_SECONDS):
        assert (await until_low(5.0, look)) == LOW
        return len(seen)
    return 0


async def test_it_is_low_when_two_looks_say_so(autojump_clock: Clock) -> None:
    assert await looks_until_low(FULL, FULL, LOW, LOW) == 4
    assert await looks_until_low(LOW, CHARGING, LOW, FULL, LOW, LOW) == 6


@pytest.mark.parametrize("told", [FULL, CHARGING, None])
async def test_it_never_is_while_charged_charging_or_unknown(told: Battery | None, autojump_clock: Clock) -> None:
    assert await looks_until_low(told) == 0


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (None, None),
        (SimpleNamespace(percent=float("nan"), power_plugged=False), None),
        (SimpleNamespace(percent=7.0, power_plugged=None), Battery(7.0, plugged_in=True)),
        (SimpleNamespace(percent=7.0, power_plugged=False), Battery(7.0, plugged_in=False)),
    ],
)
def test_what_the_platform_tells(told: object, expected: Battery | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: told, raising=False)
    assert battery() == expected


def test_half_a_battery_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("energy_now: no such device")

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    assert battery() is None
