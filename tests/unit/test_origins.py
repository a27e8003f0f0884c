"""Of origins that have vanished the runner is told: once, after some seconds, and of nobody else."""

from __future__ import annotations

from meshinfer.base.ids import NodeId
from meshinfer.serving.origins import GONE_SECONDS, Origins

HERE, AWAY = NodeId("here"), NodeId("away")
BOTH = {HERE, AWAY}


def two() -> Origins:
    origins = Origins()
    origins.came(HERE, b"here", 0.0)
    origins.came(AWAY, b"away", 0.0)
    return origins


def test_who_stays_away_is_told_of_once():
    origins = two()
    assert origins.vanished(BOTH, 10.0) == []
    assert origins.vanished({HERE}, 9.99 + GONE_SECONDS) == []
    assert origins.vanished({HERE}, 10.0 + GONE_SECONDS) == [b"away"]
    assert origins.vanished({HERE}, 20.0 + GONE_SECONDS) == []


def test_who_is_back_in_time_is_not_told_of():
    origins = two()
    origins.vanished(BOTH, 10.0)
    for now in range(11, 60):
        assert origins.vanished({HERE} if now % int(GONE_SECONDS) else BOTH, float(now)) == []


def test_who_asks_for_a_channel_is_there_whatever_the_view_says():
    origins = two()
    origins.vanished({HERE}, 10.0)
    origins.came(AWAY, b"its next life", 10.0)
    assert origins.vanished({HERE}, 9.0 + GONE_SECONDS) == []
    assert origins.vanished({HERE}, 10.0 + GONE_SECONDS) == [b"its next life"]


def test_a_node_that_slept_itself_finds_nobody_vanished():
    origins = two()
    origins.vanished(BOTH, 10.0)
    assert origins.vanished(BOTH, 3600.0) == []
