"""When a spare runner is started: never in the way of the seat that took the last one."""

from typing import cast

import trio
from trio.testing import MockClock

from meshinfer.serving.runners import Runner
from meshinfer.serving.spares import LOOK_SECONDS, REFILL_SECONDS, Spares


class Idle:
    """A runner that does nothing."""

    is_alive = True

    async def stop(self) -> None:
        self.is_alive = False


async def test_the_next_one_is_started_some_time_after_the_last_was_taken(autojump_clock: MockClock) -> None:
    started: list[float] = []

    async def start() -> Runner:
        started.append(trio.current_time())
        return cast(Runner, Idle())

    spares = Spares(start, may_start=lambda: True, may_keep=lambda: True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(spares.run)
        await trio.sleep(3 * LOOK_SECONDS)
        assert len(started) == 1
        await spares.take()
        taken = trio.current_time()
        await trio.sleep(REFILL_SECONDS + 2 * LOOK_SECONDS)
        assert len(started) == 2
        assert taken + REFILL_SECONDS <= started[1]
        nursery.cancel_scope.cancel()
