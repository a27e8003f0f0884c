"""Loops of one node wake up together, those of two nodes do not keep step."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from meshinfer.base.beats import begin_beats, next_beat, sleep_to_beat


async def test_loops_of_one_node_share_their_moments(autojump_clock: trio.testing.MockClock) -> None:
    woke: dict[tuple[str, float], list[float]] = {}

    async def look(node: str, seconds: float) -> None:
        times = woke[node, seconds] = []
        while True:
            await sleep_to_beat(seconds)
            times.append(trio.current_time())

    async def run(node: str) -> None:
        begin_beats()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look, node, 0.25)
            await trio.sleep(0.6)  # whenever a loop begins
            nursery.start_soon(look, node, 1.0)

    await trio.sleep(0.1)
    with trio.move_on_after(10):
        async with trio.open_nursery() as nodes:
            nodes.start_soon(run, "one")
            await trio.sleep(0.07)
            nodes.start_soon(run, "other")
    for node in ("one", "other"):
        assert len(woke[node, 0.25]) >= 39
        assert len(woke[node, 1.0]) >= 9
        assert set(woke[node, 1.0]) < set(woke[node, 0.25])
    assert set(woke["one", 0.25]).isdisjoint(woke["other", 0.25])


async def test_on_a_beat_the_next_one_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    await trio.sleep(0.1)  # from which multiples of a quarter are rounded
    begin_beats()
    began = trio.current_time()
    for beat in range(1, 50):
        await sleep_to_beat(0.25)
        assert trio.current_time() == pytest.approx(began + beat * 0.25)
    assert next_beat(2.0) == pytest.approx(began + 14.0)
