"""The services of this room, wired together in the only order there is."""

from __future__ import annotations

from typing import NamedTuple

import trio

from meshinfer.base.ids import InstanceId
from meshinfer.serving.elected_planner import ElectedPlanner
from meshinfer.serving.origin_links import OriginLinks
from meshinfer.serving.placing import Placer
from meshinfer.serving.ports import Ports
from meshinfer.serving.seat_service import SeatService
from meshinfer.serving.sessions import DRAIN_SECONDS, Sessions
from meshinfer.serving.view import Instance


class Serving(NamedTuple):
    """Seats of this node, placing, and the requests that enter here."""

    ports: Ports
    seats: SeatService
    planner: ElectedPlanner
    placer: Placer
    links: OriginLinks
    sessions: Sessions

    @classmethod
    def of(cls, ports: Ports) -> Serving:
        seats = SeatService(ports)
        planner = ElectedPlanner(ports, seats)
        placer = Placer(ports, planner)
        links = OriginLinks(ports, seats.runners.channels)
        return cls(ports, seats, planner, placer, links, Sessions(ports, placer, links))

    async def leave(self, reason: str) -> None:
        """Take nothing new, give its seats to others, let answers end, free the rest.

        These are the answers of this node's own clients, and others' that go through seats which nobody could take.
        """
        self.ports.drain()
        kept: set[InstanceId] = set()

        async def hand_over(instance: Instance) -> None:
            if not await self.placer.hand_over(instance):
                kept.add(instance.instance_id)

        try:
            async with trio.open_nursery() as handing_over:
                for instance in self.ports.instances():
                    if self.ports.node_id in instance.placement.node_ids and instance.state != "broken":
                        handing_over.start_soon(hand_over, instance)
            async with trio.open_nursery() as draining:  # both at once, to be done within the agent's 45 s
                draining.start_soon(self.seats.drain, kept, DRAIN_SECONDS)
                draining.start_soon(self.sessions.drain)
        finally:
            await self.seats.release_all(reason)

    async def run(self) -> None:
        """Run all of them until cancelled; runners are gone when this returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.seats.run, name="seats")
            nursery.start_soon(self.placer.run, name="repairs")
            nursery.start_soon(self.links.run, name="origin links")
            nursery.start_soon(self.sessions.run, name="sessions")
