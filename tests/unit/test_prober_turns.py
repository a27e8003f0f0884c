"""Who pings when: two neighbours take turns, and nobody's silence is waited for longer than promised."""

from __future__ import annotations

import heapq
import random
from itertools import pairwise

from hypothesis import given, settings
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


@given(st.randoms(use_true_random=False))
@settings(max_examples=5)
def test_neighbours_come_into_step(rng: random.Random) -> None:
    names = range(5)
    turns = {one: {n: Turns(-rng.random(), one < n) for n in names if n != one} for one in names}
    pings: dict[int, list[float]] = {one: [] for one in names}
    coming: list[tuple[float, int, int, bool]] = []
    for millisecond in range(20_000):
        now = millisecond / 1000
        while coming and coming[0][0] <= now:
            _, sender, receiver, is_ping = heapq.heappop(coming)
            if is_ping:
                turns[receiver][sender].pinged(now)
                heapq.heappush(coming, (now + 0.001, receiver, sender, False))
            else:
                turns[receiver][sender].answered(now)
        for one, others in turns.items():
            if any(each.due() <= now for each in others.values()):
                for other, each in others.items():
                    if each.joins(now):
                        each.pinging(now)
                        pings[one].append(now)
                        heapq.heappush(coming, (now + 0.001, one, other, True))
    for sent in pings.values():
        settled = [at for at in sent if at >= 10]
        assert 4 * 9 <= len(settled) <= 4 * 12, "each of the four is pinged once a second, as without company"
        assert len(set(settled)) <= 25, "at about two moments in each second"
