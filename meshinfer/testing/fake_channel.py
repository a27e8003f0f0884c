"""An origin's channel to a runner of the exact engine."""

from __future__ import annotations

from typing import Protocol

import trio

from meshinfer.base.errors import PeerLost
from meshinfer.base.ids import NodeId
from meshinfer.testing.clocks import shared_time, sleep_until_shared
from meshinfer.testing.network import SimNetwork
from meshinfer.wire.records import OriginRecord, RunnerRecord


def certificate_of(origin: NodeId) -> bytes:
    """What that node shows when it dials runners."""
    return f"origin {origin}".encode(errors="surrogatepass")


class ChannelEnd(Protocol):
    """The runner, as its channels see it."""

    node_id: NodeId
    network: SimNetwork

    async def moves(self) -> None:
        """Wait while it is stopped or hangs."""
        ...

    def take_channel(self, channel: FakeChannel) -> None:
        """An origin has dialled."""
        ...

    def take(self, record: OriginRecord, channel: FakeChannel) -> None: ...

    def origin_lost(self, channel: FakeChannel) -> None:
        """Nobody is there any more for the sessions of this channel."""
        ...


class FakeChannel:
    """An origin's end of a channel to a fake runner. Records cross it in order, each after the network's latency."""

    def __init__(self, runner: ChannelEnd, origin: NodeId) -> None:
        self.runner = runner
        self.origin = origin
        self._closed = False
        # Unlike sockets they do not push back: a simulation's answers are short.
        self._send, self._receive = trio.open_memory_channel[tuple[float, RunnerRecord]](100_000)
        self._ask, self._asked = trio.open_memory_channel[tuple[float, OriginRecord]](100_000)
        runner.take_channel(self)

    async def send(self, record: OriginRecord) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise PeerLost("the runner is gone")
        self._ask.send_nowait((shared_time(), record))

    async def receive(self) -> RunnerRecord:
        network, there, here = self.runner.network, self.runner.node_id, self.origin
        try:
            sent_at, record = await self._receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            await network.clear(there, here, channel=True)  # nor does the end get past a cut
            raise PeerLost("the channel to the runner was closed") from error
        await sleep_until_shared(sent_at + network.latency_seconds)
        await network.clear(there, here, channel=True)
        return record

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.hang_up()

    def deliver(self, record: RunnerRecord) -> None:
        if not self._closed:
            self._send.send_nowait((shared_time(), record))

    def hang_up(self) -> None:
        """Either side is gone."""
        self._closed = True
        self._send.close()
        self._ask.close()

    async def carry(self) -> None:
        """Bring what the origin sends to the runner; the runner runs this until the origin hangs up."""
        network, there, here = self.runner.network, self.origin, self.runner.node_id
        async for sent_at, record in self._asked:
            await sleep_until_shared(sent_at + network.latency_seconds)
            await network.clear(there, here, channel=True)
            await self.runner.moves()
            self.runner.take(record, self)
        await network.clear(there, here, channel=True)
        self.runner.origin_lost(self)
