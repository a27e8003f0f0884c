"""One seat that this node holds: what was promised for it, what its runner has said of it, and what follows from that.

The ledger (`serving.seats`) owns it and alone changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.serving.runner_watch import LOADING_SHARE, RunnerWatch
from meshinfer.topology.card import SeatReport, SeatState
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import ChannelRole


@dataclass(frozen=True, slots=True)
class SeatKey:
    """Names one seat of one epoch of one instance on this node."""

    instance_id: InstanceId
    epoch: int
    seat_index: int

    def __str__(self) -> str:
        return f"{self.seat_index} of instance {self.instance_id} epoch {self.epoch}"


@dataclass(slots=True)
class HeldSeat:
    """Mutable; owned by the ledger."""

    key: SeatKey
    placement: Placement
    begun_epoch: int
    """The first that its placing tried."""
    promised_bytes: int
    """0 once it is cut or failed, and while it outlives its instance."""
    state: SeatState
    lapses_at: float
    """leased: when the promise ends. Loaded ahead: when nobody will come for it. cut: when the layers are given up. failed: when the seat is forgotten."""
    last_progress_at: float
    progress: float = 0.0
    done_bytes: int = 0
    """Fetched, then loaded: what must grow for the seat to be alive while it loads."""
    resident_bytes: int = 0
    sessions: int = 0
    step_seconds: float = 0.0
    planner: NodeId | None = None
    """Who places it, until every seat of it is committed; None as well: nobody whose death would be known here."""
    error: str = ""
    error_code: str = ""
    warm_bytes: int = 0
    """cut, or outlives: what its runner still holds, or is about to, until somebody needs it."""
    outlives: bool = False
    """ready: another placement of its instance has won, and it goes on with the sessions that it has."""
    others_load: bool = False
    """Some seat beside it is not loaded yet."""
    alone_since: float | None = None
    """Since when a seat beside it has been missing from the view; None while all are there."""
    linked: bool = False
    listens: bool = False
    """Its runner is there, and loads."""
    loaded: bool = False
    watch: RunnerWatch = field(default_factory=RunnerWatch)
    """Of its runner."""

    @property
    def runs(self) -> bool:
        """It has a runner."""
        return self.state in {"loading", "linking", "ready", "cut"}

    @property
    def makes_progress(self) -> bool:
        """It does, or there is something wrong with it. One that is loaded waits for all others, whose own clocks run."""
        loads = self.runs and not self.loaded
        return loads or (self.state == "linking" and not self.others_load)

    @property
    def is_warm(self) -> bool:
        """Its layers are in memory."""
        return self.loaded and self.runs

    @property
    def is_loading(self) -> bool:
        """Its process is there, and reads what it was told to."""
        return self.runs and self.listens and not self.loaded

    @property
    def silence_share(self) -> float:
        """Of what a runner may be silent for."""
        return LOADING_SHARE if self.is_loading else 1.0

    def holds_what(self, key: SeatKey, placement: Placement) -> bool:
        """Whether its runner could be that seat without loading anything again."""
        ours, theirs = self.placement.seats[self.key.seat_index], placement.seats[key.seat_index]
        reserved = (self.placement.context_tokens, self.placement.concurrency)
        return (
            (self.is_warm or self.is_loading)
            and self.key.instance_id == key.instance_id
            and self.placement.model_digest == placement.model_digest
            and ours == theirs
            and reserved == (placement.context_tokens, placement.concurrency)
        )

    @property
    def neighbours(self) -> tuple[tuple[ChannelRole, int], ...]:
        """The channels that a step and its answer go through, and the seats at their other ends."""
        own, last = self.key.seat_index, len(self.placement.seats) - 1
        before: tuple[ChannelRole, int] = ("activations", own - 1) if own else ("samples", last)
        return dialled_by(self.placement, own), before

    @property
    def report(self) -> SeatReport:
        """For this node's card."""
        return SeatReport(
            instance_id=self.key.instance_id,
            epoch=self.key.epoch,
            placement_id=self.placement.placement_id,
            seat_index=self.key.seat_index,
            state=self.state,
            # Two digits: a card is re-sent when it changes, so progress moves it at most 100 times.
            progress=round(self.progress, 2),
            promised_bytes=self.promised_bytes,
            resident_bytes=self.resident_bytes,
            sessions=self.sessions,
            step_seconds=round(self.step_seconds, 4),
            error=self.error,
            error_code=self.error_code,
        )


def dialled_by(placement: Placement, seat_index: int) -> tuple[ChannelRole, int]:
    """The channel that this seat opens, and the seat at its other end."""
    return ("activations", seat_index + 1) if seat_index + 1 < len(placement.seats) else ("samples", 0)
