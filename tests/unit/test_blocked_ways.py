"""Ways on which a dial was unanswered: for how long they are held to be blocked."""

from __future__ import annotations

from meshinfer.base.ids import NodeId
from meshinfer.serving.blocked_ways import FIRST_SECONDS, MAX_WAYS, MOST_SECONDS, REMEMBERED_SECONDS, BlockedWays

A = NodeId("a")


def test_a_way_is_blocked_for_a_while_and_longer_each_time_that_it_is_tried_in_vain() -> None:
    ways = BlockedWays()
    now, spans = 100.0, list[float]()
    for _ in range(8):
        ways.unanswered(A, now)
        ways.unanswered(A, now + 0.1)  # two dials of one attempt
        begun = now
        while A in ways.blocked(now):
            now += 1.0
        spans.append(now - begun)
    assert spans[:3] == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    assert spans[-1] == MOST_SECONDS
    ways.unanswered(A, now + REMEMBERED_SECONDS)
    assert not ways.blocked(now + REMEMBERED_SECONDS + FIRST_SECONDS), "that was long ago"


def test_a_channel_that_opens_is_a_way() -> None:
    ways = BlockedWays()
    ways.unanswered(A, 1.0)
    ways.opened(A)
    ways.opened(NodeId("never heard of"))
    assert not ways.blocked(1.0)
    ways.unanswered(A, 2.0)
    assert not ways.blocked(2.0 + FIRST_SECONDS), "it begins anew"


def test_no_more_are_kept_than_a_card_has_room_for() -> None:
    ways = BlockedWays()
    for index in range(2 * MAX_WAYS):
        ways.unanswered(NodeId(f"n{index}"), index / 100)
    assert ways.blocked(1.0) == {f"n{index}" for index in range(MAX_WAYS, 2 * MAX_WAYS)}
