"""What serving needs of the agent around it, so that it knows neither the mesh nor the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from meshinfer.base.ids import ModelId, NodeId
from meshinfer.config import Settings
from meshinfer.serving.acquaintance import Acquaintance
from meshinfer.serving.blocked_ways import BlockedWays
from meshinfer.serving.model_cards import ModelCards
from meshinfer.serving.runners import Runner
from meshinfer.serving.view import Instance, instances
from meshinfer.topology.card import NodeCard, SeatReport
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement
from meshinfer.transport.base import Call, Transport
from meshinfer.wire.messages import ChannelOffer
from meshinfer.wire.records import OriginRecord, RunnerRecord


class Watch(Protocol):
    """Tells of changes, and misses none that come while its owner is busy."""

    async def changed(self) -> None:
        """Returns once something has changed since the last return, or since the watch was made."""
        ...


class OriginChannel(Protocol):
    """An open channel from an origin to one runner (`transport.origin` has the real one)."""

    async def send(self, record: OriginRecord) -> None: ...

    async def receive(self) -> RunnerRecord:
        """The next record. Raises PeerLost when the channel is gone."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Ports:
    """The agent, as serving sees it."""

    settings: Settings
    transport: Transport
    call: Call
    """Of any live node, connected or not."""
    topology: Callable[[], Topology]
    """The live members now, this node among them."""
    doubtful: Callable[[], frozenset[NodeId]]
    """Members that do not answer right now: still members, but nothing new is placed on them if it can be helped."""
    out_of_reach: Callable[[], frozenset[NodeId]]
    """Members that others reach and this node does not: a bridge between the two of us is down."""
    is_waking: Callable[[], bool]
    """This node has just come to (its lid was opened) and may not know yet what the others did meanwhile."""
    blame: Callable[[NodeId], None]
    """A channel to it broke or a step on it is overdue: the mesh looks at it at once, instead of when its turn comes."""
    watch: Callable[[], Watch]
    """A watch on the topology, up to date at the call."""
    announce: Callable[[tuple[SeatReport, ...], tuple[Placement, ...], int, tuple[NodeId, ...]], None]
    """Put these seats, their placements, the promised bytes and the blocked ways on this node's card."""
    drain: Callable[[], object]
    """Say on this node's card that it takes nothing new from now on."""
    model_cards: ModelCards
    model_path: Callable[[ModelId, Callable[[int, int], None]], Awaitable[Path]]
    """Where the model's files lie, sizes checked; fetched from a peer first if they are not here, which calls
    back with (bytes done, bytes in all). Raises UnknownModel, CorruptModel, PeerLost, NoRoom (disk)."""
    start_runner: Callable[[], Awaitable[Runner]]
    """A fresh runner process (or a fake one, in simulations)."""
    open_channel: Callable[[ChannelOffer], Awaitable[OriginChannel]]
    """This node, as an origin, dials the channel that a runner offers. Raises PeerLost."""
    origin_certificate_der: bytes
    """What this node shows when it dials runners as an origin."""
    best_host: Callable[[NodeId], str | None] | None = None
    """Where runners should dial that node's, as both ends have agreed; None: at the connection's address."""
    want_links: Callable[[Iterable[tuple[NodeId, NodeId]]], None] | None = None
    """Candidates go over these pairs: those that only coordinates tell of are measured soon."""
    frame_arrived: Callable[[NodeId, int, float], None] | None = None
    """A runner here received so many bytes of a large frame from that node's in that many seconds."""

    acquaintance: Acquaintance = field(default_factory=Acquaintance)
    blocked_ways: BlockedWays = field(default_factory=BlockedWays)

    def blocked_ends(self, placement: Placement) -> frozenset[NodeId]:
        """The nodes of its first and last seat, if channels do not get there from here. The way to those between is others'."""
        return self.blocked_ways.blocked(trio.current_time()) & {placement.node_ids[0], placement.node_ids[-1]}

    def channel_host(self, peer: NodeId) -> str | None:
        """An address of `peer` that is known to work, the best one; None if there is none."""
        return self.best_host(peer) if self.best_host else self.transport.peer_host(peer)

    @property
    def node_id(self) -> NodeId:
        return self.transport.node_id

    def called(self, node: NodeId) -> str:
        """See `Topology.called`."""
        return self.topology().called(node)

    def own_card(self) -> NodeCard:
        return self.topology().by_id[self.node_id]

    @property
    def is_draining(self) -> bool:
        """This node is about to leave and takes nothing new. Its card says so, to itself as to all others."""
        return self.own_card().draining

    def staying(self) -> frozenset[NodeId]:
        """Live members that do not drain: those who plan."""
        return frozenset(card.node_id for card in self.topology().nodes if not card.takes_nothing)

    def instances(self) -> tuple[Instance, ...]:
        topology = self.topology()
        return instances(topology, self.acquaintance.strangers(topology, trio.current_time()))

    def instances_of(self, model_id: ModelId) -> list[Instance]:
        return [instance for instance in self.instances() if instance.placement.model_id == model_id]

    def is_usable(self, instance: Instance, avoid: Iterable[NodeId] = ()) -> bool:
        """Not broken, and no node of it is to be avoided or silent: what waits on a silent node is better repaired."""
        return instance.state != "broken" and self.is_reached(instance.placement, avoid)

    def is_reached(self, placement: Placement, avoid: Iterable[NodeId] = ()) -> bool:
        """No node of it is silent, or to be avoided."""
        return self.doubtful().union(avoid).isdisjoint(placement.node_ids)
