"""Finds agents on the same network without configuration: multicast DNS, as printers do it.

Each agent registers one service of type `_meshinfer._tcp.local.`, named by its node id; TXT says to
which mesh it belongs. python-zeroconf does the protocol, in threads of its own, so that neither its
start nor its end holds up the trio loop. Two things are not its defaults:

- It skips probing for a name conflict (`cooperating_responders`). Our instance name is the hash of a
  public key, so there is none; and probing would take 1.3 s of the 2 s in which agents are to find
  each other (measured on loopback and on a bare veth: 1.3 to 1.5 s with it, 0.5 s without).
- It is given the interfaces one by one: exactly the hosts that the transport says it can be dialled
  at. That needs no default route and no name server, and leaves out bridges to containers. They are
  looked at again every few seconds, and when they have changed the responder is made anew, which
  announces this node on the new network.

Whatever is heard is anyone's word, and only a hint whom to dial: checked, bounded, never resolved
any further. The handshake decides who is who. Of another mesh, a person is told once.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio
from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from meshinfer.base.beats import sleep_to_beat
from meshinfer.base.ids import NodeId
from meshinfer.mesh.addresses import ip_of, is_node_id, worth_dialling
from meshinfer.transport.addresses import format_address, parse_address

log = logging.getLogger(__name__)

SERVICE = "_meshinfer._tcp.local."
RECHECK_SECONDS = 5.0
"""How often interfaces are looked at. Listing them takes 0.1 ms."""
RESOLVE_MILLISECONDS = 500
"""Records of a service usually come in one packet; else they are asked for. One that answers nothing holds up the
others for this long."""
CLOSE_SECONDS = 2.0
"""Saying goodbye takes 0.5 s."""
ADDRESSES_PER_NODE = 16
WAITING_HINTS = 256
"""Between the listening thread and the loop; the oldest give way."""
MAX_OTHER_MESHES = 64
MAX_TEXT = 64


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A node of this mesh says that it is here."""

    node_id: NodeId
    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnotherMesh:
    """Agents of another mesh are on this network."""

    mesh_id: str
    node_id: NodeId
    name: str

    @property
    def message(self) -> str:
        return (
            f"another mesh ({self.mesh_id}, node {self.name}) is nearby; "
            f"run `meshinfer join CODE` with the code that `meshinfer invite` prints there"
        )


Hint = PeerSeen | AnotherMesh


@dataclass(frozen=True, slots=True)
class Self:
    """What an agent announces of itself."""

    node_id: NodeId
    mesh_id: str
    """Not secret: a digest of the mesh key, or the name of an open mesh."""
    name: str
    version: str
    start: str = field(default_factory=lambda: secrets.token_hex(4))
    """Drawn at each start of the process."""


def read_hint(own: Self, texts: dict[str, str], addresses: Iterable[str]) -> Hint | None:
    """What a service record tells; None if nothing that we can use. Pure, and total over anyone's bytes.

    Our own record comes back to us, known by its `start`. Another with our id is an earlier start's, or that of an
    agent with a copy of our key; it passes as a hint like any.

    Args:
        own: this node.
        texts: its TXT record.
        addresses: `IP:port`, from its A, AAAA and SRV records.
    """
    node_id, mesh_id = texts.get("node", ""), texts.get("mesh", "")
    if not is_node_id(node_id) or not _is_plain(mesh_id):
        return None
    name = texts.get("name", "")
    name = name if _is_plain(name) else node_id[-8:]
    if node_id == own.node_id and (mesh_id != own.mesh_id or texts.get("start", "").startswith(own.start)):
        return None  # or from before this node joined this mesh
    if mesh_id != own.mesh_id:
        return AnotherMesh(mesh_id, NodeId(node_id), name)
    found = worth_dialling(addresses, ADDRESSES_PER_NODE)
    return PeerSeen(NodeId(node_id), name, found) if found else None


def _is_plain(text: str) -> bool:
    """Fit to be shown on a terminal: printable, short, not empty."""
    return 0 < len(text) <= MAX_TEXT and text.isprintable()


@dataclass(eq=False)
class Discovery:
    """The driver: announces this node, and hands what it hears to `on_hint`, in the trio thread."""

    own: Self
    addresses: Callable[[], tuple[str, ...]]
    """Where this node can be dialled now."""
    on_hint: Callable[[Hint], None]
    _hints: deque[Hint] = field(default_factory=lambda: deque(maxlen=WAITING_HINTS))
    _other_meshes: set[str] = field(default_factory=set[str])

    async def run(self) -> None:
        """Announce and listen until cancelled."""
        token = trio.lowlevel.current_trio_token()
        responder: _Responder | None = None
        announced: tuple[str, ...] = ()
        complaint = ""
        try:
            while True:
                addresses = tuple(address for address in self.addresses() if ip_of(address) is not None)
                if addresses != announced or complaint:
                    announced = addresses
                    await _close(responder)
                    responder = _Responder(self.own, addresses, lambda hint: self._hand_over(token, hint))
                    said, complaint = complaint, await trio.to_thread.run_sync(responder.open)
                    if complaint and complaint != said:
                        log.warning("discovery: %s; looking again every %g s", complaint, RECHECK_SECONDS)
                await sleep_to_beat(RECHECK_SECONDS)
        finally:
            with trio.move_on_after(CLOSE_SECONDS + 1, shield=True):
                await _close(responder)

    def _hand_over(self, token: trio.lowlevel.TrioToken, hint: Hint) -> None:
        """In a thread of zeroconf's."""
        self._hints.append(hint)
        try:
            token.run_sync_soon(self._deliver, idempotent=True)
        except trio.RunFinishedError:
            return

    def _deliver(self) -> None:
        while self._hints:
            hint = self._hints.popleft()
            if isinstance(hint, AnotherMesh):
                if hint.mesh_id in self._other_meshes or len(self._other_meshes) >= MAX_OTHER_MESHES:
                    continue
                self._other_meshes.add(hint.mesh_id)
            self.on_hint(hint)


class _Responder:
    """One life of zeroconf, on a fixed set of interfaces. Every method blocks: call it in a thread."""

    def __init__(self, own: Self, addresses: tuple[str, ...], on_hint: Callable[[Hint], None]) -> None:
        self._own, self._addresses, self._on_hint = own, addresses, on_hint
        self._zeroconf: Zeroconf | None = None
        self._closing = threading.Event()

    def open(self) -> str:
        """Announce and listen. Empty if all went well, else what is wrong; nothing is left open then."""
        hosts = [parse_address(address)[0] for address in self._addresses]
        interfaces = [host for host in hosts if ":" not in host]
        if not interfaces:
            return "no network interface with an IPv4 address"
        # A node has one port; SRV has room for one.
        port = parse_address(self._addresses[0])[1]
        service = ServiceInfo(
            SERVICE,
            f"{self._own.node_id}.{SERVICE}",
            port=port,
            parsed_addresses=hosts,
            server=f"{self._own.node_id}.local.",
            properties={
                "v": "1",
                "mesh": self._own.mesh_id[:MAX_TEXT],
                "node": self._own.node_id,
                "name": self._own.name[:MAX_TEXT],
                "version": self._own.version[:MAX_TEXT],
                # Others' caches take an unchanged record for no news; a restarted node wants to be dialled.
                "start": self._own.start + secrets.token_hex(4),
            },
        )
        zeroconf = None
        try:
            zeroconf = Zeroconf(interfaces=interfaces, ip_version=IPVersion.V4Only)
            zeroconf.register_service(service, cooperating_responders=True)
            ServiceBrowser(zeroconf, SERVICE, handlers=[self._on_change])
        except Exception as error:  # noqa: BLE001 - OSError and a dozen of zeroconf's own; without it the mesh lives on
            if zeroconf is not None:
                zeroconf.close()
            return f"multicast DNS on {', '.join(interfaces)} failed: {error!r}"
        self._zeroconf = zeroconf
        return ""

    def close(self) -> None:
        self._closing.set()
        if self._zeroconf is not None:
            self._zeroconf.close()

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """In the browser's thread. Records that are gone mean nothing: membership knows better who is."""
        if state_change is ServiceStateChange.Removed or self._closing.is_set():
            return
        try:
            service = ServiceInfo(service_type, name)
            if not service.load_from_cache(zeroconf):
                service.request(zeroconf, RESOLVE_MILLISECONDS)
            texts = {key: value for key, value in service.decoded_properties.items() if value is not None}
            port = service.port or 0
            addresses = [format_address(host, port) for host in service.parsed_addresses()]
        except Exception as error:  # noqa: BLE001 - garbage from the network, or closing now; neither may end the thread
            log.debug("service %.80r: %s", name, error)
            return
        hint = read_hint(self._own, texts, addresses)
        if hint is not None:
            self._on_hint(hint)


async def _close(responder: _Responder | None) -> None:
    """Say goodbye, in a thread; one that hangs is left to end with the process."""
    if responder is not None:
        with trio.move_on_after(CLOSE_SECONDS):
            await trio.to_thread.run_sync(responder.close, abandon_on_cancel=True)
