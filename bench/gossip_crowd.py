"""A few whole agents in a crowd: what a mesh of a thousand costs one of its nodes.

The crowd says, and answers, what a node in the steady state does, and decides nothing: each announces itself as often as
the product would (`neighbours.rarity`), with links to those whom it wants or that want it, echoes pings, answers pulls
out of one view that all of them share, and lends itself to link probes. What the whole agents receive is counted.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from random import Random

import trio

from meshinfer.base.ids import NodeId
from meshinfer.mesh.announcement import sign
from meshinfer.mesh.gossip import ANSWER_BYTES, OVERHEAD_BYTES
from meshinfer.mesh.neighbours import rarity, wanted
from meshinfer.mesh.pace import QUIET_PERIOD_SECONDS
from meshinfer.mesh.view import View
from meshinfer.testing.cards import node_card
from meshinfer.testing.network import SimNetwork, SimTransport
from meshinfer.testing.phantoms import Phantom
from meshinfer.testing.probes import SimProbes
from meshinfer.topology.card import NodeCard
from meshinfer.topology.link import Link
from meshinfer.transport.base import MAX_GOSSIP_BYTES
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import (
    LINK_PROBE,
    LINK_REPORT,
    PING,
    PULL_VIEW,
    VIEW_DIGESTS,
    Done,
    LinkProbe,
    LinkProbeOffer,
    PullView,
    SignedAnnouncement,
    ViewDigests,
    ViewPulled,
)

HOPS = 3
"""That gossip takes through a thousand nodes with a dozen connections each."""


class CrowdNetwork(SimNetwork):
    """Delivers gossip to whole agents only; what those say, the crowd knows at once."""

    def __init__(self, rng: Random, latency_seconds: float) -> None:
        super().__init__(rng, latency_seconds)
        self.whole: set[NodeId] = set()
        self.crowd: Crowd | None = None

    def flood(self, author: NodeId, payload: bytes) -> None:
        for node in sorted(self.whole - {author}):
            if (transport := self.running(node)) is not None:
                transport.expect_gossip(author, payload, HOPS * self.latency_seconds)
        if self.crowd is not None and author in self.whole:
            self.crowd.hear(payload)


class Crowd:
    """All nodes of a phantom but the whole agents."""

    def __init__(self, network: CrowdNetwork, phantom: Phantom, names: list[NodeId], probes: SimProbes) -> None:
        self.network, self._phantom, self._probes = network, phantom, probes
        self.transports: dict[NodeId, SimTransport] = {name: network.add(name) for name in names}
        self._cards: dict[NodeId, NodeCard] = {
            name: replace(node_card(name), addresses=transport.addresses())
            for name, transport in self.transports.items()
        }
        everyone = sorted(phantom.by_id)
        wishes = {node: wanted(node, everyone, (), ()).neighbours for node in everyone}
        self._near: dict[NodeId, set[NodeId]] = {node: set(wishes[node]) for node in everyone}
        for node, targets in wishes.items():
            for target in targets:
                self._near[target].add(node)
        first = self.transports[names[0]]
        self.view = View(sign(self._cards[names[0]], (), first.sign))
        network.crowd = self

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with ExitStack() as doors:
            async with trio.open_nursery() as nursery:
                for name, transport in self.transports.items():
                    await nursery.start(transport.run)
                    door = self._probes.of(name)
                    doors.enter_context(door.listening())
                    self._serve(name, transport)
                    await self._announce(name)
                for name in self.transports:
                    nursery.start_soon(self._repeat, name)
                task_status.started()

    def hear(self, payload: bytes) -> None:
        signed = decode(SignedAnnouncement, payload, MAX_GOSSIP_BYTES)
        from meshinfer.mesh import gossip  # noqa: PLC0415 - its `check` is the shared one

        self.view.merge(gossip.check(signed, next(iter(self.transports.values())).verify), trio.current_time())

    async def _repeat(self, name: NodeId) -> None:
        period = QUIET_PERIOD_SECONDS * rarity(len(self._near))
        await trio.sleep(self.network.rng.uniform(0, period))
        while True:
            await self._announce(name)
            await trio.sleep(period)

    async def _announce(self, name: NodeId) -> None:
        transport, card = self.transports[name], self._cards[name]
        self._cards[name] = card = replace(card, version=card.version + 1)
        heard = sign(card, tuple(self._link(name, target) for target in sorted(self._near[name])), transport.sign)
        if name == self.view.own.author:
            self.view.set_own(heard)
        else:
            self.view.merge(heard, trio.current_time())
        await transport.publish(encode(heard.signed))

    def _link(self, source: NodeId, target: NodeId) -> Link:
        there, back = self._phantom.link(source, target), self._phantom.link(target, source)
        rtt = there.latency_seconds + back.latency_seconds
        return Link(source, target, rtt, 0.0, there.bandwidth_bytes_per_second, 0.0, 1.0)

    def _serve(self, name: NodeId, transport: SimTransport) -> None:
        async def echo(_caller: NodeId, payload: bytes) -> bytes:
            return payload

        async def digests(_caller: NodeId, _payload: bytes) -> bytes:
            return encode(ViewDigests(self.view.digests()))

        async def pull(_caller: NodeId, payload: bytes) -> bytes:
            asked = decode(PullView, payload)
            chosen: list[SignedAnnouncement] = []
            size = 0
            for heard in self.view.newer_than(asked.known, asked.slices):
                size += heard.size_bytes + OVERHEAD_BYTES
                if size > ANSWER_BYTES:
                    return encode(ViewPulled(tuple(chosen), True))
                chosen.append(heard.signed)
            return encode(ViewPulled(tuple(chosen)))

        async def lend(_caller: NodeId, payload: bytes) -> bytes:
            ask = decode(LinkProbe, payload)
            hosts = tuple(address.rpartition(":")[0] for address in transport.addresses())
            offer = self._probes.doors[name].offer(ask.certificate_der, hosts, ask.bulk_bytes)
            return encode(LinkProbeOffer(offer, ask.bulk_bytes))

        async def done(_caller: NodeId, _payload: bytes) -> bytes:
            return encode(Done())

        handlers = {PING: echo, VIEW_DIGESTS: digests, PULL_VIEW: pull, LINK_PROBE: lend, LINK_REPORT: done}
        for method, handler in handlers.items():
            transport.serve(method, handler)
