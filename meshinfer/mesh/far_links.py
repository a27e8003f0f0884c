"""Links that a planner counts on and nobody measures: the two nodes are connected, which makes neighbours of them.

Beyond a full mesh nobody measures every pair. Each node works out its coordinate (`mesh.coordinates`), any pair can be
estimated from two cards (`Topology.link_or_estimate`), and a planner asks for those that its candidates really need. So
the cost per node does not grow with the mesh.

Only a node itself can connect itself: of links between two others the source is asked. Whom this node was asked for is
remembered, the last ones, since of more links than an announcement has room for those are told first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

import trio

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import NodeId
from meshinfer.mesh.neighbours import FULL_MESH_NODES
from meshinfer.topology.graph import Topology
from meshinfer.transport.base import Transport
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import LINKS_WANTED, Done, LinksWanted

log = logging.getLogger(__name__)

CALL_SECONDS = 3.0
MAX_WANTED = 16
"""Far nodes that are connected to because a planner asked. They add to a large mesh's dozen of connections."""
WANTED_APART_SECONDS = 30.0
CONNECT_SECONDS = 1.0
"""What a source that could not be asked is given to become a neighbour, before it is asked again."""


class FarLinks:
    """Has them measured, here and elsewhere."""

    def __init__(
        self,
        transport: Transport,
        *,
        topology: Callable[[], Topology],
        dial: Callable[[NodeId], None],
        on_more_to_tell: Callable[[], None],
    ) -> None:
        """
        Args:
            transport: for calls between agents.
            topology: everyone alive.
            dial: begins to connect to a node.
            on_more_to_tell: a neighbour is asked for; the link to it is now among those that are told first.
        """
        self._transport, self._topology, self._dial = transport, topology, dial
        self._own = transport.node_id
        self._on_more_to_tell = on_more_to_tell
        self._wanted: OrderedDict[NodeId, None] = OrderedDict()
        """Nodes that were asked for, at most `MAX_WANTED`; asked for longest ago first."""
        self._asked: dict[NodeId, float] = {}
        """Nodes that were asked to measure, and when."""
        self._nursery: trio.Nursery | None = None
        transport.serve(LINKS_WANTED, self._on_wanted)

    async def run(self) -> None:
        """Ask others until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # it takes no more tasks

    def want(self, pairs: Iterable[tuple[NodeId, NodeId]]) -> None:
        """A planner's candidates go over these links: see to it that they are measured soon, here or elsewhere."""
        known, now = self._topology().link_between, trio.current_time()
        by_source: dict[NodeId, set[NodeId]] = {}
        for one, other in pairs:
            for source, target in ((one, other), (other, one)):  # each tells its own direction
                if source != target and (source, target) not in known:
                    by_source.setdefault(source, set()).add(target)
        for source, targets in sorted(by_source.items()):
            if source == self._own:
                self._want_here(targets)
            elif self._nursery is not None and now - self._asked.get(source, float("-inf")) >= WANTED_APART_SECONDS:
                self._asked = {node: at for node, at in self._asked.items() if now - at < WANTED_APART_SECONDS}
                self._asked[source] = now
                self._nursery.start_soon(self._ask_to_measure, source, tuple(sorted(targets)[:MAX_WANTED]))

    def asked_for(self) -> Collection[NodeId]:
        """Whom planners wanted links to, here; the last ones, at most `MAX_WANTED`."""
        return self._wanted.keys()

    def _want_here(self, targets: Iterable[NodeId]) -> None:
        """Connect to them; that makes them neighbours, whoever has the lower id probes, and both tell of it."""
        connected = self._transport.peers()
        for target in sorted(targets):
            is_new = target not in self._wanted
            self._wanted[target] = None
            self._wanted.move_to_end(target)
            has_room = len(connected) < FULL_MESH_NODES + MAX_WANTED
            if is_new and target in connected:
                self._on_more_to_tell()
            elif is_new and has_room and target in self._topology().by_id:
                self._dial(target)
        while len(self._wanted) > MAX_WANTED:
            self._wanted.popitem(last=False)

    async def _ask_to_measure(self, source: NodeId, targets: tuple[NodeId, ...]) -> None:
        for attempt in range(2):
            try:
                await self._transport.call(source, LINKS_WANTED, encode(LinksWanted(targets)), CALL_SECONDS)
            except MeshinferError as error:
                log.debug("%s was not asked to measure: %s", source, error)
                if attempt == 0 and source not in self._transport.peers():
                    self._want_here((source,))
                    await trio.sleep(CONNECT_SECONDS)
            else:
                return

    async def _on_wanted(self, _caller: NodeId, payload: bytes) -> bytes:
        targets = decode(LinksWanted, payload).targets
        self._want_here(target for target in targets if target != self._own)
        return encode(Done())
