"""Probes of a simulated network: the truth about each link, and noise, on trio's clock.

The counterpart of `transport.probe_channel.ProbeDoor`, behind the same door (`mesh.probe_channels.ProbeChannels`):
offers lapse on use, bursts cost bytes at both ends and take the time that they would take, a host that leads nowhere
costs a timeout. Chance comes from the `rng` given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager

import trio

from meshinfer.base.errors import PeerLost, Refused
from meshinfer.base.ids import NodeId
from meshinfer.topology.speed import LinkSpeed
from meshinfer.transport.probe_channel import DIAL_SECONDS, MAX_BURST_BYTES, MESSAGE_BYTES, MESSAGES, Measured
from meshinfer.wire.messages import ChannelOffer

Truth = Callable[[NodeId, NodeId, str], LinkSpeed | None]
"""(source, target, the target's host) → that direction of that path; None: it leads nowhere."""
BURST_SECONDS = 0.05
"""What the largest burst takes that a probe needs."""


class SimProbes:
    """All nodes' probes; `of` gives each node its own."""

    def __init__(
        self,
        truth: Truth,
        rng: random.Random,
        spread: float = 0.1,
        own_host: Callable[[NodeId, str], str] = lambda _node, _host: "",
    ) -> None:
        """
        Args:
            truth: about each direction of each path.
            rng: makes the noise.
            spread: measurements are off by up to this share of themselves, in either direction.
            own_host: from which of its addresses a node dials a host.
        """
        self.truth, self.rng, self.spread, self.own_host = truth, rng, spread, own_host
        self.doors: dict[NodeId, SimProbeDoor] = {}

    def of(self, node: NodeId) -> SimProbeDoor:
        door = self.doors[node] = SimProbeDoor(self, node)
        return door

    def off(self, value: float) -> float:
        return value * (1 + self.rng.uniform(-self.spread, self.spread))


class SimProbeDoor:
    """One node's end."""

    def __init__(self, probes: SimProbes, node: NodeId) -> None:
        self._probes, self._node = probes, node
        self._tokens: set[bytes] = set()
        self._serving = 0
        self._served_bytes = 0
        self._listens = False
        self.spent_bytes = 0
        """In all, own probes and others'."""

    @property
    def certificate_der(self) -> bytes:
        return self._node.encode()

    @property
    def is_serving(self) -> bool:
        return self._serving > 0

    @contextmanager
    def listening(self) -> Generator[None]:
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def offer(self, certificate_der: bytes, hosts: tuple[str, ...], bulk_bytes: int) -> ChannelOffer:
        del certificate_der, bulk_bytes
        token = self._probes.rng.randbytes(16)
        self._tokens.add(token)
        return ChannelOffer(hosts, 1, self._node.encode(), token)

    def take_served_bytes(self) -> int:
        taken, self._served_bytes = self._served_bytes, 0
        return taken

    def own_host_towards(self, host: str) -> str:
        return self._probes.own_host(self._node, host)

    async def measure(self, peer: NodeId, offer: ChannelOffer, bulk_bytes: int) -> Measured:
        probes, door = self._probes, self._probes.doors.get(peer)
        out = probes.truth(self._node, peer, offer.hosts[0])
        back = probes.truth(peer, self._node, offer.hosts[0])
        if door is None or not door.takes(offer.token) or out is None or back is None:
            await trio.sleep(DIAL_SECONDS)
            raise PeerLost(f"nobody at {offer.hosts[0]}")
        door.begin()
        try:
            rtt = out.latency_seconds + back.latency_seconds + out.message_seconds + back.message_seconds
            rtt += MESSAGE_BYTES / out.bandwidth_bytes_per_second
            await trio.sleep(rtt * (MESSAGES + 4))
            spent = MESSAGE_BYTES * (MESSAGES + 2)
            if bulk_bytes:
                for link in (out, back):
                    size = int(min(bulk_bytes // 2, MAX_BURST_BYTES, BURST_SECONDS * link.bandwidth_bytes_per_second))
                    spent += size
                    await trio.sleep(link.latency_seconds + size / link.bandwidth_bytes_per_second)
        finally:
            door.end()
        door.used(spent)
        self.spent_bytes += spent
        rates = [probes.off(link.bandwidth_bytes_per_second) if bulk_bytes else 0.0 for link in (out, back)]
        return Measured(probes.off(rtt), probes.off(out.message_seconds), rates[0], rates[1], spent)

    # --- the other node's end -------------------------------------------------------------------

    def takes(self, token: bytes) -> bool:
        """Each token works once."""
        if not self._listens:
            raise Refused("the node does not listen")
        known = token in self._tokens
        self._tokens.discard(token)
        return known

    def begin(self) -> None:
        self._serving += 1

    def end(self) -> None:
        self._serving -= 1

    def used(self, byte_count: int) -> None:
        self._served_bytes += byte_count
        self.spent_bytes += byte_count
