"""Nodes whose clocks are hours apart do to the last byte, and to the last bit of every time, what they do with right clocks.

So nothing that one node says is ever compared with another's clock: what would be, would come an hour early or late.
"""

from __future__ import annotations

import random
import re
import time

import pytest
import trio

from meshinfer.testing.chaos import HOUR_SECONDS, scenarios
from meshinfer.testing.chaos_room import play
from meshinfer.testing.clocks import NodeClocks, later_clock, separate_clocks, shared_time
from meshinfer.testing.network import SimNetwork

SCENARIOS = {scenario.name: scenario for scenario in scenarios()}


def trace(name: str, clocks: dict[str, NodeClocks]) -> list[str]:
    """All that happened in a run: messages, steps, what clients got and when; as it was, whoever came first at one moment."""
    told: list[str] = []
    outcome = play(SCENARIOS[name], 1, clocks, told.append)
    assert outcome.violations == ()
    # A channel's token is secret: real dice make it.
    told = [re.sub(r"gets channel/1 .*", "gets channel/1", line) for line in told]
    return [*sorted(told), *(repr(answer) for answer in outcome.answers), repr(outcome.settled_seconds)]


@pytest.mark.parametrize(
    "name",
    [
        "kill middle, and planner during the repair",
        "stop head for 10 s",
        "split for 10 s",
        "kill and restart middle",
        "freeze runner of last",
    ],
)
def test_a_run_is_the_same_whatever_each_nodes_clocks_show(name: str) -> None:
    odd = HOUR_SECONDS + 0.46875  # no whole number of anything that a node might count in
    apart = {f"node{i}": NodeClocks((i - 2) * odd, (3 - i) * odd) for i in range(6)}
    right = trace(name, {})
    assert len(right) > 500
    assert trace(name, apart) == right


def test_clocks_are_wrong_for_who_wears_them_only() -> None:
    """The check above could not fail if nodes did not read their own clocks, or handlers read their callers'."""
    ahead, behind = NodeClocks(HOUR_SECONDS, 0.0), NodeClocks(-HOUR_SECONDS, 0.0)
    read: dict[str, float] = {}

    async def main() -> None:
        network = SimNetwork(random.Random(1))
        one, other = network.add("one"), network.add("other")

        async def handle(caller: str, payload: bytes) -> bytes:
            del caller
            read["handler"] = trio.current_time() - shared_time()
            return payload

        other.serve("ping/1", handle)
        async with trio.open_nursery() as nursery:
            with behind.worn():
                await nursery.start(other.run)
            with ahead.worn():
                await nursery.start(one.run)
                await one.dial(other.addresses()[0], None, 1.0)
                await one.call(other.node_id, "ping/1", b"", 1.0)
                read["caller"] = trio.current_time() - shared_time()
                until, wall = trio.current_time() + 2.0, time.time()
                await trio.sleep_until(until)
                read["late"] = trio.current_time() - until
                ahead.wall_ahead_seconds += HOUR_SECONDS
                read["stepped"] = time.time() - wall
            read["nobody"] = trio.current_time() - shared_time()
            nursery.cancel_scope.cancel()

    with separate_clocks():
        trio.run(main, clock=later_clock())
    assert read.pop("stepped") == pytest.approx(HOUR_SECONDS + 2.0)
    assert read == {"handler": -HOUR_SECONDS, "caller": HOUR_SECONDS, "late": 0.0, "nobody": 0.0}
