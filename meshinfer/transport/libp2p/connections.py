"""How a connection comes to be, and how it ends: only members ever meet libp2p's swarm.

We listen and dial ourselves and give the swarm connections that are finished, because of what its
own ways do (0.8.1, measured): it leaks a slot per inbound connection and refuses everyone after
250; it dials one address of a peer and sleeps 250 ms after success; it shares its port silently
with a second agent; it needs the peer's id before it dials; and 260 slow strangers lock honest
peers out. Here:

    TCP → multistream → Noise → membership proof → Yamux → swarm

all within one deadline of 5 s, and until the proof the stranger may send 16 KiB in all. At most 32
connections from one host, and 256 in all, may be on their way at once; one more takes the place of
the oldest, so honest peers, who need 10 ms, come through however many slow ones sit there.

`upgrade_security` of libp2p's own upgrader is replaced by the one that demands the proof, and the
swarm has no transport to dial with, so there is no way around.

Once up, a connection from which nothing came for a while is pinged, and closed when nothing comes
for 2 seconds more: a process that is stopped, or a laptop that is gone, never closes its sockets itself.
Whoever gossips is heard and needs no ping, and a busy peer that sends anything at all is alive. (The
library's own monitor pings always, one connection after another, so that two dead ones delay each
other.) Closing takes the socket first: libp2p's polite way waits for a lock that a stuck writer holds.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import trio
from libp2p.abc import IMuxedConn, IRawConnection, ISecureConn
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.health.ping_probe import ping_connection
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.transport.exceptions import SecurityUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader

from meshinfer.base.errors import BadInput, PeerLost
from meshinfer.transport.membership_proof import NotProved, prove_membership
from meshinfer.transport.mesh_key import MeshKey

log = logging.getLogger(__name__)

UPGRADE_SECONDS = 5.0
"""From the first byte to a member: 10 ms on loopback, 6 round trips. Raising it lets strangers sit longer."""
STRANGER_BYTES = 16 * 1024
"""What may come in before the proof; multistream, Noise and the proof take less than 600 bytes."""
PENDING_PER_HOST, PENDING = 32, 256
CONNECTIONS_PER_PEER = 3
"""Two dial each other at the same moment: two. One more for a new one while an old one is dying."""
SPARE_PATIENCE = 10
"""An older connection beside the one that calls go over is pinged so much more seldom: two nodes that dialled each
other at the same moment keep both."""
LARGEST_READ = 64 * 1024
_LOGGED_STRANGERS = 256
_OWN_HELLO = struct.Struct(">16sH")


class CountedTcp(TrioTCPStream):
    """One TCP connection, with a budget of bytes while its peer is a stranger.

    From a member it reads whatever is there: Noise asks for the length of each message apart, and that was half of all
    reads between idle nodes. Of a stranger nothing is taken in before it is asked for.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.host, self.port = stream.socket.getpeername()[:2]
        self.bytes_read = 0
        self._trusted = False
        self._ahead = bytearray()
        """Read and not asked for yet; less than `LARGEST_READ`."""

    def trust(self) -> None:
        """The peer is a member: no budget any more."""
        self._trusted = True

    async def read(self, n: int | None = None) -> bytes:
        # The library passes lengths that the peer has claimed: 2 GiB, and receive_some would allocate them.
        wanted = min(LARGEST_READ if n is None else n, LARGEST_READ)
        if not self._ahead:
            received = await super().read(LARGEST_READ if self._trusted and wanted else wanted)
            self.bytes_read += len(received)
            if self.bytes_read > STRANGER_BYTES and not self._trusted:
                raise ConnectionClosedError("a stranger sent too much")
            if len(received) <= wanted:
                return received
            self._ahead += received
        taken = bytes(self._ahead[:wanted])
        del self._ahead[:wanted]
        return taken

    def get_remote_address(self) -> tuple[str, int]:
        return self.host, self.port

    async def abort(self) -> None:
        """Closes the socket now. Readers find the end, and libp2p's cleaning up follows by itself."""
        await trio.aclose_forcefully(self.stream)


@dataclass(slots=True)
class Link:
    """A connection to a member."""

    peer: ID
    tcp: CountedTcp
    swarm_conn: SwarmConn


class Admission(TransportUpgrader):
    """libp2p's upgrader, with the membership proof between Noise and everything else."""

    def __init__(
        self,
        *,
        own_id: ID,
        key: MeshKey,
        security: dict,  # pyright: ignore[reportMissingTypeArgument]
        muxers: dict,  # pyright: ignore[reportMissingTypeArgument]
        listening_port: Callable[[], int],
        on_key_copied: Callable[[str, int], None],
    ) -> None:
        """`on_key_copied` is told host and port of another process that holds our identity key."""
        super().__init__(security, muxers)
        self._own_id, self._key = own_id, key
        self._listening_port, self._on_key_copied = listening_port, on_key_copied
        self._start = secrets.token_bytes(16)
        self._logged: set[ID] = set()

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        """Noise, then the proof. As a dialler, `peer_id` None means: whoever is there.

        Raises:
            SecurityUpgradeFailure: not a member, or not `peer_id`; the text says which.
        """
        if is_initiator:
            secure = await self.security_multistream.secure_outbound(raw_conn, peer_id)  # pyright: ignore[reportArgumentType]
        else:
            secure = await self.security_multistream.secure_inbound(raw_conn)
        remote = secure.get_remote_peer()
        if remote == self._own_id:
            raise SecurityUpgradeFailure(await self._who_has_our_key(secure, raw_conn))
        if peer_id is not None and remote != peer_id:
            raise SecurityUpgradeFailure(f"it is node {remote}")
        role: Literal["dialler", "acceptor"] = "dialler" if is_initiator else "acceptor"
        try:
            await prove_membership(secure, self._key, role, self._own_id.to_bytes(), remote.to_bytes())
        except NotProved as refusal:
            self._log_once(remote, raw_conn, refusal)
            raise SecurityUpgradeFailure(str(refusal)) from refusal
        except IOException as error:
            raise SecurityUpgradeFailure("it hung up before it had proved its membership") from error
        return secure

    async def _who_has_our_key(self, secure: ISecureConn, raw_conn: IRawConnection) -> str:
        """The other end is this process, by an address of its own; or another one, with a copy of the key.

        Each says who it is by a number drawn at its start, and where it listens.
        """
        itself = "it is this node itself"
        try:
            await secure.write(_OWN_HELLO.pack(self._start, self._listening_port()))
            received = b""
            while len(received) < _OWN_HELLO.size:
                more = await secure.read(_OWN_HELLO.size - len(received))
                if not more:
                    return itself
                received += more
        except IOException:
            return itself  # gone before it had said
        start, port = _OWN_HELLO.unpack(received)
        if start == self._start:
            return itself
        address = raw_conn.get_remote_address()
        self._on_key_copied(address[0] if address else "", port)
        return "another agent runs there with this node's key"

    def _log_once(self, stranger: ID, raw_conn: IRawConnection, refusal: NotProved) -> None:
        # Bounded: identities cost nothing to make, and neither may our log.
        if stranger not in self._logged and len(self._logged) < _LOGGED_STRANGERS:
            self._logged.add(stranger)
            address = raw_conn.get_remote_address()
            log.warning(
                "refused node %s at %s: %s (mesh %s)",
                stranger,
                address[0] if address else "an unknown address",
                refusal,
                self._key.mesh_id,
            )


class Connections:
    """Makes links of sockets, and watches them until they end."""

    def __init__(
        self, swarm: Swarm, admission: Admission, *, silence_seconds: float, ping_timeout_seconds: float
    ) -> None:
        self._swarm, self._admission = swarm, admission
        self._silence_seconds, self._ping_timeout_seconds = silence_seconds, ping_timeout_seconds
        self._links: dict[IMuxedConn, CountedTcp] = {}
        """All and only connections whose peer has proved its membership, from the proof to the end."""
        self._pending: dict[trio.CancelScope, str] = {}
        """Connections on their way, oldest first, with the host they came from."""
        self.strangers_refused = 0

    def is_member(self, muxed_conn: object) -> bool:
        return muxed_conn in self._links

    def of(self, peer: ID) -> list[Link]:
        """Live links to `peer`, oldest first."""
        return [
            Link(peer, self._links[conn.muxed_conn], conn)
            for conn in self._swarm.get_connections(peer)
            if isinstance(conn, SwarmConn) and not conn.is_closed and conn.muxed_conn in self._links
        ]

    async def accept(self, stream: trio.SocketStream) -> None:
        """One inbound connection, from its first byte to its end. Raises nothing: it concerns a stranger."""
        try:
            tcp = CountedTcp(stream)
        except OSError:
            return  # it is gone already
        muxed_conn: IMuxedConn | None = None
        with self._on_its_way(tcp.host):
            try:
                muxed_conn = await self._upgrade(tcp, is_initiator=False, expected=None)
            except Exception as error:  # noqa: BLE001 - strangers send what they like, and five layers parse it
                log.debug("inbound from %s refused: %r", tcp.host, error)
        if muxed_conn is None:
            self.strangers_refused += 1
            await tcp.abort()
            return
        link = await self._register(muxed_conn, tcp, "inbound")
        if link is not None:
            await self.watch(link)

    async def dial(self, host: str, port: int, expected: ID | None) -> Link:
        """A new link to who listens there; the caller sets the deadline and must see to `watch`.

        Raises:
            PeerLost: nobody is there, or not who was expected, or no member.
        """
        try:
            stream = await trio.open_tcp_stream(host, port)
            try:
                tcp = CountedTcp(stream)
            except OSError:  # it hung up as soon as it had answered
                await trio.aclose_forcefully(stream)
                raise
        except OSError as error:
            raise PeerLost(
                f"nobody answers at {host}:{port}: {error}",
                do="check that an agent runs there and no firewall is between",
            ) from error
        try:
            muxed_conn = await self._upgrade(tcp, is_initiator=True, expected=expected)
        except BaseException as error:
            await tcp.abort()
            if isinstance(error, Exception):
                raise PeerLost(
                    f"no member of this mesh at {host}:{port}: {error or type(error).__name__}",
                    expected=f"node {expected}" if expected else "a node that knows this mesh's key",
                ) from error
            raise
        link = await self._register(muxed_conn, tcp, "outbound")
        if link is None:
            raise PeerLost(f"{host}:{port} closed the connection as soon as it was open", do="try again")
        return link

    async def watch(self, link: Link) -> None:
        """Listens for `link` until it ends or stays silent; then nothing of it is left."""
        conn = link.swarm_conn
        try:
            while not conn.is_closed:
                heard = link.tcp.bytes_read
                is_newest = self.of(link.peer)[-1:] == [link]
                with trio.move_on_after(self._silence_seconds * (1 if is_newest else SPARE_PATIENCE)):
                    await conn.event_closed.wait()
                if link.tcp.bytes_read > heard or conn.is_closed:
                    continue
                await ping_connection(conn, ping_timeout=self._ping_timeout_seconds)
                if link.tcp.bytes_read == heard and not conn.is_closed:
                    log.info("node %s does not answer: connection closed", link.peer)
                    break
        finally:
            await self.close(link)

    async def close(self, link: Link) -> None:
        """Ends a link, now, whatever it is busy with."""
        with trio.move_on_after(1, shield=True):
            await link.tcp.abort()
            await link.swarm_conn.close()
        self._links.pop(link.swarm_conn.muxed_conn, None)

    async def close_all(self) -> None:
        async with trio.open_nursery() as nursery:
            for peer in list(self._swarm.connections):
                for link in self.of(peer):
                    nursery.start_soon(self.close, link)

    async def _upgrade(self, tcp: CountedTcp, *, is_initiator: bool, expected: ID | None) -> IMuxedConn:
        with trio.fail_after(UPGRADE_SECONDS):
            raw_conn = RawConnection(tcp, is_initiator)
            secure = await self._admission.upgrade_security(raw_conn, is_initiator, expected)
            tcp.trust()
            return await self._admission.upgrade_connection(secure, secure.get_remote_peer())

    async def _register(
        self, muxed_conn: IMuxedConn, tcp: CountedTcp, direction: Literal["inbound", "outbound"]
    ) -> Link | None:
        """Hands the connection to the swarm, which tells everybody that it is there."""
        self._links[muxed_conn] = tcp
        conn: SwarmConn | None = None
        # Not cut off halfway by a caller's deadline: the swarm would keep half a connection.
        with trio.move_on_after(UPGRADE_SECONDS, shield=True):
            try:
                conn = await self._swarm.add_conn(muxed_conn, direction)
            except Exception as error:  # noqa: BLE001 - the peer went away while it was being registered
                log.debug("%s connection to %s lost at once: %r", direction, muxed_conn.peer_id, error)
        if conn is None:
            self._links.pop(muxed_conn, None)
            await tcp.abort()
            return None
        link = Link(muxed_conn.peer_id, tcp, conn)
        for surplus in self.of(link.peer)[:-CONNECTIONS_PER_PEER]:
            await self.close(surplus)
        return link

    @contextmanager
    def _on_its_way(self, host: str) -> Generator[None]:
        pending = [(scope, other) for scope, other in self._pending.items() if not scope.cancel_called]
        same_host = [scope for scope, other in pending if other == host]
        if len(same_host) >= PENDING_PER_HOST:
            same_host[0].cancel()
        elif len(pending) >= PENDING:
            pending[0][0].cancel()
        with trio.CancelScope() as scope:
            self._pending[scope] = host
            try:
                yield
            finally:
                del self._pending[scope]


async def open_listeners(host: str, port: int) -> Sequence[trio.SocketListener]:
    """Sockets that listen on `host`; for 0.0.0.0, on every interface and over IPv6 too, with the same port.

    Raises:
        BadInput: the port is in use, or the host is none of this machine.
    """
    try:
        listeners = list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        raise BadInput(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            expected="an address of this machine with a free port",
            do="stop what uses that port, or choose another; port 0 takes any free one",
        ) from error
    if host == "0.0.0.0":  # noqa: S104 - only recognised here
        bound_port = listeners[0].socket.getsockname()[1]
        try:
            listeners += await trio.open_tcp_listeners(bound_port, host="::")
        except OSError as error:
            log.debug("not listening over IPv6: %s", error)
    return listeners


def listening_on(listeners: Sequence[trio.SocketListener]) -> tuple[tuple[str, ...], int]:
    """Hosts and the one port."""
    names = [listener.socket.getsockname() for listener in listeners]
    return tuple(name[0] for name in names), int(names[0][1])
