"""What a planner asks of seats, wherever they are: all of a placement at once, its own node's without the network.

What came of it is a value; no seat's answer, and no silence, is an error here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from meshinfer.base.errors import DeadlineExceeded, MeshinferError, PeerLost
from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.planning.plan import Plan
from meshinfer.serving.ports import Ports
from meshinfer.serving.seat_service import SeatService
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import (
    COMMIT,
    LEASE,
    Deletion,
    Done,
    Lease,
    LeaseAnswer,
    Placed,
    SeatRef,
)

A = TypeVar("A", LeaseAnswer, Done)

log = logging.getLogger(__name__)

SILENCE = (PeerLost, DeadlineExceeded)
"""Errors of a call that mean: nobody there."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of asking every seat of a candidate."""

    why: str
    """It failed; empty: it did not."""
    epoch: int
    """Under which it was asked last, or a newer one that a seat has seen."""
    unheard: frozenset[NodeId] = frozenset()
    """Who did not answer."""
    is_committed: bool = False
    """Its seats were told to load: what they take the place of is gone, whatever the view says."""
    deletion: Deletion | None = None
    """What a seat's node says of the instance: all that began so early is void."""


class SeatCalls:
    """From this node to any seat's."""

    def __init__(self, ports: Ports, seats: SeatService) -> None:
        self._ports = ports
        self._seats = seats

    async def lease_all(
        self, instance_id: InstanceId, epoch: int, candidate: Plan, begun_epoch: int, seats: Sequence[int] = ()
    ) -> tuple[int, Tried]:
        """(newest epoch that a seat has seen or 0, what came of it). All seats, or these."""
        unheard: set[NodeId] = set()
        answers: dict[int, LeaseAnswer] = {}
        placement = candidate.placement

        async def lease(index: int) -> None:
            need_bytes = candidate.memory[index].need_bytes
            ask = Lease(instance_id, epoch, placement, index, need_bytes, begun_epoch)
            try:
                answers[index] = await self._call_seat(placement.seats[index].node_id, LEASE, ask, LeaseAnswer)
            except MeshinferError as error:
                answers[index] = LeaseAnswer(granted=False, why=str(error)[:2048])
                if isinstance(error, SILENCE):
                    unheard.add(placement.seats[index].node_id)

        async with trio.open_nursery() as nursery:
            for index in seats or range(len(placement.seats)):
                nursery.start_soon(lease, index)
        refused = [(index, answer) for index, answer in sorted(answers.items()) if not answer.granted]
        why = "; ".join(
            f"seat {index} on {self._ports.called(placement.seats[index].node_id)}: {a.why}" for index, a in refused
        )
        newest = max((answer.newest_epoch for answer in answers.values()), default=0)
        deleted = [answer.newest_epoch for _, answer in refused if answer.is_deleted]
        deletion = Deletion(instance_id, max(deleted)) if deleted else None
        return newest, Tried(why, epoch, frozenset(unheard), deletion=deletion)

    async def commit_all(self, placed: Placed, nodes: Collection[NodeId] = ()) -> Tried:
        """On all its nodes, or these."""
        ref = SeatRef(placed.instance_id, placed.epoch, placed.placement.placement_id)
        _, failures = await self.tell_all(nodes or placed.placement.node_ids, COMMIT, ref)
        unheard = frozenset(node for node, error in failures.items() if isinstance(error, SILENCE))
        why = "; ".join(f"{self._ports.called(node)}: {error}" for node, error in failures.items())
        return Tried(why, placed.epoch, unheard, is_committed=True)

    async def tell_all(
        self, nodes: Iterable[NodeId], method: str, message: SeatRef | Deletion
    ) -> tuple[dict[NodeId, int], dict[NodeId, MeshinferError]]:
        """Bytes freed by each that has done it, and why the others have not; all at once."""
        freed: dict[NodeId, int] = {}
        failures: dict[NodeId, MeshinferError] = {}

        async def tell(node: NodeId) -> None:
            try:
                freed[node] = (await self._call_seat(node, method, message, Done)).freed_bytes
            except MeshinferError as error:
                log.info("%s did not %s %s: %s", self._ports.called(node), method, message.instance_id, error)
                failures[node] = error

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(tell, node)
        return freed, dict(sorted(failures.items()))

    async def _call_seat(self, node: NodeId, method: str, message: Lease | SeatRef | Deletion, answer: type[A]) -> A:
        """One call to a seat's node; this node's own seats without the network."""
        if node == self._ports.node_id:
            local: object
            if isinstance(message, Lease):
                local = await self._seats.lease(message, node)
            elif isinstance(message, Deletion):
                local = await self._seats.delete(message)
            elif method == COMMIT:
                local = await self._seats.commit(message)
            else:
                local = await self._seats.release(message)
            assert isinstance(local, answer)
            return local
        timeout = self._ports.settings.call_timeout_seconds
        return decode(answer, await self._ports.call(node, method, encode(message), timeout))
