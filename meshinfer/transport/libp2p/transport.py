"""The real network: libp2p behind `transport.base.Transport`.

Read the parts in this order: `identity` (who we are), `connections` (how a stranger becomes a peer),
`hardening` (what the library lacks), `gossip`, and `transport.calls` (requests and answers, which
needs no libp2p at all). This file puts them together and turns the library's words into ours.

Calls go over the newest connection to a peer: when a machine comes back from the dead, the old
connection still looks alive for up to four seconds, the new one surely is. Streams are opened in
tasks of the transport, never in a caller's: an opening that is cancelled halfway is a cancelled
write, and that would take the whole connection with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.exceptions import ProtocolNotSupportedError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr
from trio import TaskStatus

from meshinfer.base.errors import BadInput, DeadlineExceeded, PeerLost, Refused
from meshinfer.base.ids import NodeId
from meshinfer.transport.addresses import dialable_hosts, format_address, parse_address
from meshinfer.transport.base import (
    MAX_GOSSIP_BYTES,
    Handler,
    KeyCopied,
    PeerConnected,
    PeerDisconnected,
    TransportEvent,
    TransportStatistics,
)
from meshinfer.transport.calls import CallLine, CallServer, check_request
from meshinfer.transport.libp2p.connections import Admission, Connections, Link, listening_on, open_listeners
from meshinfer.transport.libp2p.gossip import make_gossip, received, topic_of
from meshinfer.transport.libp2p.hardening import (
    acknowledge_seldom,
    check_names,
    harden_host,
    harden_pubsub,
    remove_auto_connector,
    remove_identify,
    reset,
)
from meshinfer.transport.libp2p.identity import is_signed_by, load_or_make_identity, node_id_of, peer_id_of, sign_with
from meshinfer.transport.mesh_key import MeshKey

log = logging.getLogger(__name__)

CALLS = TProtocol("/meshinfer/calls/1")
GOSSIP_EVENTS = 256
"""Gossip that waits for the reader of events. More would be stale when it is read; it is dropped and counted."""
PEER_EVENTS = 1024
"""Room beside it for peers that come and go. When that is full too, new connections wait for the reader."""
COPIES_TOLD = 16
"""Addresses of processes with a copy of our key; one would be enough to act on."""
OPEN_STREAM_SECONDS = 5
"""To open a stream takes two round trips; a connection that cannot in 5 s is dead."""


@dataclass(frozen=True)
class Libp2pSettings:
    """What the transport needs to know."""

    home: Path
    mesh_key: MeshKey
    listen_host: str = "0.0.0.0"  # noqa: S104 - every interface; nothing but the mesh handshake is served to strangers
    listen_port: int = 0
    """0: any free port."""
    include_loopback: bool = False
    """Announce loopback addresses too: several agents on one machine."""
    silence_seconds: float = 1.5
    """A peer that was not heard for this long is pinged. Membership hears from each neighbour every second and more
    often, and is the one to notice; below that, this would ping beside it (3 ms of CPU each)."""
    ping_timeout_seconds: float = 2.0
    """How long it may take to say anything then. Raising it finds a stopped one later; lowering it drops busy ones."""


@dataclass(eq=False, slots=True)
class _Opening:
    """A line for calls that is being opened, or is open, or could not be."""

    link: Link
    done: trio.Event = field(default_factory=trio.Event)
    line: CallLine | None = None
    error: Refused | PeerLost | None = None


class Libp2pTransport:
    """One node's end of the real network."""

    def __init__(self, settings: Libp2pSettings) -> None:
        """Loads the identity, or makes it. Nothing is opened before `run`.

        Raises:
            BadInput: the identity's file is damaged or can be read by others.
        """
        self._settings = settings
        self._keys = load_or_make_identity(settings.home)
        self._own_id = ID.from_pubkey(self._keys.public_key)
        self._node_id = node_id_of(self._own_id)
        self._send_event, self._events = trio.open_memory_channel[TransportEvent](GOSSIP_EVENTS + PEER_EVENTS)
        self._handlers: dict[str, Handler] = {}
        self._server = CallServer(self._handlers)
        self._calls_sent = self._calls_failed = 0
        self._gossip_sent = self._gossip_received = self._gossip_dropped = self._gossip_bytes_sent = 0
        self._lines: dict[NodeId, _Opening] = {}
        self._connected: dict[NodeId, set[INetConn]] = {}
        """All and only peers that `PeerConnected` was sent for and `PeerDisconnected` was not, each with its connections."""
        self._copies: set[str] = set()
        """Addresses of `KeyCopied` events."""
        self._listening: tuple[tuple[str, ...], int] | None = None
        self._nursery: trio.Nursery | None = None
        """Of `run`; None: not running."""

        admission = Admission(
            own_id=self._own_id,
            key=settings.mesh_key,
            # Noise alone: the library's default also takes plaintext, over which anyone can claim any id.
            security={NOISE: Noise(self._keys, noise_privkey=create_noise_key_pair().private_key)},
            muxers={TProtocol(YAMUX): Yamux},
            listening_port=lambda: self._listening[1] if self._listening else 0,
            on_key_copied=self._key_copied,
        )
        self._swarm = _make_swarm(self._keys, self._own_id, admission)
        self._host = BasicHost(self._swarm, disable_identify_address_discovery=True)
        self._connections = Connections(
            self._swarm,
            admission,
            silence_seconds=settings.silence_seconds,
            ping_timeout_seconds=settings.ping_timeout_seconds,
        )
        self._topic = topic_of(settings.mesh_key.mesh_id)
        self._pubsub, self._router = make_gossip(self._host, self._topic)
        check_names(self._host, self._pubsub, self._router)
        remove_identify(self._host, self._swarm)
        remove_auto_connector(self._swarm)
        harden_host(self._host, self._swarm, may_speak=self._connections.is_member)
        harden_pubsub(self._pubsub, self._router)
        self._host.set_stream_handler(CALLS, self._serve_calls)
        self._swarm.register_notifee(_Notifee(self))

    # --- what is so now -------------------------------------------------------------------------

    @property
    def node_id(self) -> NodeId:
        return self._node_id

    @property
    def events(self) -> trio.MemoryReceiveChannel[TransportEvent]:
        return self._events

    def addresses(self) -> tuple[str, ...]:
        if self._listening is None:
            return ()
        hosts, port = self._listening
        found = dialable_hosts(hosts, include_loopback=self._settings.include_loopback)
        return tuple(format_address(host, port) for host in found)

    def peers(self) -> frozenset[NodeId]:
        return frozenset(self._connected)

    def peer_host(self, peer: NodeId) -> str | None:
        link = self._newest_link(peer)
        return link.tcp.host if link else None

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            peers=len(self._connected),
            calls_sent=self._calls_sent,
            calls_served=self._server.served,
            calls_failed=self._calls_failed,
            gossip_sent=self._gossip_sent,
            gossip_received=self._gossip_received,
            gossip_dropped=self._gossip_dropped,
            gossip_bytes_sent=self._gossip_bytes_sent,
            strangers_refused=self._connections.strangers_refused,
        )

    # --- running --------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve until cancelled.

        Raises:
            BadInput: the port is in use.
        """
        _quieten_library()
        listeners = await open_listeners(self._settings.listen_host, self._settings.listen_port)
        try:
            await self._serve(listeners, task_status)
        except* Exception:
            # The library's services may fail while they are being torn down; that is no news. Else it is.
            if trio.current_effective_deadline() > -float("inf"):
                raise
            log.debug("while stopping", exc_info=True)
        finally:
            self._nursery = None
            self._listening = None
            self._connected.clear()  # no events: whoever read them is being stopped too
            self._lines.clear()
            self._pubsub.seen_messages.stop()  # a thread
            for listener in listeners:
                await trio.aclose_forcefully(listener)

    async def _serve(self, listeners: Sequence[trio.SocketListener], task_status: TaskStatus[None]) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._host.run([]))  # no address: `connections` listens
            await stack.enter_async_context(background_trio_service(self._pubsub))
            await stack.enter_async_context(background_trio_service(self._router))
            await self._pubsub.wait_until_ready()
            subscription = await self._pubsub.subscribe(self._topic)
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    self._listening = listening_on(listeners)
                    nursery.start_soon(self._receive_gossip, subscription)
                    task_status.started()
                    await trio.serve_listeners(self._connections.accept, list(listeners))
            finally:
                # While the services still run: they are what cleans up after a connection.
                with trio.move_on_after(2, shield=True):
                    await self._connections.close_all()

    # --- connections ----------------------------------------------------------------------------

    async def dial(self, address: str, expected: NodeId | None, timeout_seconds: float) -> NodeId:
        """Connect to `host:port`; who is connected already is not dialled again.

        Raises:
            BadInput: `address` is not one.
            PeerLost: nobody is there, or not `expected`, or a node of another mesh, or this node itself.
            DeadlineExceeded: not done in time.
        """
        host, port = parse_address(address)
        expected_id = peer_id_of(expected) if expected is not None else None
        if expected is not None and expected in self._connected:
            return expected
        nursery = self._running()
        with trio.move_on_after(timeout_seconds):
            link = await self._connections.dial(host, port, expected_id)
            nursery.start_soon(self._connections.watch, link)
            return node_id_of(link.peer)
        raise DeadlineExceeded(
            f"{address} did not answer in {timeout_seconds:g} s",
            do="check that an agent runs there and no firewall is between",
        )

    def _running(self) -> trio.Nursery:
        if self._nursery is None:
            raise PeerLost("this node's network is not up", do="wait until it is")
        return self._nursery

    def _newest_link(self, peer: NodeId) -> Link | None:
        if peer not in self._connected:
            return None
        links = self._connections.of(peer_id_of(peer))
        return links[-1] if links else None

    async def connection_opened(self, conn: INetConn) -> None:
        """The swarm's word. Waits only if nobody reads events."""
        peer = node_id_of(conn.muxed_conn.peer_id)
        if conn.is_closed:
            return
        known = self._connected.setdefault(peer, set())
        known.add(conn)
        if len(known) == 1:
            await self._tell(PeerConnected(peer))

    async def connection_closed(self, conn: INetConn) -> None:
        peer = node_id_of(conn.muxed_conn.peer_id)
        known = self._connected.get(peer)
        if known is None or conn not in known:
            return
        known.discard(conn)
        if not known:
            del self._connected[peer]
            self._lines.pop(peer, None)
            await self._tell(PeerDisconnected(peer))

    def _key_copied(self, host: str, port: int) -> None:
        address = format_address(host, port)
        if address not in self._copies and len(self._copies) < COPIES_TOLD:
            self._copies.add(address)
            try:
                self._send_event.send_nowait(KeyCopied(address))
            except trio.WouldBlock:
                self._copies.discard(address)  # the next time, then

    async def _tell(self, event: PeerConnected | PeerDisconnected) -> None:
        try:
            self._send_event.send_nowait(event)
        except trio.WouldBlock:
            await self._send_event.send(event)

    # --- calls ----------------------------------------------------------------------------------

    async def call(self, peer: NodeId, method: str, payload: bytes, timeout_seconds: float) -> bytes:
        """The answer of `peer`'s handler of `method`.

        Raises:
            BadInput: the request is too large.
            PeerLost: not connected, or not any more.
            DeadlineExceeded: no answer in time.
            MeshinferError: what the handler raised.
        """
        check_request(method, payload)
        self._calls_sent += 1
        answered = False
        try:
            with trio.move_on_after(timeout_seconds):
                line = await self._line_to(peer)
                answer = await line.call(method, payload)
                answered = True
                return answer
        finally:
            self._calls_failed += not answered
        raise DeadlineExceeded(
            f"{method} on {peer} did not end in {timeout_seconds:g} s", do="use another node, or wait longer"
        )

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    async def _line_to(self, peer: NodeId) -> CallLine:
        link = self._newest_link(peer)
        if link is None:
            await trio.lowlevel.checkpoint()
            raise PeerLost(f"not connected to {peer}", do="use another node")
        opening = self._lines.get(peer)
        if (
            opening is None
            or opening.error
            or (opening.line and opening.line.ended)
            or opening.link.tcp is not link.tcp
        ):
            if opening is not None and opening.line is not None:
                opening.line.retire()
            opening = self._lines[peer] = _Opening(link)
            self._running().start_soon(self._carry_calls, peer, opening)
        await opening.done.wait()
        if opening.line is None:
            raise opening.error or PeerLost(f"the connection to {peer} is gone", do="use another node")
        return opening.line

    async def _carry_calls(self, peer: NodeId, opening: _Opening) -> None:
        """Opens a line to `peer` and carries its frames, from the first call until the line ends."""
        stream: INetStream | None = None
        try:
            with trio.move_on_after(OPEN_STREAM_SECONDS):
                stream = await opening.link.swarm_conn.new_stream()
                await self._host.multiselect_client.select_one_of(
                    [CALLS], MultiselectCommunicator(stream), OPEN_STREAM_SECONDS
                )
                acknowledge_seldom(stream)
                opening.line = CallLine(peer, stream)
            if opening.line is None:
                # A write was cut off, so nothing that follows on this connection can be decrypted.
                opening.error = PeerLost(f"{peer} opened no stream in {OPEN_STREAM_SECONDS} s", do="use another node")
                await self._connections.close(opening.link)
            else:
                opening.done.set()
                await opening.line.run()
        except ProtocolNotSupportedError:
            opening.error = Refused(f"{peer} does not know {CALLS}", do="update the older of the two nodes")
        except Exception as error:  # noqa: BLE001 - whatever broke, the line is lost and the next call opens another
            log.debug("no calls to %s: %r", peer, error)
            opening.error = PeerLost(f"the connection to {peer} is gone", do="use another node")
        finally:
            opening.done.set()
            if stream is not None:
                await reset(stream)

    async def _serve_calls(self, stream: INetStream) -> None:
        """Errors rise to the hardened stream handler, which resets the stream."""
        peer = node_id_of(stream.muxed_conn.peer_id)
        await self._server.serve_stream(peer, stream, self._running())

    # --- gossip ---------------------------------------------------------------------------------

    async def publish(self, payload: bytes) -> None:
        """Best effort. Raises BadInput if it is too large."""
        if len(payload) > MAX_GOSSIP_BYTES:
            raise BadInput(f"gossip of {len(payload)} bytes", expected=f"at most {MAX_GOSSIP_BYTES}")
        await trio.lowlevel.checkpoint()
        if self._nursery is not None:
            self._gossip_sent += 1
            self._gossip_bytes_sent += len(payload)
            await self._pubsub.publish(self._topic, payload)

    async def _receive_gossip(self, subscription: object) -> None:
        async for event in received(subscription, self._node_id):  # pyright: ignore[reportArgumentType]
            if self._events.statistics().current_buffer_used >= GOSSIP_EVENTS:
                self._gossip_dropped += 1
                continue
            self._gossip_received += 1
            self._send_event.send_nowait(event)

    # --- signatures -----------------------------------------------------------------------------

    def sign(self, payload: bytes) -> bytes:
        return sign_with(self._keys, payload)

    def verify(self, author: NodeId, payload: bytes, signature: bytes) -> bool:
        return is_signed_by(author, payload, signature)


class _Notifee(INotifee):
    """libp2p's word for a listener to connection events; four of the six do not concern us."""

    def __init__(self, transport: Libp2pTransport) -> None:
        self._transport = transport

    async def connected(self, network: INetwork, conn: INetConn) -> None:  # noqa: ARG002
        await self._transport.connection_opened(conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:  # noqa: ARG002
        await self._transport.connection_closed(conn)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def _make_swarm(keys: KeyPair, own_id: ID, admission: Admission) -> Swarm:
    peerstore = PeerStore()
    peerstore.add_key_pair(own_id, keys)
    return Swarm(
        own_id,
        peerstore,
        admission,
        transports=[],  # it never dials or listens; `connections` does
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            # Ours is 3, enforced in `connections`; the library's trimming spares the oldest and closes the newest.
            max_connections_per_peer=1_000_000,
        ),
    )


def _quieten_library() -> None:
    """libp2p logs each peer that hangs up as an error, some with tracebacks; what matters of it we say ourselves."""
    if "LIBP2P_DEBUG" not in os.environ:  # the library's own switch
        # Some of its modules set a level of their own, which one on their parent would not reach.
        for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "libp2p"]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
