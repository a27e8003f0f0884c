"""What an instance is: derived, by the same pure function on every node, from the live cards.

Nobody owns an instance's state. Each node announces its seats; an instance is `ready` exactly when
every seat of its placement is announced ready by a live node with the same epoch. What a dead node
said died with it, so its instances are `broken` everywhere at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.topology.card import SeatReport
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement

AHEAD = 0
"""The epoch of a seat that is loaded ahead of the epoch which will want it, while the present one goes on: warm layers,
and of no instance yet."""
InstanceState = Literal["placing", "loading", "ready", "broken"]
"""placing: some seat is not announced (yet) by its node, which lives or is a stranger. loading: all seats are there, not all ready.
ready: it serves. broken: a seat failed, or its node is gone.

Gossip of one node overtakes another's, so a missing seat of a living node says nothing by itself; holders give the
others' seats a moment to show and then free their own, with which the instance is gone (`seats.SeatLedger`)."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance as this node sees it now."""

    instance_id: InstanceId
    epoch: int
    placement: Placement
    state: InstanceState
    progress: float
    """Share of all its bytes that are loaded, 0 to 1."""
    reports: tuple[SeatReport | None, ...]
    """One per seat of the placement; None where no live node announces it."""
    error: str = ""
    error_code: str = ""
    """See `SeatReport.error_code`."""
    outlived: frozenset[tuple[int, str]] = frozenset()
    """(epoch, placement id) of those that lost to this one, are whole all the same, and have sessions: the other side of
    a partition was served with them."""

    @property
    def missing(self) -> tuple[NodeId, ...]:
        """Nodes whose seat nobody announces."""
        return tuple(
            seat.node_id for seat, report in zip(self.placement.seats, self.reports, strict=True) if report is None
        )

    @property
    def is_half_made(self) -> bool:
        """Some seat is no more than leased: without its planner, this will come to nothing."""
        return any(report is None or report.state == "leased" for report in self.reports)

    def loads_beside(self, seat_index: int) -> bool:
        """Some other seat than that one is there, and its layers are not in memory yet."""
        others = (report for index, report in enumerate(self.reports) if index != seat_index)
        return any(report is not None and report.state in {"leased", "loading"} for report in others)


def instances(topology: Topology, strangers: Collection[NodeId] = ()) -> tuple[Instance, ...]:
    """Every instance that some live node announces a seat of, newest epoch only, sorted by id.

    `strangers` are not alive here, and not lost either: not heard of yet (`acquaintance`).

    Two placements that claim one (instance, epoch), after two planners each saw half the mesh: the
    lower placement id wins on every node, and holders of the other free it when they have brought to its end what they
    have begun.
    """
    placements: dict[tuple[InstanceId, int], dict[str, Placement]] = defaultdict(dict)
    for card in topology.nodes:
        held = {placement.placement_id: placement for placement in card.placements}
        for seat in card.seats:
            placement = held.get(seat.placement_id)
            # A card speaks for its own seats only, of placements that are whole: one node's mistake hides no instance.
            if placement and seat.epoch != AHEAD and _holds(card.node_id, seat, placement):
                placements[(seat.instance_id, seat.epoch)][seat.placement_id] = placement
    claims: dict[InstanceId, list[tuple[int, str]]] = defaultdict(list)
    for (instance_id, epoch), rivals in placements.items():
        claims[instance_id] += [(epoch, placement_id) for placement_id in rivals]
    found: list[Instance] = []
    for instance_id in sorted(claims):
        epoch, placement_id = winner = min(claims[instance_id], key=lambda claim: (-claim[0], claim[1]))
        instance = _derive(topology, instance_id, epoch, placements[instance_id, epoch][placement_id], strangers)
        outlived = frozenset(
            (epoch, placement_id)
            for epoch, placement_id in claims[instance_id]
            if (epoch, placement_id) != winner
            and _serves(topology, instance_id, epoch, placements[instance_id, epoch][placement_id])
        )
        found.append(replace(instance, outlived=outlived) if outlived else instance)
    return tuple(found)


def _holds(node_id: NodeId, report: SeatReport, placement: Placement) -> bool:
    index = report.seat_index
    return index < len(placement.seats) and placement.seats[index].node_id == node_id and placement.is_whole


def _derive(
    topology: Topology, instance_id: InstanceId, epoch: int, placement: Placement, strangers: Collection[NodeId]
) -> Instance:
    reports = tuple(report_of(topology, instance_id, epoch, placement, index) for index in range(len(placement.seats)))
    present = [report for report in reports if report is not None]
    failed = [report for report in present if report.state in {"failed", "cut"}]
    progress = sum(report.progress for report in present) / len(reports)
    state: InstanceState
    if failed or any(node not in topology.by_id and node not in strangers for node in placement.node_ids):
        state = "broken"
    elif len(present) < len(reports):
        state = "placing"
    elif all(report.state == "ready" for report in present):
        state = "ready"
    else:
        state = "loading"
    # What failed says more than what was cut off by it.
    told = min(failed, key=lambda report: (report.state != "failed", not report.error_code), default=None)
    error, code = (told.error, told.error_code) if told else ("", "")
    return Instance(instance_id, epoch, placement, state, progress, reports, error, code)


def _serves(topology: Topology, instance_id: InstanceId, epoch: int, placement: Placement) -> bool:
    """Whether a placement that lost is whole, and somebody's answer is on its way through it."""
    reports = [report_of(topology, instance_id, epoch, placement, index) for index in range(len(placement.seats))]
    is_whole = all(report is not None and report.state == "ready" for report in reports)
    return is_whole and any(report is not None and report.sessions for report in reports)


def report_of(
    topology: Topology, instance_id: InstanceId, epoch: int, placement: Placement, index: int
) -> SeatReport | None:
    """What the seat's node says of it; None where no live node announces it."""
    card = topology.by_id.get(placement.seats[index].node_id)
    if card is None:
        return None
    for seat in card.seats:
        named = (seat.instance_id, seat.epoch, seat.placement_id, seat.seat_index)
        if named == (instance_id, epoch, placement.placement_id, index):
            return seat
    return None
