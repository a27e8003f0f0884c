"""What can be done to the agents of a room, on which machines, and how.

A fault is made with what a person could do (signals, cables, a full disk) or with what happens to processes by itself
(`testing.machine_faults`); nothing in the product knows of it. Which can be made depends on the machines
(`testing.machines`): a partition, for instance, is a cable that is pulled.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product

from meshinfer.testing.agent_room import CONTEXT_TOKENS, MODEL, AgentRoom, RoomError, get
from meshinfer.testing.bad_channels import BadChannels
from meshinfer.testing.bad_lines import BadLines
from meshinfer.testing.cast import Cast
from meshinfer.testing.chaos import BETWEEN, HOUR_SECONDS, Answer, Deed
from meshinfer.testing.fault_proxy import Faults
from meshinfer.testing.machine_faults import hang, kill_for_memory, kills_for_memory_work, refuse_memory, why_not_hang
from meshinfer.testing.machines import CabledMachines, OneMachine, SkewedClocks, SmallDisks
from meshinfer.testing.stream_client import Question, ask

LONG = Question("Say in one word what this is: " + "laptop " * (CONTEXT_TOKENS // 2), 2)
"""Wants memory that a runner has not taken yet."""
LONG_SECONDS = 120.0
"""For that answer, which a repair interrupts."""

_PAIRS: frozenset[Deed] = frozenset(("deafen", "mute", "cut from origin", "split", *BETWEEN))
"""Cuts between pairs of agents; their clients reach all of them."""
_SUFFERED: dict[Deed, Faults] = {
    "delay lines": Faults(delay=0.15, jitter=0.1),
    "throttle lines": Faults(rate=8_000.0),
    "corrupt lines": Faults(corrupt=20_000.0),
    "stall lines": Faults(stall=True),
    "drop lines": Faults(drop=True),
    # A step of three stages and an origin crosses three or four of them.
    "delay channels": Faults(delay=0.15, jitter=0.1),
    # An activation of the small model (2.3 KB) takes a tenth of a second.
    "throttle channels": Faults(rate=25_000.0),
    "corrupt channels": Faults(corrupt=20_000.0),
    "stall channels": Faults(stall=True),
    "drop channels": Faults(drop=True),
}
"""By proxies, until it is over; half-closing and resetting are over at once."""
_BY_PROXIES: frozenset[Deed] = frozenset(
    (*_SUFFERED, "half-close lines", "reset lines", "half-close channels", "reset channels")
)
_ON: dict[type[OneMachine], frozenset[Deed]] = {
    OneMachine: frozenset(("kill", "leave", "stop", "kill runner", "freeze runner", "refuse memory")),
    CabledMachines: frozenset((*_PAIRS, "cut off", "slow down")),
    BadLines: frozenset(deed for deed in _BY_PROXIES if deed.endswith(" lines")),
    BadChannels: frozenset(deed for deed in _BY_PROXIES if deed.endswith(" channels")),
    SmallDisks: frozenset(("fill disk",)),
    SkewedClocks: frozenset(("step clocks",)),
}
"""What can be done there, and on machines that are of that kind too."""


def deeds_on(machines: type[OneMachine]) -> frozenset[Deed]:
    """All that can be done to agents there, by this user on this system."""
    found: set[Deed] = {deed for kind, deeds in _ON.items() if issubclass(machines, kind) for deed in deeds}
    if kills_for_memory_work():
        found.add("starve runner")
    if not why_not_hang():
        found.add("hang runner")
    return frozenset(found)


class AgentFaults:
    """Made in one run."""

    def __init__(self, room: AgentRoom[OneMachine], rng: random.Random) -> None:
        self._room = room
        self._rng = rng
        self._struck: set[int] = set()
        """Runners by pid; their agent may take a moment to miss them."""

    def runners(self, name: str) -> list[int]:
        """Pids of an agent's runners that have seats and were not hit before."""
        runners = get(self._room.agents[name], "/state")["runners"]
        return [runner["pid"] for runner in runners if runner["pid"] not in self._struck]

    def make(self, deed: Deed, name: str, cast: Cast) -> Callable[[], object] | None:
        """Do that to agent `name`; what undoes it, if that can be undone, beside a restart of the room.

        Raises:
            RoomError: it cannot be done.
        """
        room, machines, agent = self._room, self._room.machines, self._room.agents[name]
        match deed, machines:
            case "kill", _:
                room.kill(name)
                return lambda: room.start(name)
            case "leave", _:
                room.leave(name)
            case "stop", _:
                room.stop(name)
                return lambda: room.wake(name)
            case "kill runner" | "freeze runner", _:
                what = signal.SIGKILL if deed == "kill runner" else signal.SIGSTOP
                for pid in self._strike(name):
                    os.kill(pid, what)
            case "hang runner", _:
                hung = ExitStack()
                for pid in self._strike(name):
                    hung.callback(hang(pid))
                return hung.close
            case "starve runner", _:
                for pid in self._strike(name):
                    if not kill_for_memory(pid):
                        raise RoomError(f"the kernel did not kill {pid} of {name}")
            case "refuse memory", _:
                for pid in self._strike(name):
                    refuse_memory(pid)
                ask(agent.url, LONG.body(MODEL), Answer("greedy", "", LONG_SECONDS, 0.0))
            case "cut off", CabledMachines():
                machines.pull(name)
                return lambda: machines.plug(name)
            case _, CabledMachines() if deed in _PAIRS:
                pairs = self._pairs(deed, name, cast)
                machines.cut(*pairs)
                return lambda: machines.mend(*pairs)
            case "slow down", CabledMachines():
                machines.slow_down(name)
                return lambda: machines.speed_up(name)
            case "fill disk", SmallDisks():
                machines.fill(name)
                return lambda: machines.empty(name)
            case "step clocks", SkewedClocks():
                machines.set_wall_clock(name, self._rng.choice((HOUR_SECONDS, -HOUR_SECONDS)))
                return lambda: machines.set_wall_clock(name, 0.0)
            case "half-close lines" | "half-close channels", BadLines() | BadChannels():
                machines.lines.half_close(name)
            case "reset lines" | "reset channels", BadLines() | BadChannels():
                machines.lines.reset(name)
            case _, BadLines() | BadChannels() if faults := _SUFFERED.get(deed):
                lines = machines.lines
                lines.suffer(name, faults)
                return lambda: lines.suffer(name, Faults())
            case _:
                raise RoomError(f"{deed} cannot be done to {type(machines).__name__}")
        return None

    def _strike(self, name: str) -> list[int]:
        """The runners that are to be hit. Raises RoomError if there are none."""
        pids = self.runners(name)
        if not pids:
            raise RoomError(f"{name} has no runner")
        self._struck.update(pids)
        return pids

    def _pairs(self, deed: Deed, name: str, cast: Cast) -> list[tuple[str, str]]:
        """(who sends, to whom nothing of it comes)."""
        live = self._room.live()
        others = [other for other in live if other != name]
        match deed:
            case "deafen":
                return [(other, name) for other in others]
            case "mute":
                return [(name, other) for other in others]
            case "cut from origin":
                assert cast.origin is not None
                origin = self._room.name_of(cast.origin)
                return [(name, origin), (origin, name)]
            case "cut from next" | "mute to next" | "deafen to next":
                following = self._room.name_of(cast.after(live[name].node_id))
                ways = {"mute to next": [(name, following)], "deafen to next": [(following, name)]}
                return ways.get(deed, [(name, following), (following, name)])
            case _:
                apart = self._rng.sample(others, len(others) + 1 - cast.scenario.stages)
                here = [name, *(other for other in others if other not in apart)]
                return [*product(here, apart), *product(apart, here)]
