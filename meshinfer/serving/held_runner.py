"""A runner that has been told what to be."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.origins import Origins
from meshinfer.serving.runners import Runner
from meshinfer.topology.placement import Placement
from meshinfer.wire.runner_control import Heartbeat


@dataclass(eq=False, slots=True)
class HeldRunner:
    """A seat's runner. The seat that it is changes with a rebinding; the process stays."""

    key: SeatKey
    placement: Placement
    runner: Runner
    linking: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Of the task that opens the channel which this seat dials."""
    heartbeat: Heartbeat | None = None
    loads: bool = True
    """It has not said yet that its layers are in memory."""
    origins: Origins = field(default_factory=Origins)
    """Who has channels to it."""
