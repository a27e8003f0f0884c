"""How fast is the way to each neighbour, each way, for what runners send: the driver of probes.

    real frames ──► runner ──► its agent ─────┐
    probe channel ──► decider of the edge ────┼──► paths, estimates ──► links of this node's announcement
    reports of the other end ─────────────────┘          └──► best_host: which address runners dial

Who writes what: of each link its source, as ever. But how fast bytes *arrive* only the target knows, so it tells the
source in a report. The end with the lower id decides over which pair of addresses an edge runs, since it is the one
that has tried them all; its reports carry the pair, so both ends and their runners use the same.

What to probe when is `link_plan`, what to make of it `link_estimate` and `edge`, how it is done
`transport.probe_channel`. What others may probe here is `probe_offers`; links to nodes that are no neighbours are
`far_links`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import trio

from meshinfer.base.beats import next_beat
from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import NodeId
from meshinfer.base.units import KIB, format_bytes, format_seconds
from meshinfer.mesh.edge import Edge, Ends, News
from meshinfer.mesh.link_plan import Job, candidate_hosts, is_idle, next_job
from meshinfer.mesh.own_card import OwnCard
from meshinfer.mesh.own_coordinate import OwnCoordinate
from meshinfer.mesh.probe_budget import ProbeBudget
from meshinfer.mesh.probe_channels import ProbeChannels
from meshinfer.mesh.probe_offers import ProbeOffers
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.transport.base import Transport
from meshinfer.transport.probe_channel import BULK_BYTES, Measured
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import LINK_PROBE, LINK_REPORT, Done, LinkProbe, LinkProbeOffer, LinkReport

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often it is looked at what is due. A new neighbour's first round trips come within this and their own time."""
JOBS_AT_ONCE = 4
"""Round-trip probes of different edges; of bursts there is one at a time, alone."""
CALL_SECONDS = 3.0
LEAST_BULK_BYTES = 256 * KIB
"""Both directions together: with less even a slow link's burst would be too short."""
REFUSED_SECONDS = 5.0
"""After a node was busy with another probe, or with work."""
REFRESH_SHARE = 0.25
"""Of the budget stays for links that were never measured: refreshing others does not touch it."""
FALLBACK_SECONDS = 15.0
"""Without a word from the end that decides, the other one tries."""
ARRIVALS_APART_SECONDS = 5.0
"""Between two reports about real frames to one node."""


@dataclass(frozen=True, slots=True)
class LinkProberStatistics:
    edges: int
    measured: int
    """Of them, those with a channel's round trip."""
    probes: int
    probes_failed: int
    spent_bytes: int
    """In the last hour, both directions, own probes and others'."""
    reports_received: int


class LinkProber:
    """Measures this node's edges and keeps the estimates."""

    def __init__(
        self,
        transport: Transport,
        channels: ProbeChannels,
        own_card: OwnCard,
        *,
        topology: Callable[[], Topology],
        members: Callable[[], Collection[NodeId]],
        ping_seconds: Callable[[NodeId], float],
        on_change: Callable[[], None],
        on_drift: Callable[[], None],
        bytes_per_hour: int,
        rng: random.Random,
    ) -> None:
        """
        Args:
            transport: for calls between agents.
            channels: for the probes themselves.
            own_card: read for whether this node works; its coordinate is written here.
            topology: everyone alive.
            members: neighbours that are alive, as far as this node itself can tell.
            ping_seconds: smoothed round trip of a small message to one of them; 0 if unknown.
            on_change: something is announced of a link that was not known before.
            on_drift: what was known has changed.
            bytes_per_hour: `Settings.probe_bytes_per_hour`.
            rng: spreads retries.
        """
        self._transport, self._channels, self._own_card = transport, channels, own_card
        self._own = transport.node_id
        self._topology, self._members, self._ping_seconds = topology, members, ping_seconds
        self._on_change, self._on_drift, self._rng = on_change, on_drift, rng
        self._edges: dict[NodeId, Edge] = {}
        """All and only members that are connected, or were a moment ago."""
        self._bytes_per_hour = bytes_per_hour
        self._budget = ProbeBudget(bytes_per_hour)
        self._offers = ProbeOffers(transport, channels, own_card, self._budget, bursting=lambda: self._bursting)
        self._jobs = 0
        self._bursting = False
        self._ended = trio.Event()
        """A probe has ended: what it found is announced, and the next one started, at once."""
        self._coordinate = OwnCoordinate(own_card, rng)
        self._nursery: trio.Nursery | None = None
        self._probes = self._failed = self._reports = 0
        transport.serve(LINK_REPORT, self._on_report)

    async def run(self) -> None:
        """Probe until cancelled."""
        with self._channels.listening():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    while True:
                        self._look(nursery, trio.current_time())
                        with trio.move_on_at(next_beat(LOOK_SECONDS)):
                            await self._ended.wait()
                        self._ended = trio.Event()
                finally:
                    self._nursery = None

    # --- what others ask ------------------------------------------------------------------------

    def complete(self, links: Iterable[Link]) -> tuple[Link, ...]:
        """`links` with what is known of the channels over them."""
        return tuple(edge.complete(link) if (edge := self._edges.get(link.target)) else link for link in links)

    def best_host(self, peer: NodeId) -> str | None:
        """The address at which runners should dial `peer`'s: the verified one that both ends agree on. None: not yet."""
        edge = self._edges.get(peer)
        return edge.host if edge else None

    def arrived(self, peer: NodeId, byte_count: int, seconds: float) -> None:
        """A runner here received a large frame from `peer`'s: this many bytes of its second half in this time."""
        edge, now = self._edges.get(peer), trio.current_time()
        if edge is None or seconds <= 0 or self._nursery is None:
            return
        rate = byte_count / seconds
        edge.current.carried(0.0, rate, now)
        if now - edge.arrival_told_at >= ARRIVALS_APART_SECONDS:
            edge.arrival_told_at = now
            self._nursery.start_soon(self._report, peer, LinkReport(bandwidth_bytes_per_second=rate))

    def statistics(self) -> LinkProberStatistics:
        measured = sum(edge.current.rtt.value > 0 for edge in self._edges.values())
        spent = self._budget.spent(trio.current_time())
        return LinkProberStatistics(len(self._edges), measured, self._probes, self._failed, spent, self._reports)

    # --- looking --------------------------------------------------------------------------------

    def _look(self, nursery: trio.Nursery, now: float) -> None:
        """Bring everything up to date with who is here, and start what is due."""
        self._offers.settle(now)
        members = set(self._members())
        gone = self._edges.keys() - members
        for peer in gone:
            del self._edges[peer]
        self._coordinate.forget(gone)
        topology = self._topology()
        connected = self._transport.peers()
        own_addresses = self._own_card.card.addresses  # asking the system each time would be the dearest part of a look
        for peer in sorted(members & connected):
            edge = self._edges.setdefault(peer, Edge(now))
            if self._decides(peer, edge, now):
                card = topology.by_id.get(peer)
                addresses = card.addresses if card else ()
                edge.lies_between(Ends(addresses, self._transport.peer_host(peer), own_addresses))
        # What was never measured comes first, so that a budget that does not reach for all is not used up by some.
        # Round trips of all come before bursts of any; a node that does not even answer calls holds up nobody.
        able = [edge for peer, edge in self._edges.items() if peer in connected and now >= edge.not_before]
        all_tried = all(path.tried_at is not None for edge in able for path in edge.paths.values())
        in_order = sorted(self._edges, key=lambda peer: (self._edges[peer].current.bulk_at or 0.0, peer))
        for peer in in_order:
            edge = self._edges[peer]
            if peer in connected and not edge.busy and now >= edge.not_before:
                self._start(nursery, peer, edge, topology.by_id.get(peer), now, all_tried=all_tried)
        self._judge(now)
        rtts = ((peer, edge.current.rtt.value or self._ping_seconds(peer)) for peer, edge in self._edges.items())
        self._coordinate.look(topology, rtts, now)

    def _decides(self, peer: NodeId, edge: Edge, now: float) -> bool:
        return self._own < peer or (edge.told_at is None and now - edge.since >= FALLBACK_SECONDS)

    def _start(
        self, nursery: trio.Nursery, peer: NodeId, edge: Edge, card: NodeCard | None, now: float, *, all_tried: bool
    ) -> None:
        if self._bursting or self._jobs >= JOBS_AT_ONCE or not self._decides(peer, edge, now):
            return
        left = self._budget.available(now)
        is_first = edge.current.bulk_at is None
        may_burst = (
            self._jobs == 0
            and all_tried
            and not self._channels.is_serving
            and left >= LEAST_BULK_BYTES + (0 if is_first else int(REFRESH_SHARE * self._bytes_per_hour))
            and is_idle(self._own_card.card)
            and (card is None or is_idle(card))
        )
        job = next_job(edge.paths, edge.chosen, now, may_burst=may_burst)
        if job is not None:
            edge.busy, self._bursting = True, job.kind == "bursts"
            self._jobs += 1
            nursery.start_soon(self._probe, peer, edge, job, name=f"link probe {peer}")

    def _judge(self, now: float) -> None:
        """What is announced follows the estimates; a degraded edge is told of once."""
        news: set[News] = set()
        for peer, edge in self._edges.items():
            was_degraded = edge.said.degraded
            news.add(edge.follow(now))
            if edge.said.degraded != was_degraded:
                log.warning(
                    "the link to %s %s: %s/s, round trip %s",
                    self._topology().called(peer),
                    "is as good as it was again" if was_degraded else "is worse than half of its best",
                    format_bytes(edge.current.bandwidth_out.value),
                    format_seconds(edge.current.rtt.value),
                )
        if "first" in news:
            self._on_change()
        elif "drift" in news:
            self._on_drift()

    # --- probing --------------------------------------------------------------------------------

    async def _probe(self, peer: NodeId, edge: Edge, job: Job) -> None:
        bursts = job.kind == "bursts"
        reserved = self._budget.reserve(BULK_BYTES, trio.current_time()) if bursts else 0
        used = 0
        self._probes += 1
        try:
            measured = await self._measure(peer, edge, job, reserved)
            if measured is not None:
                used = measured.spent_bytes
                await self._learn(peer, edge, job, measured)
        finally:
            self._budget.settle(reserved, used, trio.current_time())
            edge.busy = False
            self._jobs -= 1
            if bursts:
                self._bursting = False
            self._ended.set()

    async def _measure(self, peer: NodeId, edge: Edge, job: Job, bulk_bytes: int) -> Measured | None:
        """One probe of one path; None if there was none."""
        ask = encode(LinkProbe(self._channels.certificate_der, bulk_bytes))
        try:
            granted = decode(LinkProbeOffer, await self._transport.call(peer, LINK_PROBE, ask, CALL_SECONDS))
        except MeshinferError as error:  # says nothing of the path
            log.debug("%s cannot be probed now: %s", peer, error)
            edge.not_before = trio.current_time() + REFUSED_SECONDS * self._rng.uniform(0.5, 1.5)
            return None
        allowed = min(bulk_bytes, granted.bulk_bytes)
        if job.kind == "bursts" and allowed < LEAST_BULK_BYTES:
            edge.not_before = trio.current_time() + REFUSED_SECONDS * self._rng.uniform(0.5, 1.5)
            return None
        offer = replace(granted.offer, hosts=(job.host,))
        try:
            return await self._channels.measure(peer, offer, allowed)
        except MeshinferError as error:
            log.debug("probing %s at %s: %s", peer, job.host, error)
            self._failed += 1
            path = edge.paths.get(job.host)
            if path is not None:
                path.failed(trio.current_time())
                await self._choose(peer, edge)
            return None

    async def _learn(self, peer: NodeId, edge: Edge, job: Job, measured: Measured) -> None:
        now = trio.current_time()
        path = edge.paths.get(job.host)
        if path is None:  # its host is gone from the card meanwhile
            return
        path.answered(measured.rtt_seconds, measured.message_seconds, now)
        if measured.out_bytes_per_second or measured.in_bytes_per_second:
            path.carried(measured.out_bytes_per_second, measured.in_bytes_per_second, now)
        if not await self._choose(peer, edge) and job.host == edge.chosen:
            report = LinkReport(
                bandwidth_bytes_per_second=measured.in_bytes_per_second,
                rtt_seconds=measured.rtt_seconds,
                message_seconds=measured.message_seconds,
            )
            await self._report(peer, self._with_hosts(report, job.host))

    async def _choose(self, peer: NodeId, edge: Edge) -> bool:
        """Take the best path; whether it is another one, which then is all told already."""
        before = edge.chosen
        if not edge.choose():
            return False
        log.info(
            "the way to %s is now by %s (was %s)",
            self._topology().called(peer),
            edge.chosen or "its connection",
            before or "none",
        )
        if edge.chosen is not None:
            path = edge.paths[edge.chosen]
            report = LinkReport(path.bandwidth_in.value, path.rtt.value, path.message.value)
            await self._report(peer, self._with_hosts(report, edge.chosen))
        return True

    def _with_hosts(self, report: LinkReport, host: str) -> LinkReport:
        return replace(report, callee_host=host, caller_host=self._channels.own_host_towards(host))

    async def _report(self, peer: NodeId, report: LinkReport) -> None:
        try:
            await self._transport.call(peer, LINK_REPORT, encode(report), CALL_SECONDS)
        except MeshinferError as error:
            log.debug("%s was not told of its link: %s", peer, error)

    # --- what others report ---------------------------------------------------------------------

    async def _on_report(self, caller: NodeId, payload: bytes) -> bytes:
        report, now = decode(LinkReport, payload), trio.current_time()
        edge = self._edges.get(caller)
        if edge is None and caller in self._members():
            edge = self._edges[caller] = Edge(now)
        if edge is not None:
            self._reports += 1
            if not report.callee_host:
                edge.current.carried(report.bandwidth_bytes_per_second, 0.0, now)
            else:
                self._take_decision(caller, edge, report, now)
        return encode(Done())

    def _take_decision(self, caller: NodeId, edge: Edge, report: LinkReport, now: float) -> None:
        """The other end has decided on a pair of addresses, and says what it measured there."""
        card = self._topology().by_id.get(caller)
        known = candidate_hosts(
            card.addresses if card else (), self._transport.peer_host(caller), self._transport.addresses()
        )
        # An address that its card does not confirm is the far side of a translation: nothing that could be dialled.
        edge.decided(report.caller_host if report.caller_host in known else None, report, now)
