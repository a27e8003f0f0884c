"""Who plays which part in a run of chaos: the same in the simulation and on real agents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from meshinfer.base.ids import NodeId
from meshinfer.serving.election import elect
from meshinfer.testing.chaos import BETWEEN, OF_RUNNERS, Fault, Part, Scenario, holder_now
from meshinfer.topology.placement import Placement, Seat


@dataclass
class Cast:
    """Of one run."""

    scenario: Scenario
    placement: Placement
    """Before anything happens..."""
    epoch: int
    """...and its epoch."""
    live: Callable[[], Collection[NodeId]]
    """Who runs now, stopped or not."""
    placements: Callable[[], Iterable[tuple[int, Placement]]]
    """What the origin sees now of the instance, with the epoch."""
    runs: Callable[[NodeId], bool]
    """Whether a node has a runner that can be hit."""
    origin: NodeId | None = None
    """Of the first client; None until it is chosen."""
    lost: Seat | None = None
    """The first of its seats that was hit."""

    @property
    def seats(self) -> list[NodeId]:
        return [seat.node_id for seat in self.placement.seats]

    def players(self, part: Part) -> list[NodeId]:
        """Who may play that part now."""
        seats, live = self.seats, self.live()
        match part:
            case "origin":
                return [node for node in live if node == self.origin]
            case "head":
                return seats[:1]
            case "middle":
                return seats[1:-1] or seats[-1:]
            case "last":
                return seats[-1:]
            case "planner":
                return list(elect(self.placement.model_id, live)[:1])
            case "holder":
                return seats
            case "bystander":
                return [node for node in live if node not in seats and node != self.origin]
            case "replacement":
                if self.lost is None or self.origin not in live:
                    return []
                return [holder_now(self.lost, placed) for epoch, placed in self.placements() if epoch > self.epoch]

    def targets(self, fault: Fault) -> list[NodeId]:
        """Whom it can be done to now."""
        players = self.seated(fault.part) if fault.deed in BETWEEN else self.players(fault.part)
        live = self.live()
        return [node for node in players if node in live and (fault.deed not in OF_RUNNERS or self.runs(node))]

    def seated(self, part: Part) -> list[NodeId]:
        """Those who may play that part and have a seat, so that there is one after theirs."""
        return [node for node in self.players(part) if node in self.seats]

    def after(self, node: NodeId) -> NodeId:
        """Who has the seat after that one's; the head after the last."""
        seats = self.seats
        return seats[(seats.index(node) + 1) % len(seats)]

    def hit_by(self, faults: Iterable[Fault]) -> set[NodeId]:
        """Whom they are aimed at, and whom they cut off from those; all who may come to sit in a lost seat, if that is to be hit."""
        hit: set[NodeId] = set()
        for fault in faults:
            hit.update(self.players(fault.part))
            if fault.deed in BETWEEN:
                hit.update(self.after(node) for node in self.seated(fault.part))
            if fault.part == "replacement":
                hit |= set(self.live()).difference(self.seats)
        return hit

    def strike(self, node: NodeId) -> None:
        """It is about to be hit."""
        if self.lost is None:
            self.lost = next((seat for seat in self.placement.seats if seat.node_id == node), None)

    def ends(self, client: str) -> str:
        """What a client must see. The first is the one that the scenario speaks of; where its answer may fail or
        must, another's may too, if it comes late.
        """
        return "either" if client != "first" and self.scenario.ends == "error" else self.scenario.ends
