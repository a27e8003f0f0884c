"""The mesh as the rest of the agent sees it: who is here now, and how far away.

This is the driver that ties the room together. Facts come in from the transport (connections, gossip),
from the prober (pings) and from discovery (hints). Each goes to the one machine that decides about
it, and what that one says is performed here:

    transport ──► events ──► membership ──► re-dial, links changed
                     └─────► gossip ──► view ──► topology
    prober ───► pings ─────► membership
    discovery ► hints ─────► connector ──► transport.dial

How the topology follows from all that, and when its readers are woken, is `live_topology`; how membership runs on a
clock that may stand still, `membership_driver`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import trio
from trio import TaskStatus

from meshinfer.base.beats import sleep_to_beat
from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.config import PROBE_BYTES_PER_HOUR
from meshinfer.mesh.address_book import AddressBook
from meshinfer.mesh.announcement import Heard, sign
from meshinfer.mesh.changes import Watch
from meshinfer.mesh.connector import Connector, ConnectorStatistics
from meshinfer.mesh.dial_plan import DialPlan
from meshinfer.mesh.discovery import AnotherMesh, Discovery, Hint, Self
from meshinfer.mesh.far_links import FarLinks
from meshinfer.mesh.gossip import Gossip, GossipStatistics
from meshinfer.mesh.indirect import IndirectProbes
from meshinfer.mesh.key_copies import KeyCopies
from meshinfer.mesh.link_probe import LinkProber, LinkProberStatistics
from meshinfer.mesh.live_topology import LiveTopology
from meshinfer.mesh.membership import Membership
from meshinfer.mesh.membership_driver import MembershipDriver
from meshinfer.mesh.membership_events import (
    Accused,
    AskOthers,
    Blamed,
    CardHeard,
    Connected,
    Disconnected,
    Effect,
    LinkDoubted,
    MemberState,
    PingAnswered,
    PingSent,
    Probe,
    Redial,
    RedialFailed,
    StateChanged,
    SuspectedOurselves,
)
from meshinfer.mesh.neighbours import Wanted, wanted
from meshinfer.mesh.own_card import MAX_OUTBIDS, OwnCard
from meshinfer.mesh.probe_channels import ProbeChannels
from meshinfer.mesh.prober import Prober, ProberStatistics
from meshinfer.mesh.view import MergeResult, View, ViewStatistics
from meshinfer.topology.card import NodeCard, SeatState
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.transport.addresses import parse_address
from meshinfer.transport.base import GossipReceived, KeyCopied, PeerConnected, PeerDisconnected, Transport

log = logging.getLogger(__name__)

_DEEDS: Mapping[MemberState, str] = {
    "alive": "is back",
    "suspect": "is suspected",
    "distant": "is reached by others only",
    "dead": "is lost",
    "left": "has left",
}
"""How a person is told of what happened to a node."""

CONNECT_SECONDS = 3.0
"""For the connection that a call needs: one address that leads nowhere, and then the right one."""
HOUSEKEEPING_SECONDS = 1.0
"""How often time alone is looked at: lifetimes of announcements, doubts."""
UPKEEP_SECONDS = 5.0
"""How often own addresses are looked up and the address book is written."""


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """What an agent's settings mean to this room."""

    home: Path
    mesh_id: str
    """Scopes discovery; not secret."""
    seeds: tuple[str, ...] = ()
    """`host:port` that a person gave: dialled until somebody is there."""
    discovery: bool = True
    """Announce and listen by multicast DNS."""
    probe_bytes_per_hour: int = PROBE_BYTES_PER_HOUR
    """See `Settings.probe_bytes_per_hour`."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One other node, for people to see."""

    node_id: NodeId
    name: str
    """As its card says; empty if we hold none."""
    state: MemberState
    cause: str
    """Why it is in this state."""
    since_seconds: float
    """How long it has been; 0 for nodes that are not our neighbours."""
    is_neighbour: bool
    """We are, or lately were, connected to it; else we know it from what others say."""


@dataclass(frozen=True, slots=True)
class MeshStatistics:
    members: dict[MemberState, int]
    topology_changes: int
    view: ViewStatistics
    gossip: GossipStatistics
    prober: ProberStatistics
    link_probes: LinkProberStatistics | None
    """None: this node has nothing to probe with."""
    connector: ConnectorStatistics


class Mesh:
    """This node among the others. Needs a transport that runs."""

    def __init__(
        self,
        transport: Transport,
        own_card: OwnCard,
        settings: MeshSettings,
        rng: random.Random,
        probes: ProbeChannels | None = None,
    ) -> None:
        """
        Args:
            transport: its events are read here and nowhere else.
            own_card: written by whoever knows something of this node; announced here.
            settings: see there.
            rng: spreads retries, picks whom to ask.
            probes: with what links are measured beyond pings; None: they are not.

        Raises:
            BadInput: a seed is no address.
        """
        for seed in settings.seeds:
            parse_address(seed)
        self._transport, self._own_card, self._settings = transport, own_card, settings
        self._own = transport.node_id
        self._membership = Membership()
        self._driver = MembershipDriver(self._membership, self._perform)
        self._view = View(sign(own_card.card, (), transport.sign))
        self._prober = Prober(transport, self._on_ping)
        self._gossip = Gossip(
            transport,
            own_card,
            self._view,
            links=self._own_links,
            asked_for=lambda: self._far.asked_for(),  # noqa: PLW0108 - made after it, and tells it
            suspects=lambda: self._membership.suspects(trio.current_time()),
            neighbours=lambda: self._membership.vouched() & transport.peers(),
            on_merge=self._on_merge,
            rng=rng,
        )
        self._indirect = IndirectProbes(transport, self._relays_for, self._driver.tell, rng)
        self._book = AddressBook(settings.home / "address-book.json")
        plan = DialPlan(self._own, transport.addresses, rng, settings.seeds)
        self._connector = Connector(
            transport, plan, wanted=self._wanted, on_unreachable=lambda node: self._driver.tell(RedialFailed(node))
        )
        self._plan = plan
        self._topology = LiveTopology(self._view, self._membership, own_card, self._connector.look_again)
        self._copies = KeyCopies(own_card, settings.home, transport.addresses, self._connector.try_once)
        self._links = self._make_prober(probes, rng) if probes is not None else None
        self._far = FarLinks(
            transport, topology=self._topology.now, dial=self._connector.redial, on_more_to_tell=self._gossip.link_told
        )

    # --- what others ask ------------------------------------------------------------------------

    @property
    def node_id(self) -> NodeId:
        return self._own

    def topology(self) -> Topology:
        """Everyone alive, with this node, and the links among them, as of now."""
        return self._topology.now()

    def changes(self) -> Watch:
        """A reader of topology changes: `await watch.changed()`, then look at `topology()`."""
        return self._topology.changes.watch()

    def doubtful(self) -> frozenset[NodeId]:
        """Members that do not answer right now (their lid closed a second ago, or their cable was moved)."""
        return self._membership.doubtful()

    def out_of_reach(self) -> frozenset[NodeId]:
        """Members that others reach and this node does not."""
        return self._membership.out_of_reach()

    def is_waking(self) -> bool:
        """Whether this node has just come to, after others may have held it dead, and may not know yet what they did."""
        return self._driver.is_waking()

    def blame(self, node: NodeId) -> None:
        """The data path has lost `node`: a channel to it broke, or a step came too late. It is looked at at once."""
        self._driver.tell(Blamed(node))

    def members(self) -> tuple[MemberReport, ...]:
        """All other nodes known here, sorted by id; the dead and the left for some minutes."""
        now = trio.current_time()
        reports: dict[NodeId, MemberReport] = {}
        for node in self.topology().by_id:
            if node != self._own:
                reports[node] = MemberReport(node, self._view.name(node), "alive", "others reach it", 0.0, False)
        for member in self._membership.members():
            is_rumoured = member.node in reports and member.state in ("dead", "distant")
            if not is_rumoured:
                reports[member.node] = MemberReport(
                    member.node, self._view.name(member.node), member.state, member.cause, now - member.since, True
                )
        return tuple(reports[node] for node in sorted(reports))

    def statistics(self) -> MeshStatistics:
        return MeshStatistics(
            members=dict(Counter(member.state for member in self.members())),
            topology_changes=self._topology.changes.count,
            view=self._view.statistics(),
            gossip=self._gossip.statistics(),
            prober=self._prober.statistics(),
            link_probes=self._links.statistics() if self._links else None,
            connector=self._connector.statistics(),
        )

    # --- calls ----------------------------------------------------------------------------------

    async def call(self, peer: NodeId, method: str, payload: bytes, timeout_seconds: float) -> bytes:
        """`Transport.call`, also of nodes to which there is no connection yet: in a large mesh those are most.

        Of a neighbour whose connection is gone that is said at once: the membership dials it already.
        """
        begun = trio.current_time()
        if self._membership.state(peer) is None and peer not in self._transport.peers():
            with trio.move_on_after(min(timeout_seconds, CONNECT_SECONDS)):
                await self._connector.connect(peer)
        left = max(0.0, begun + timeout_seconds - trio.current_time())
        return await self._transport.call(peer, method, payload, left)

    # --- links ----------------------------------------------------------------------------------

    def best_host(self, peer: NodeId) -> str | None:
        """Where runners should dial `peer`'s: the address that both ends agree on, else one that is known to work."""
        chosen = self._links.best_host(peer) if self._links else None
        return chosen or self._transport.peer_host(peer)

    def frame_arrived(self, peer: NodeId, byte_count: int, seconds: float) -> None:
        """A runner here received so much of a large frame from one of `peer`'s in that time."""
        if self._links:
            self._links.arrived(peer, byte_count, seconds)

    def want_links(self, pairs: Iterable[tuple[NodeId, NodeId]]) -> None:
        """A planner's candidates go over these: have those measured soon that are not yet. Returns at once."""
        self._far.want(pairs)

    # --- what runs ------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find the others and stay in touch, until cancelled."""
        self._own_card.update(addresses=self._transport.addresses())
        now = trio.current_time()
        for node, addresses in self._book.entries().items():
            self._plan.learn(node, addresses, now)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._prober.run, name="prober")
                await nursery.start(self._gossip.run, name="gossip")
                await nursery.start(self._connector.run, name="connector")
                await nursery.start(self._indirect.run, name="indirect probes")
                await self._gossip.publish()  # so that whoever connects first pulls a card with addresses
                nursery.start_soon(self._read_events, name="transport events")
                nursery.start_soon(self._driver.run, name="membership")
                nursery.start_soon(self._follow_own_card, name="own card")
                nursery.start_soon(self._topology.run, name="topology changes")
                nursery.start_soon(self._keep_house, name="lifetimes")
                nursery.start_soon(self._keep_up, name="addresses")
                nursery.start_soon(self._far.run, name="far links")
                if self._links:
                    nursery.start_soon(self._links.run, name="link probes")
                if self._settings.discovery:
                    myself = Self(
                        self._own, self._settings.mesh_id, self._own_card.card.name, self._own_card.card.agent_version
                    )
                    discovery = Discovery(myself, self._transport.addresses, self._on_hint)
                    nursery.start_soon(discovery.run, name="discovery")
                task_status.started()
        finally:
            self._book.save()

    async def leave(self) -> None:
        """Tell everyone that this node goes; call it before the transport is stopped."""
        self._own_card.update(leaving=True)
        await self._gossip.publish()

    async def _read_events(self) -> None:
        async for event in self._transport.events:
            match event:
                case PeerConnected(peer):
                    self._driver.tell(Connected(peer))
                    self._prober.start(peer)
                    self._gossip.ask(peer)
                    self._meet(peer)
                    self._connector.look_again()
                case PeerDisconnected(peer):
                    self._prober.stop(peer)
                    self._driver.tell(Disconnected(peer))
                    self._connector.look_again()
                case GossipReceived(author, payload):
                    self._gossip.receive(author, payload)
                case KeyCopied(address):
                    self._copies.proved(address)
                case _:
                    assert_never(event)

    async def _follow_own_card(self) -> None:
        seats = _seats(self._own_card.card)
        watch = self._own_card.changes.watch()
        async for _ in watch:
            before, seats = seats, _seats(self._own_card.card)
            self._gossip.wake(urgent=seats != before)
            self._topology.note(substance=True)

    async def _keep_house(self) -> None:
        while True:
            await sleep_to_beat(HOUSEKEEPING_SECONDS)
            self._view.expire(trio.current_time())
            self._topology.note()

    async def _keep_up(self) -> None:
        while True:
            await sleep_to_beat(UPKEEP_SECONDS)
            self._own_card.update(addresses=self._transport.addresses())
            if not self._book.is_saved:
                await trio.to_thread.run_sync(self._book.save)

    # --- what is heard --------------------------------------------------------------------------

    def _on_ping(self, event: PingSent | PingAnswered) -> None:
        self._driver.tell(event)
        if isinstance(event, PingAnswered) and all(event.node != link.target for link in self._view.own.links):
            self._gossip.link_told()  # a new link is measured: others learn through it that this neighbour lives

    def _on_merge(self, heard: Heard, result: MergeResult) -> None:
        if result == "outbid":
            self._copies.claimed(heard.card.addresses, trio.current_time())
            if self._own_card.outbids == MAX_OUTBIDS:
                self._copies.outbid_again(heard.card.addresses)
            return
        self._driver.tell(CardHeard(heard.author, heard.card.incarnation, heard.card.leaving))
        if heard.author != self._own:
            self._driver.tell(Accused(heard.author, heard.suspects))
            if self._own_card.refute(dict(heard.suspects).get(self._own, -1)):
                log.debug("%s does not reach this node; refuted", heard.card.name)
                self._driver.tell(SuspectedOurselves())
        if result == "new" and heard.author in self._transport.peers():
            self._meet(heard.author)
        if result != "refreshed":
            self._plan.learn(heard.author, heard.card.addresses, trio.current_time())
            self._connector.look_again()
            # The same again is no news: what differs (load, ages) is shown from the next housekeeping on.
            self._topology.note(substance=True)

    def _on_hint(self, hint: Hint) -> None:
        if isinstance(hint, AnotherMesh):
            log.warning("%s", hint.message)
        elif hint.node_id == self._own:
            self._copies.claimed(hint.addresses, trio.current_time())
        else:
            self._plan.learn(hint.node_id, hint.addresses, trio.current_time(), fresh=True)
            self._connector.look_again()

    def _perform(self, effect: Effect) -> None:
        """What the membership machine says."""
        match effect:
            case StateChanged(node, old, new, cause):
                # Of one that is new, the name is not known yet: its card says it, and the topology tells. A suspicion
                # that is refuted comes to nothing, and where the Wi-Fi is bad there are many.
                is_minor = old is None or new == "suspect" or (old, new) == ("suspect", "alive")
                level = logging.DEBUG if is_minor else logging.INFO
                log.log(level, "%s %s: %s", self._view.called(node), _DEEDS[new], cause)
                if new in ("dead", "distant", "left"):
                    self._prober.forget(node)
                self._gossip.wake(urgent=True)
                self._connector.look_again()
                self._topology.note()
            case LinkDoubted():
                self._gossip.wake(urgent=True)
            case Redial(node):
                self._connector.redial(node)
            case Probe(node):
                self._prober.ping_now(node)
            case AskOthers(node):
                self._indirect.ask(node)
            case _:
                assert_never(effect)

    def _meet(self, peer: NodeId) -> None:
        """It is connected: what is known of it says where to find it again, and which start of it this is."""
        heard = self._view.get(peer)
        if heard is not None:
            self._book.remember(peer, heard.card.addresses)
            self._driver.tell(CardHeard(peer, heard.card.incarnation, heard.card.leaving))

    # --- what is derived ------------------------------------------------------------------------

    def _relays_for(self, node: NodeId) -> frozenset[NodeId]:
        """Neighbours that can be asked about `node`: those that say they reach it, if any do."""
        able = (self._membership.vouched() - self._membership.doubtful() - {node}) & self._transport.peers()
        near = frozenset(
            relay for relay in able if (heard := self._view.get(relay)) and any(k.target == node for k in heard.links)
        )
        return near or able

    def _own_links(self) -> tuple[Link, ...]:
        # One that others reach and we do not is no link to plan with, long before we give it up.
        links = self._prober.links(self._own, self._membership.reached(), trio.current_time())
        return self._links.complete(links) if self._links else links

    def _make_prober(self, probes: ProbeChannels, rng: random.Random) -> LinkProber:
        return LinkProber(
            self._transport,
            probes,
            self._own_card,
            topology=self._topology.now,
            members=self._membership.vouched,
            ping_seconds=self._prober.rtt_seconds,
            on_change=self._gossip.link_told,
            on_drift=self._gossip.drifted,
            bytes_per_hour=self._settings.probe_bytes_per_hour,
            rng=rng,
        )

    def _wanted(self) -> Wanted:
        # Everyone with a card counts as here, though the links that prove it may still be on their way: else a
        # node that joins thirty others would take them for strangers, and dial them all.
        present = self._view.nodes() - self._membership.dead().keys()
        return wanted(self._own, present, self._plan.nodes(), self._plan.failing(trio.current_time()))


def _seats(card: NodeCard) -> frozenset[tuple[InstanceId, int, int, SeatState]]:
    """What repairs and requests wait for."""
    return frozenset((seat.instance_id, seat.epoch, seat.seat_index, seat.state) for seat in card.seats)
