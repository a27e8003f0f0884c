"""An origin's channels to the runners of an instance, shared by all its sessions there.

One link per (instance, epoch, placement): a channel to the head, on which sessions are opened and cancelled,
and one to the last stage, from which tokens come straight here (one and the same channel where a
single seat is both). Records are handed to their session's queue; a lost channel ends every session
on it at once, which is how the data path notices a dead node before any gossip does. What the data path cannot notice
the view tells: a stopped machine keeps its sockets open, and between two seats that are cut off from each other nothing
breaks here.

What the head is to know goes out one record after the other, the sending of which is the link's own task: nobody waits
for somebody else's prompt on its way, and who leaves meanwhile leaves a cancel. A head that takes nothing any more has
a lost link as well: what it does and what is believed here must not go apart.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from meshinfer.base.errors import DeadlineExceeded, MeshinferError, PeerLost, Refused
from meshinfer.base.ids import InstanceId, NodeId, SessionId
from meshinfer.serving.ports import OriginChannel, Ports
from meshinfer.serving.reach import dialled_in_vain, while_within_reach
from meshinfer.serving.seat_channels import SeatChannels
from meshinfer.serving.view import Instance
from meshinfer.transport.dialling import Unanswered
from meshinfer.wire.messages import OpenChannel
from meshinfer.wire.records import CancelSession, OpenSession, RunnerRecord

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""For both channels of a link: an offer each (one round trip and the runner's answer), a dial, a TLS handshake."""
IDLE_SECONDS = 60.0
"""An unused link is closed after this; opening one costs some ten milliseconds."""

Heard = tuple[NodeId, RunnerRecord]
"""A record, and the node whose runner sent it."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    instance_id: InstanceId
    epoch: int
    placement_id: str
    """Two sides of a partition may have one each in the same epoch."""


class OriginLink:
    """The channels to one instance."""

    def __init__(
        self, instance: Instance, head: OriginChannel, last: OriginChannel, called: Callable[[NodeId], str]
    ) -> None:
        self.instance = instance
        nodes = instance.placement.node_ids
        self._names = {node: called(node) for node in nodes}
        """What people call them: asked now, since of who is lost the mesh knows no name any more."""
        self._channels = ((nodes[0], head),) if head is last else ((nodes[0], head), (nodes[-1], last))
        self._queues: dict[SessionId, trio.MemorySendChannel[Heard]] = {}
        """All and only sessions that are open on this link."""
        self._to_open: dict[SessionId, OpenSession] = {}
        """Sessions of which the head has not been told yet, in their order."""
        self._to_cancel: deque[SessionId] = deque()
        """Sessions of which the head has been told and that are over here: no more than were open when the record that is
        on its way began."""
        self._stirred = trio.Event()
        """There may be something to send."""
        self.lost: str = ""
        """Why it is gone; empty while it works."""
        self.lost_node: NodeId | None = None
        """Whose runner or machine it was, if that is why."""
        self._over = trio.CancelScope()
        """Of `run`."""
        self.idle_since: float = trio.current_time()

    @property
    def sessions(self) -> int:
        return len(self._queues)

    def open(self, session: OpenSession) -> trio.MemoryReceiveChannel[Heard]:
        """Start a session; its records arrive on the returned channel, which closes when the link is lost."""
        if self.lost:
            raise PeerLost(self.lost)
        # Every record of a session fits: one a token, a few signs of life (older ones are dropped when it is full).
        send, receive = trio.open_memory_channel[Heard](session.max_new_tokens + 64)
        self._queues[session.session_id] = send
        self._to_open[session.session_id] = session
        self._stirred.set()
        return receive

    def end(self, session_id: SessionId, *, cancel: bool) -> None:
        """Forget a session; with `cancel`, have the head told so that every stage frees it."""
        queue = self._queues.pop(session_id, None)
        if queue is not None:
            queue.close()
        if not self._queues:
            self.idle_since = trio.current_time()
        if self._to_open.pop(session_id, None) is None and cancel:
            self._to_cancel.append(session_id)
            self._stirred.set()

    async def run(self, ports: Ports) -> None:
        """Carry records until a channel, a node or the instance is lost."""
        with self._over:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                for node, channel in self._channels:
                    nursery.start_soon(self._read, node, channel)
                await self._watch(ports)

    async def _watch(self, ports: Ports) -> None:
        watch = ports.watch()
        while True:
            nodes = ports.topology().by_id
            gone = [node for node in self.instance.placement.node_ids if node not in nodes]
            if gone:
                self._lose("it is gone", gone[0])
            for instance in ports.instances():
                # Another epoch's end is no news: an older one's is late, and beside a newer or a rival this one may go on.
                if _key_of(instance) == _key_of(self.instance) and instance.state == "broken":
                    self._lose(f"its instance is broken: {instance.error}")
            await watch.changed()

    async def aclose(self, why: str) -> None:
        """End every session on this link with `why`."""
        self.lost = self.lost or why
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
        with trio.move_on_after(1.0, shield=True):
            for _, channel in self._channels:
                await channel.aclose()

    def _lose(self, why: str, node: NodeId | None = None) -> None:
        """It is of no use any more: `run` returns, and whoever waits for that closes it."""
        if not self.lost:
            self.lost, self.lost_node = f"node {self._names[node]}: {why}" if node else why, node
        self._over.cancel()

    async def _send(self) -> None:
        """Tell the head what it is to know; cancels first, which are small and free memory there."""
        node, channel = self._channels[0]
        try:
            while True:
                self._stirred = trio.Event()
                while self._to_cancel or self._to_open:
                    if self._to_cancel:
                        await channel.send(CancelSession(self._to_cancel.popleft()))
                    else:
                        await channel.send(self._to_open.pop(next(iter(self._to_open))))
                await self._stirred.wait()
        except MeshinferError as error:
            self._lose(str(error), node)

    async def _read(self, node: NodeId, channel: OriginChannel) -> None:
        try:
            while True:
                record = await channel.receive()
                queue = self._queues.get(record.session_id)
                if queue is not None:
                    try:
                        queue.send_nowait((node, record))
                    except trio.WouldBlock:
                        log.debug("session %s: a sign of life dropped", record.session_id)
                    except trio.BrokenResourceError:
                        self._queues.pop(record.session_id, None)
        except MeshinferError as error:
            self._lose(str(error), node)


class OriginLinks:
    """All links of this origin. `run` owns their tasks."""

    def __init__(self, ports: Ports, channels: SeatChannels) -> None:
        self._ports = ports
        self._channels = channels
        self._links: dict[LinkKey, OriginLink] = {}
        self._connecting: dict[LinkKey, trio.Lock] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await trio.sleep(IDLE_SECONDS / 4)
                for link in list(self._links.values()):
                    if link.sessions == 0 and trio.current_time() - link.idle_since > IDLE_SECONDS:
                        await link.aclose("it was not used")

    async def get(self, instance: Instance) -> OriginLink:
        """The link to `instance`, opened if need be.

        Raises:
            PeerLost: its runners cannot be reached.
        """
        key = _key_of(instance)
        lock = self._connecting.setdefault(key, trio.Lock())
        had_to_wait = lock.locked()
        try:
            async with lock:
                link = self._links.get(key)
                if link is None or link.lost:
                    # Somebody has just dialled in vain, perhaps, while this one waited for the same link.
                    if had_to_wait and (ends := self._ports.blocked_ends(instance.placement)):
                        raise PeerLost(
                            f"the runner of {self._ports.called(min(ends))} was dialled in vain a moment ago"
                        )
                    link = await self._connect(instance)
                    self._links[key] = link
                    assert self._nursery is not None
                    self._nursery.start_soon(self._keep, key, link)
                return link
        finally:
            if not lock.locked():
                self._connecting.pop(key, None)

    async def _keep(self, key: LinkKey, link: OriginLink) -> None:
        try:
            await link.run(self._ports)
        finally:
            if self._links.get(key) is link:
                del self._links[key]
            await link.aclose(link.lost or "this node is ending")

    async def _connect(self, instance: Instance) -> OriginLink:
        try:
            with trio.fail_after(CONNECT_SECONDS):
                last_index = len(instance.placement.seats) - 1
                # The last stage first: it must know where to send tokens before the head lets a session in.
                last = await self._dial_within_reach(instance, last_index)
                try:
                    head = last if last_index == 0 else await self._dial_within_reach(instance, 0)
                except BaseException:
                    with trio.move_on_after(1.0, shield=True):
                        await last.aclose()
                    raise
        except trio.TooSlowError as error:
            raise PeerLost(
                f"the runners of instance {instance.instance_id} did not answer within {CONNECT_SECONDS:.0f} s"
            ) from error
        return OriginLink(instance, head, last, self._ports.called)

    async def _dial_within_reach(self, instance: Instance, seat_index: int) -> OriginChannel:
        node = instance.placement.seats[seat_index].node_id
        return await while_within_reach(self._ports, node, partial(self._dial, instance, seat_index))

    async def _dial(self, instance: Instance, seat_index: int) -> OriginChannel:
        node = instance.placement.seats[seat_index].node_id
        ask = OpenChannel(
            instance.instance_id, instance.epoch, -1, seat_index, "origin", self._ports.origin_certificate_der
        )
        try:
            channel = await self._ports.open_channel(await self._channels.ask(node, ask))
        except Unanswered:
            dialled_in_vain(self._ports, node)
            raise
        except (Refused, DeadlineExceeded) as error:
            what = f"seat {seat_index} of instance {instance.instance_id} is not there, on node {self._ports.called(node)}: {error}"
            raise PeerLost(what) from error
        self._ports.blocked_ways.opened(node)
        return channel


def _key_of(instance: Instance) -> LinkKey:
    return LinkKey(instance.instance_id, instance.epoch, instance.placement.placement_id)
