"""The services of this room, wired together in the only order there is."""

from __future__ import annotations

from typing import NamedTuple

import trio

from meshinfer.serving.elected_planner import ElectedPlanner
from meshinfer.serving.origin_links import OriginLinks
from meshinfer.serving.placing import Placer
from meshinfer.serving.ports import Ports
from meshinfer.serving.seat_service import SeatService
from meshinfer.serving.sessions import Sessions


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
        links = OriginLinks(ports, seats)
        return cls(ports, seats, planner, placer, links, Sessions(ports, placer, links))

    async def leave(self, reason: str) -> None:
        """Take nothing new, give its seats to others, let the requests of this node's own clients end, free the rest."""
        self.ports.drain()
        try:
            async with trio.open_nursery() as handing_over:
                for instance in self.ports.instances():
                    if self.ports.node_id in instance.placement.node_ids and instance.state != "broken":
                        handing_over.start_soon(self.placer.hand_over, instance)
            await self.sessions.drain()
        finally:
            await self.seats.release_all(reason)

    async def run(self) -> None:
        """Run all of them until cancelled; runners are gone when this returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.seats.run, name="seats")
            nursery.start_soon(self.placer.run, name="repairs")
            nursery.start_soon(self.links.run, name="origin links")
            nursery.start_soon(self.sessions.run, name="sessions")
