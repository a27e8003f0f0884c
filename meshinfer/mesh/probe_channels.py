"""The door to probes as they are made: `transport.probe_channel.ProbeDoor`, or a simulation's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from meshinfer.base.ids import NodeId
from meshinfer.transport.probe_channel import Measured
from meshinfer.wire.messages import ChannelOffer


class ProbeChannels(Protocol):
    """Channels of the kind that activations travel on, to measure and to be measured over."""

    @property
    def certificate_der(self) -> bytes: ...

    @property
    def is_serving(self) -> bool: ...

    def listening(self) -> AbstractContextManager[None]: ...

    def offer(self, certificate_der: bytes, hosts: tuple[str, ...], bulk_bytes: int) -> ChannelOffer: ...

    async def measure(self, peer: NodeId, offer: ChannelOffer, bulk_bytes: int) -> Measured: ...

    def take_served_bytes(self) -> int: ...

    def own_host_towards(self, host: str) -> str: ...
