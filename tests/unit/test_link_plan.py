"""When which path is probed, and that no hour sees more bytes than were allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.mesh.link_estimate import Path
from meshinfer.mesh.link_plan import (
    BURSTS_SECONDS,
    DOUBT_SECONDS,
    LOST_SECONDS,
    MAX_PATHS,
    ROUND_TRIPS_SECONDS,
    Job,
    candidate_hosts,
    next_job,
)
from meshinfer.mesh.probe_budget import WINDOW_SECONDS, ProbeBudget
from meshinfer.topology.link import CHANNEL_PROBE_BYTES, Link, off_the_wire
from meshinfer.transport.arrivals import Arrival, Arrivals


def known(now: float = 0.0, rate: float = 1e8) -> Path:
    path = Path()
    path.answered(1e-3, 1e-5, now)
    for _ in range(3):
        path.carried(rate, rate, now)
    return path


def test_round_trips_of_every_path_come_first():
    paths = {"a": known(), "b": Path()}
    assert next_job(paths, "a", 1.0, may_burst=True) == Job("b", "round trips")


def test_bursts_wait_for_idle_machines_and_a_budget():
    path = Path()
    path.answered(1e-3, 1e-5, 0.0)
    assert next_job({"a": path}, "a", 1.0, may_burst=False) is None
    assert next_job({"a": path}, "a", 1.0, may_burst=True) == Job("a", "bursts")


def test_the_first_bursts_are_confirmed_soon():
    path = Path()
    path.answered(1e-3, 1e-5, 0.0)
    now, times = 0.0, []
    while len(times) < 4:
        if next_job({"a": path}, "a", now, may_burst=True) == Job("a", "bursts"):
            times.append(now)
            path.carried(1e8, 1e8, now)
        now += 5.0
        path.answered(1e-3, 1e-5, now)
    assert times == [0.0, 20.0, 80.0, 80.0 + BURSTS_SECONDS]


def test_real_frames_make_bursts_needless():
    path = known()
    path.answered(1e-3, 1e-5, BURSTS_SECONDS)
    assert next_job({"a": path}, "a", BURSTS_SECONDS + 1, may_burst=True) == Job("a", "bursts")
    path.carried(0.0, 1e8, BURSTS_SECONDS)
    assert next_job({"a": path}, "a", BURSTS_SECONDS + 1, may_burst=True) is None


def test_an_idle_edge_is_measured_now_and_then():
    paths = {"a": known()}
    assert next_job(paths, "a", ROUND_TRIPS_SECONDS - 1, may_burst=True) is None
    assert next_job(paths, "a", ROUND_TRIPS_SECONDS, may_burst=True) == Job("a", "round trips")


def test_a_doubt_is_settled_soon_and_an_endless_one_ever_later():
    path = known()
    waits: list[float] = []
    now = 0.0
    for index in range(6):
        path.carried(1e8 * 10 ** (index + 1), 1e8, now)
        path.answered(1e-3, 1e-5, now)
        began = now
        while next_job({"a": path}, "a", now, may_burst=True) != Job("a", "bursts"):
            now += 1.0
            path.answered(1e-3, 1e-5, now)
        waits.append(now - began)
    assert waits[0] >= DOUBT_SECONDS
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]


def test_a_round_trip_in_doubt_is_repeated_soon_and_an_endless_doubt_ever_later():
    """Between busy machines no two are alike: each would cost a handshake every ten seconds, for each neighbour."""
    path = known()
    waits: list[float] = []
    now = 0.0
    for index in range(6):
        path.answered(1e-3 * 10 ** (index + 1), 1e-5, now)
        began = now
        while next_job({"a": path}, "a", now, may_burst=False) is None:
            now += 1.0
        waits.append(now - began)
    assert waits[0] == DOUBT_SECONDS
    assert waits == sorted(waits)
    assert waits[-1] == ROUND_TRIPS_SECONDS


def test_a_dead_path_is_tried_again_but_not_at_once():
    path = known()
    path.failed(10.0)
    assert next_job({"a": path}, "a", 11.0, may_burst=True) is None  # it answered before: one failure is nothing yet
    path.failed(12.0)
    assert next_job({"a": path}, None, 12.0 + LOST_SECONDS - 1, may_burst=True) is None
    assert next_job({"a": path}, None, 12.0 + LOST_SECONDS, may_burst=True) == Job("a", "round trips")


def test_candidates_are_near_ipv4_hosts_and_the_connected_one():
    own = ["192.168.1.5:4001", "10.0.0.1:4001"]
    addresses = ["172.16.0.9:4001", "[fe80::1]:4001", "192.168.1.7:4001", "127.0.0.1:4001", "10.0.0.2:4001"]
    hosts = candidate_hosts(addresses, "10.0.0.2", own)
    assert hosts == ["10.0.0.2", "192.168.1.7", "172.16.0.9"]
    assert candidate_hosts((), None, own) == []
    assert candidate_hosts(["127.0.0.1:1"], None, ["127.0.0.1:2"]) == ["127.0.0.1"]


@given(st.lists(st.text(max_size=30), max_size=40), st.one_of(st.none(), st.just("10.1.1.1")))
def test_whatever_a_card_says_there_are_few_candidates(addresses, connected):
    hosts = candidate_hosts(addresses, connected, ["10.1.1.2:1"])
    assert len(hosts) <= MAX_PATHS
    assert len(set(hosts)) == len(hosts)
    assert all(":" not in host for host in hosts)


# --- budget -------------------------------------------------------------------------------------

probes = st.lists(st.tuples(st.floats(0, 2000), st.integers(0, 400), st.floats(0, 1)), min_size=1, max_size=60)


@given(st.integers(0, 1000), probes)
def test_no_hour_sees_more_than_was_allowed(limit, wanted):
    budget = ProbeBudget(limit)
    now, spent = 0.0, []
    for pause, want, share in wanted:
        now += pause
        granted = budget.reserve(want, now)
        assert 0 <= granted <= want
        used = int(granted * share)
        budget.settle(granted, used, now)
        spent.append((now, used))
        assert sum(used for at, used in spent if at > now - WINDOW_SECONDS) <= limit
        assert budget.spent(now) == sum(used for at, used in spent if at > now - WINDOW_SECONDS)


def test_what_is_set_aside_is_set_aside():
    budget = ProbeBudget(100)
    assert budget.reserve(80, 0.0) == 80
    assert budget.reserve(80, 0.0) == 20
    budget.settle(80, 10, 1.0)
    assert budget.available(1.0) == 70


# --- arrivals, and what a planner makes of a link --------------------------------------------------


def rate_of(arrival: Arrival) -> float:
    return arrival.half_bytes / arrival.half_seconds


reads = st.lists(st.tuples(st.integers(1, 16384), st.floats(1e-6, 1e-2)), min_size=1, max_size=2000)


@given(reads)
def test_the_second_half_is_about_half(pieces):
    arrivals = Arrivals(0.0)
    now = 1.0
    for count, pause in pieces:
        now += pause
        arrivals.came(count, now)
    arrival = arrivals.end()
    total = sum(count for count, _ in pieces)
    assert arrival.total_bytes == total
    assert 0 <= arrival.half_bytes <= total / 2
    assert 0 <= arrival.half_seconds <= arrival.whole_seconds * (1 + 1e-9)


def test_a_token_buckets_savings_do_not_count():
    arrivals = Arrivals(0.0)
    now = 1.0
    for index in range(64):
        now += 1e-6 if index < 16 else 0.016  # 256 KiB at once, then 1 MiB/s
        arrivals.came(16 * 1024, now)
    assert 0.95e6 < rate_of(arrivals.end()) < 1.1e6


def test_a_reader_that_was_held_up_in_the_middle_is_not_believed_more_than_twice():
    arrivals = Arrivals(0.0)
    now = 1.0
    for index in range(64):
        now += 0.05 if index == 31 else 1e-6 if index > 31 else 0.002
        arrivals.came(16 * 1024, now)
    whole = 64 * 16 * 1024 / (now - 1.0)
    assert rate_of(arrivals.end()) < 2.5 * whole


def test_a_reader_that_came_late_says_nothing():
    arrivals = Arrivals(0.0)
    for index in range(64):
        arrivals.came(16 * 1024, 10e-6 * (index + 1))
    assert not arrivals.end().tells(256 * 1024)
    arrivals.ready(1.0)
    for index in range(64):
        arrivals.came(16 * 1024, 1.01 + 10e-6 * index)
    assert arrivals.end().tells(256 * 1024)


@given(st.floats(1e-6, 1), st.floats(1e3, 1e10), st.floats(0, 1e-3))
def test_a_planner_gets_back_the_round_trip_that_was_measured(one_way, rate, software):
    rtt = 2 * (one_way + software) + CHANNEL_PROBE_BYTES / rate
    empty = off_the_wire(rtt, rate)
    link = Link("a", "b", 1.0, bandwidth_bytes_per_second=rate, channel_rtt_seconds=empty, message_seconds=software)
    assert link.speed is not None
    assert abs(link.speed.latency_seconds - one_way) <= 1e-9 + 1e-6 * rtt
    assert Link("a", "b", 1.0).speed is None
