"""Who pings when: two neighbours take turns, and nobody's silence is waited for longer than promised."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.mesh.prober import PING_AT_LEAST_SECONDS, SILENCE_SECONDS, Turns


def exchange(rtt: float, seconds: float, *, deaf: bool = False) -> tuple[list[float], list[float]]:
    """When each of two neighbours pings, if nobody fails; `deaf`: nothing gets from the first to the second."""
    one, other = Turns(heard=0.0, goes_first=True), Turns(heard=0.3, goes_first=False)
    pings: tuple[list[float], list[float]] = ([], [])
    coming: list[tuple[float, str]] = []
    now = 0.0
    while now < seconds:
        for at, what in sorted(coming):
            if at <= now:
                coming.remove((at, what))
                match what:
                    case "one pings":
                        other.pinged(at)
                        coming.append((at + rtt / 2, "other answers"))
                    case "other answers":
                        one.answered(at)
                    case "other pings":
                        one.pinged(at)
                        if not deaf:
                            coming.append((at + rtt / 2, "one answers"))
                    case _:
                        other.answered(at)
        if one.due() <= now:
            one.pinging(now)
            pings[0].append(now)
            if not deaf:
                coming.append((now + rtt / 2, "one pings"))
        if other.due() <= now:
            other.pinging(now)
            pings[1].append(now)
            coming.append((now + rtt / 2, "other pings"))
        now += 0.001
    return pings


@given(st.floats(0.0002, 0.03))
def test_neighbours_take_turns_and_each_measures_once_a_second(rtt: float) -> None:
    one, other = exchange(rtt, 20)
    assert 17 <= len(one) <= 24
    assert 17 <= len(other) <= 24
    together = sorted(one + other)
    gaps = [later - earlier for earlier, later in pairwise(together)]
    assert max(gaps) <= SILENCE_SECONDS + rtt + 0.01, "so silence begins to count within half a second"


def test_who_is_only_heard_is_pinged_all_the_same() -> None:
    one, other = exchange(0.002, 20, deaf=True)
    gaps = [later - earlier for earlier, later in pairwise(one)]
    assert max(gaps) <= SILENCE_SECONDS + 0.01, "no answer: half a second, whatever is heard from the other side"
    assert one[0] <= PING_AT_LEAST_SECONDS
    assert len(other) >= 38
