"""What one end knows of an edge: which path counts, what the other end's word changes, and when there is news of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshinfer.base.ids import NodeId
from meshinfer.mesh.edge import Edge, Ends
from meshinfer.mesh.link_estimate import DEGRADED_AFTER_SECONDS
from meshinfer.topology.link import CHANNEL_PROBE_BYTES, Link
from meshinfer.wire.messages import LinkReport

WIFI, CABLE = "10.9.0.2", "10.8.0.2"
BOTH = Ends((f"{WIFI}:7000", f"{CABLE}:7000"), None, ("10.9.0.1:7000", "10.8.0.1:7000"))
MIB_A_SECOND = 2.0**20


def measured(edge: Edge, host: str, rtt_seconds: float, rate: float = 0.0, now: float = 0.0) -> None:
    edge.paths[host].answered(rtt_seconds, 1e-5, now)
    if rate:
        edge.paths[host].carried(rate, rate, now)


def between_both() -> Edge:
    edge = Edge(0.0)
    edge.lies_between(BOTH)
    return edge


def test_what_is_known_of_a_path_stays_while_its_address_does():
    edge = between_both()
    measured(edge, WIFI, 2e-3)
    assert edge.choose()
    edge.lies_between(replace(BOTH, addresses=(f"{WIFI}:7000",)))
    assert list(edge.paths) == [WIFI]
    assert edge.current.rtt.value == 2e-3
    edge.lies_between(replace(BOTH, addresses=(f"{CABLE}:7000",)))
    assert edge.host is None
    assert edge.current.rtt.value == 0


def test_the_better_path_is_taken_and_told_as_another_one_once():
    edge = between_both()
    measured(edge, WIFI, 2e-3, 5e6)
    assert edge.choose()
    measured(edge, CABLE, 1e-4, 1e8)
    assert edge.choose()
    assert edge.host == CABLE
    assert not edge.choose()


def test_the_other_ends_word_counts_until_this_end_has_found_a_way():
    edge = between_both()
    edge.decided(WIFI, LinkReport(5e6, 2e-3, 1e-5), 0.0)
    assert edge.host == WIFI
    assert edge.current.bandwidth_out.value == 5e6
    measured(edge, CABLE, 1e-4, 1e8)
    edge.choose()
    assert edge.host == CABLE
    assert edge.current.bandwidth_out.value == 1e8


def test_another_path_that_the_other_end_decides_on_begins_anew():
    edge = Edge(0.0)
    edge.decided(WIFI, LinkReport(5e6, 2e-3, 1e-5), 0.0)
    edge.decided(WIFI, LinkReport(0.0, 2e-3, 1e-5), 1.0)  # round trips only: they say nothing of bandwidth
    assert edge.current.bandwidth_out.value == 5e6
    assert edge.current.bulk_at == 0.0
    edge.decided(None, LinkReport(0.0, 1e-4, 1e-5), 2.0)
    assert edge.host is None
    assert edge.current.bandwidth_out.value == 0
    assert edge.current.rtt.value == 1e-4


def test_news_are_what_was_not_known_and_figures_that_moved_by_more_than_a_fifth():
    edge = Edge(0.0)
    assert edge.follow(0.0) == "none"
    told = edge.told
    told.answered(1e-3, 1e-5, 0.0)
    assert edge.follow(0.0) == "first"
    told.answered(1.1e-3, 1e-5, 1.0)
    assert edge.follow(1.0) == "none"
    assert edge.said.rtt_seconds == 1e-3
    for now in range(2, 6):
        told.answered(1.3e-3, 1e-5, now)
    assert edge.follow(6.0) == "drift"
    told.carried(1e8, 0.0, 7.0)
    assert edge.follow(7.0) == "first"


def test_an_edge_that_stays_much_worse_is_announced_as_degraded_until_its_path_is_another():
    edge = between_both()
    measured(edge, WIFI, 1e-3, 1e8)
    edge.choose()
    edge.follow(0.0)
    for _ in range(2):
        measured(edge, WIFI, 1e-3, 1e7)  # two that agree with each other are the truth
    assert edge.follow(1.0) == "drift"
    assert not edge.said.degraded
    assert edge.follow(1.0 + DEGRADED_AFTER_SECONDS) == "first"
    assert edge.said.degraded
    measured(edge, CABLE, 1e-4, 1e8)
    edge.choose()
    edge.follow(2.0 + DEGRADED_AFTER_SECONDS)
    assert not edge.said.degraded


def test_a_link_is_announced_with_the_round_trip_less_the_frames_own_time():
    edge = between_both()
    measured(edge, WIFI, 10e-3, MIB_A_SECOND)
    edge.choose()
    edge.follow(0.0)
    link = edge.complete(Link(NodeId("a"), NodeId("b"), 5e-3))
    assert link.rtt_seconds == 5e-3
    assert link.bandwidth_bytes_per_second == MIB_A_SECOND
    assert link.channel_rtt_seconds == pytest.approx(10e-3 - CHANNEL_PROBE_BYTES / MIB_A_SECOND)
    assert link.message_seconds == 1e-5
    assert not link.degraded
