"""Dials whom this node wants to be connected to, and tells who could not be reached."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import trio
from trio import TaskStatus

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import NodeId
from meshinfer.mesh.changes import Changes, Watch
from meshinfer.mesh.dial_plan import Dial, DialPlan
from meshinfer.mesh.neighbours import Wanted
from meshinfer.transport.base import Transport

log = logging.getLogger(__name__)

DIAL_TIMEOUT_SECONDS = 2.0
"""One address. A handshake takes 10 ms on a LAN; an address that leads nowhere answers nothing at all."""
DIALS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class ConnectorStatistics:
    dials: int
    dials_failed: int
    dialling: int


class Connector:
    """The driver of a `DialPlan`."""

    def __init__(
        self,
        transport: Transport,
        plan: DialPlan,
        *,
        wanted: Callable[[], Wanted],
        on_unreachable: Callable[[NodeId], None],
    ) -> None:
        self._transport, self.plan = transport, plan
        self._wanted, self._on_unreachable = wanted, on_unreachable
        self._news = Changes()
        self._nursery: trio.Nursery | None = None
        self._limit = trio.CapacityLimiter(DIALS_AT_ONCE)
        self._dials = self._dials_failed = 0
        self._told: set[str] = set()
        """Addresses that a person gave and that did not answer; told once each."""

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        watch = self._news.watch()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await self._keep_connected(nursery, watch)
            finally:
                self._nursery = None  # it takes no more tasks; a connection lost now is not dialled again

    async def _keep_connected(self, nursery: trio.Nursery, watch: Watch) -> None:
        while True:
            now = trio.current_time()
            wanted, connected = self._wanted(), self._transport.peers()
            for dial in self.plan.due(wanted, connected, now):
                nursery.start_soon(self._dial, dial, name=f"dial {dial.node or dial.addresses[0]}")
            wakeup = self.plan.next_wakeup(wanted, connected, now)
            with trio.move_on_at(wakeup) if wakeup < math.inf else trio.CancelScope():
                await watch.changed()

    def look_again(self) -> None:
        """Something changed that bears on whom to dial."""
        self._news.notify()

    def redial(self, node: NodeId) -> None:
        """A connection to `node` was lost: try all its addresses now, wanted or not."""
        dial = self.plan.redial(node)
        if dial is not None and self._nursery is not None:
            self._nursery.start_soon(self._dial, dial, name=f"redial {node}")

    async def connect(self, node: NodeId) -> None:
        """Try all addresses of `node` now; or wait until whoever does so already has. Each has its deadline."""
        watch = self._news.watch()
        dial = self.plan.redial(node)
        if dial is not None:
            await self._dial(dial)
        while self.plan.is_busy(node):
            await watch.changed()

    def try_once(self, address: str) -> None:
        """See who is there; the transport's events tell."""
        if self._nursery is not None:
            self._nursery.start_soon(self._reach, address, None, name=f"look at {address}")

    def statistics(self) -> ConnectorStatistics:
        return ConnectorStatistics(self._dials, self._dials_failed, self._limit.borrowed_tokens)

    async def _dial(self, dial: Dial) -> None:
        reached = False
        try:
            async with self._limit:
                for address in dial.addresses:
                    # A stranger's connection may have come in meanwhile.
                    reached = dial.node in self._transport.peers() or await self._reach(
                        address, dial.node, named=dial.node is None
                    )
                    if reached:
                        break
        finally:
            self.plan.ended(dial)
            self.look_again()
        if not reached and dial.node is not None:
            self._on_unreachable(dial.node)

    async def _reach(self, address: str, expected: NodeId | None, *, named: bool = False) -> bool:
        """`named`: a person gave this address, and is told if nobody is there."""
        self._dials += 1
        try:
            node = await self._transport.dial(address, expected, DIAL_TIMEOUT_SECONDS)
        except MeshinferError as error:
            self._dials_failed += 1
            if named and address not in self._told:
                self._told.add(address)
                log.warning(
                    "no agent is reached at %s (--peer): %s. Check that address and port are those that `meshinfer up` "
                    "shows there, and that no firewall is between; trying on",
                    address,
                    str(error).rstrip("."),
                )
            log.debug("dialling %s: %s", address, error)
            self.plan.failed(address, trio.current_time())
            return False
        self.plan.worked(address, node)
        return True
