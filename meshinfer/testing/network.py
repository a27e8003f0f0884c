"""A network in one process: many `Transport`s, on trio's clock, with faults on request.

It is the second implementation of `transport.base.Transport`, and passes the same conformance
suite as the real one. On `trio.testing.MockClock(autojump_threshold=0)` a minute of thirty nodes
takes seconds; chance comes from the `rng` given, so a run inside a Hypothesis test replays.

What it models, and how:
- A *connection* is one per pair, whoever dialled. Duplicate dials succeed and change nothing.
- *Latency* is per link and direction; a call crosses its link twice, gossip once per hop. Gossip
  floods along connections, as gossipsub does; with `gossip_loss` each delivery may be lost.
- `cut(a, b)` lets nothing pass from a to b: connections stay open and silent, as cables do. Calls
  wait for the cut to heal (TCP sends again) or for their deadline; gossip is lost.
- `block_channels(a, b)`: the same for runners' channels alone, as a firewall does it that knows the agents.
- `stop(n)` is SIGSTOP as others see it: sockets stay open, nothing answers, nothing leaves. Its own
  tasks do go on, since nothing can freeze a part of one process, but all they hear is silence.
- `copy_key(n, address)`: another process with n's identity key listens there; it says so to n, and to nobody else.
- `kill(n)` is kill -9: its connections break, whatever it still says in its `finally` blocks goes
  nowhere, and everything that runs inside `transport.process` is cancelled. `add` the same name again
  for the restart: same node id, nothing remembered.

What it does not model: bandwidth, address translation, half-open sockets, a slow reader.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field

import trio
from trio import TaskStatus

from meshinfer.base.errors import BadInput, DeadlineExceeded, MeshinferError, PeerLost, ProtocolError, Refused
from meshinfer.base.ids import NodeId
from meshinfer.testing.clocks import shared_time
from meshinfer.transport.base import (
    MAX_CALL_BYTES,
    MAX_GOSSIP_BYTES,
    GossipReceived,
    Handler,
    KeyCopied,
    PeerConnected,
    PeerDisconnected,
    TransportEvent,
    TransportStatistics,
)

log = logging.getLogger(__name__)

# Gossip waits here for a reader that is busy; more would be stale when read. Connection events have room
# beyond it, for they must not be lost: four for each of 300 peers, libp2p's own limit.
GOSSIP_QUEUE = 256
EVENT_QUEUE = GOSSIP_QUEUE + 1200
HANDLERS_PER_PEER = 16
GOSSIP = "gossip"
"""Its kind, where traffic is counted."""


@dataclass(eq=False)
class _Call:
    """One call under way, as its caller waits for it."""

    done: trio.Event = field(default_factory=trio.Event)
    answer: bytes = b""
    error: MeshinferError | None = None

    def settle(self, answer: bytes, error: MeshinferError | None) -> None:
        if not self.done.is_set():
            self.answer, self.error = answer, error
            self.done.set()


@dataclass(eq=False)
class _Connection:
    ends: dict[NodeId, str]
    """Each end with the host under which the other reached it."""
    calls: set[_Call] = field(default_factory=set[_Call])
    """All and only calls that cross it now."""
    lost: bool = False


class SimNetwork:
    """The wires between `SimTransport`s."""

    def __init__(
        self, rng: random.Random | None = None, latency_seconds: float = 0.001, gossip_loss: float = 0.0
    ) -> None:
        self.rng = rng or random.Random(0)  # noqa: S311 - a simulation replays
        self.gossip_loss = gossip_loss
        """Share of gossip deliveries that are lost. Raising it makes views wait for the next period or a pull."""
        self.received_bytes: Counter[tuple[NodeId, str]] = Counter()
        """Payloads that arrived, by node and kind: a call's method (requests and answers), or `GOSSIP`, each message
        once, without the copies that a real overlay makes."""
        self.received_messages: Counter[tuple[NodeId, str]] = Counter()
        self.failures: list[Exception] = []
        """Errors in handlers that were no MeshinferError: bugs, for a test to look at."""
        self.tell: Callable[[str], None] = lambda _: None
        """Called for everything that arrives."""
        self.latency_seconds = latency_seconds
        """Of every pair, one way."""
        self._secret = self.rng.randbytes(32)
        self._listeners: dict[str, SimTransport] = {}
        self._running: dict[NodeId, SimTransport] = {}
        self._connections: dict[frozenset[NodeId], _Connection] = {}
        self._cuts: set[tuple[NodeId, NodeId]] = set()
        self._blocked: set[tuple[NodeId, NodeId]] = set()
        """Nothing of a channel passes from the first to the second."""
        self._stopped: set[NodeId] = set()
        self._copies: dict[str, NodeId] = {}
        """Addresses at which other processes hold a node's key."""
        self._held = trio.lowlevel.ParkingLot()
        self._made = 0

    # --- building -------------------------------------------------------------------------------

    def add(self, name: str, addresses: Iterable[str] = (), mesh: str = "mesh") -> SimTransport:
        """A transport for node `name`: a new node, or the next life of one that is no longer running.

        Nodes of different `mesh` refuse each other. Without `addresses` it gets one of its own.
        """
        self._made += 1
        own = tuple(addresses) or (f"10.{self._made >> 16}.{self._made >> 8 & 255}.{self._made & 255}:7000",)
        return SimTransport(self, NodeId(name), own, mesh)

    # --- faults ---------------------------------------------------------------------------------

    def cut(self, sources: Iterable[NodeId], targets: Iterable[NodeId], *, one_way: bool = False) -> None:
        """Nothing passes from any of `sources` to any of `targets`, nor back unless `one_way`."""
        for source in sources:
            for target in targets:
                self._cuts.add((source, target))
                if not one_way:
                    self._cuts.add((target, source))

    def block_channels(self, sources: Iterable[NodeId], targets: Iterable[NodeId]) -> None:
        """Between any of both nothing of a runner's channels passes, either way; agents notice nothing."""
        pairs = {(source, target) for source in sources for target in targets}
        self._blocked |= pairs | {(target, source) for source, target in pairs}

    def heal(self) -> None:
        """Every cut is mended, and no channel is blocked; what waited passes now."""
        self._cuts.clear()
        self._blocked.clear()
        self._held.unpark_all()

    def disconnect(self, one: NodeId, other: NodeId) -> None:
        """The connection between the two breaks, and both see it; nothing hinders a new one."""
        self._drop(frozenset((one, other)))

    def stop(self, node: NodeId) -> None:
        self._stopped.add(node)

    def resume(self, node: NodeId) -> None:
        self._stopped.discard(node)
        self._held.unpark_all()

    def copy_key(self, node: NodeId, address: str) -> None:
        self._copies[address] = node

    def kill(self, node: NodeId) -> None:
        transport = self._running.get(node)
        if transport is not None:
            self.detach(transport)
            transport.process.cancel()

    # --- what transports ask --------------------------------------------------------------------

    def passes(self, source: NodeId, target: NodeId, *, channel: bool = False) -> bool:
        """Whether something sent now gets from `source` to `target`, on a `channel` if that is said."""
        is_cut = (source, target) in self._cuts or (channel and (source, target) in self._blocked)
        return not is_cut and not {source, target} & self._stopped

    async def carry(self, source: NodeId, target: NodeId, *, channel: bool = False) -> None:
        """One message's way: the latency, and however long a cut or a stop holds it up."""
        await trio.sleep(self.latency_seconds)
        await self.clear(source, target, channel=channel)

    async def clear(self, source: NodeId, target: NodeId, *, channel: bool = False) -> None:
        """Wait until something gets from `source` to `target`."""
        while not self.passes(source, target, channel=channel):
            await self._held.park()

    def arrived(self, node: NodeId, kind: str, payload: bytes) -> None:
        self.tell(f"{shared_time()!r} {node} gets {kind} {payload!r}")
        self.received_bytes[node, kind] += len(payload)
        self.received_messages[node, kind] += 1

    def seal(self, author: NodeId, payload: bytes) -> bytes:
        return hmac.digest(self._secret, author.encode(errors="surrogatepass") + b"\0" + payload, hashlib.sha256)

    def attach(self, transport: SimTransport) -> None:
        if transport.node_id in self._running:
            raise BadInput(f"node {transport.node_id} is running already", do="kill it first")
        for address in transport.addresses():
            if address in self._listeners:
                raise BadInput(f"{address} is in use", do="choose another port")
        self._running[transport.node_id] = transport
        self._listeners.update(dict.fromkeys(transport.addresses(), transport))

    def detach(self, transport: SimTransport) -> None:
        """The process is gone: no listener, no connection. Repeating it is harmless."""
        if self._running.get(transport.node_id) is not transport:
            return
        del self._running[transport.node_id]
        for address in transport.addresses():
            self._listeners.pop(address, None)
        self._stopped.discard(transport.node_id)
        for pair in [pair for pair in self._connections if transport.node_id in pair]:
            self._drop(pair)
        self._held.unpark_all()

    def has_copy_of(self, node: NodeId, address: str) -> bool:
        return self._copies.get(address) == node

    def listener(self, address: str) -> SimTransport | None:
        return self._listeners.get(address)

    def running(self, node: NodeId) -> SimTransport | None:
        return self._running.get(node)

    def connection(self, one: NodeId, other: NodeId) -> _Connection | None:
        return self._connections.get(frozenset((one, other)))

    def neighbours(self, node: NodeId) -> frozenset[NodeId]:
        return frozenset(end for pair in self._connections if node in pair for end in pair if end != node)

    def connect(self, dialler: SimTransport, acceptor: SimTransport, dialled_host: str) -> None:
        pair = frozenset((dialler.node_id, acceptor.node_id))
        if pair in self._connections:
            return
        own_host = dialler.addresses()[0].rpartition(":")[0]
        self._connections[pair] = _Connection({dialler.node_id: own_host, acceptor.node_id: dialled_host})
        dialler.deliver(PeerConnected(acceptor.node_id))
        acceptor.deliver(PeerConnected(dialler.node_id))

    def flood(self, author: NodeId, payload: bytes) -> None:
        """Along every open connection, each node once, by the fewest hops."""
        neighbours: dict[NodeId, list[NodeId]] = defaultdict(list)
        for one, other in map(sorted, self._connections):
            neighbours[one].append(other)
            neighbours[other].append(one)
        delays = {author: 0.0}
        waiting = deque([author])
        while waiting:
            node = waiting.popleft()
            for neighbour in neighbours[node]:
                if neighbour not in delays and self.passes(node, neighbour):
                    delays[neighbour] = delays[node] + self.latency_seconds
                    waiting.append(neighbour)
        del delays[author]
        for node, delay in delays.items():
            if self.rng.random() >= self.gossip_loss:
                self._running[node].expect_gossip(author, payload, delay)

    def _drop(self, pair: frozenset[NodeId]) -> None:
        connection = self._connections.pop(pair, None)
        if connection is None:
            return
        connection.lost = True
        for call in connection.calls:
            call.settle(b"", PeerLost("the connection broke during the call", do="use another node"))
        for node in pair:
            (peer,) = pair - {node}
            if node in self._running:
                self._running[node].deliver(PeerDisconnected(peer))


class SimTransport:
    """One node's end of a `SimNetwork`."""

    def __init__(self, network: SimNetwork, node_id: NodeId, addresses: tuple[str, ...], mesh: str) -> None:
        self.network = network
        self.process = trio.CancelScope()
        """The simulated process: run the agent inside it, and `SimNetwork.kill` ends it."""
        self._node_id, self._addresses, self._mesh = node_id, addresses, mesh
        self._send_event, self._events = trio.open_memory_channel[TransportEvent](EVENT_QUEUE)
        self._handlers: dict[str, Handler] = {}
        self._slots: dict[NodeId, trio.Semaphore] = defaultdict(lambda: trio.Semaphore(HANDLERS_PER_PEER))
        self._nursery: trio.Nursery | None = None
        self._context = Context()
        """What its process runs in: handlers do so too, whoever calls."""
        self._calls_sent = self._calls_served = self._calls_failed = 0
        self._gossip_sent = self._gossip_received = self._gossip_dropped = self._gossip_bytes_sent = 0
        self._strangers_refused = 0

    # --- the Transport protocol -----------------------------------------------------------------

    @property
    def node_id(self) -> NodeId:
        return self._node_id

    @property
    def events(self) -> trio.MemoryReceiveChannel[TransportEvent]:
        return self._events

    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def peers(self) -> frozenset[NodeId]:
        return self.network.neighbours(self._node_id) if self._is_running else frozenset()

    def peer_host(self, peer: NodeId) -> str | None:
        connection = self.network.connection(self._node_id, peer) if self._is_running else None
        return connection.ends[peer] if connection else None

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.network.attach(self)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery, self._context = nursery, copy_context()
                task_status.started()
                try:
                    await trio.sleep_forever()
                finally:
                    self._nursery = None  # before it closes: what others still send then goes nowhere
        finally:
            self.network.detach(self)

    async def dial(self, address: str, expected: NodeId | None, timeout_seconds: float) -> NodeId:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise BadInput(f"{address[:120]!r} is not an address", expected="host:port")
        acceptor = None
        with trio.move_on_after(timeout_seconds) as scope:
            acceptor = self.network.listener(address)
            if acceptor is None:
                await trio.sleep(self.network.latency_seconds)
            else:
                await self.network.carry(self._node_id, acceptor.node_id)
                await self.network.carry(acceptor.node_id, self._node_id)
                acceptor = self.network.listener(address)
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"{address} did not answer in {timeout_seconds:g} s")
        if self.network.has_copy_of(self._node_id, address):
            self.deliver(KeyCopied(address))
            raise PeerLost(f"another agent runs at {address} with this node's key", do="see this node's log")
        if acceptor is None or not self._is_running:
            raise PeerLost(f"nobody listens on {address}", do="check that an agent runs there")
        if acceptor is self:
            raise PeerLost(f"{address} is this node itself", expected="another node")
        if expected is not None and acceptor.node_id != expected:
            raise PeerLost(f"{address} is node {acceptor.node_id}", expected=f"node {expected}")
        if acceptor._mesh != self._mesh:  # noqa: SLF001 - two of a kind
            acceptor._strangers_refused += 1  # noqa: SLF001
            raise PeerLost(f"{address} is of another mesh", do="join it with its code")
        self.network.connect(self, acceptor, host)
        return acceptor.node_id

    async def call(self, peer: NodeId, method: str, payload: bytes, timeout_seconds: float) -> bytes:
        if len(payload) > MAX_CALL_BYTES:
            raise BadInput(f"a request of {len(payload)} bytes", expected=f"at most {MAX_CALL_BYTES}")
        connection = self.network.connection(self._node_id, peer) if self._is_running else None
        callee = self.network.running(peer)
        if connection is None or callee is None or callee._nursery is None:  # noqa: SLF001
            await trio.lowlevel.checkpoint()
            raise PeerLost(f"not connected to {peer}", do="use another node")
        self._calls_sent += 1
        call = _Call()
        connection.calls.add(call)
        try:
            callee._start(callee._serve, self._node_id, method, payload, call)  # noqa: SLF001
            with trio.move_on_after(timeout_seconds):
                await call.done.wait()
        finally:
            connection.calls.discard(call)
        if not call.done.is_set():
            call.settle(b"", DeadlineExceeded(f"{method} on {peer} did not end in {timeout_seconds:g} s"))
        if call.error is not None:
            self._calls_failed += 1
            raise call.error
        return call.answer

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    async def publish(self, payload: bytes) -> None:
        if len(payload) > MAX_GOSSIP_BYTES:
            raise BadInput(f"gossip of {len(payload)} bytes", expected=f"at most {MAX_GOSSIP_BYTES}")
        await trio.lowlevel.checkpoint()
        if self._is_running:
            self._gossip_sent += 1
            self._gossip_bytes_sent += len(payload)
            self.network.flood(self._node_id, payload)

    def sign(self, payload: bytes) -> bytes:
        return self.network.seal(self._node_id, payload)

    def verify(self, author: NodeId, payload: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.network.seal(author, payload), signature)

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            peers=len(self.peers()),
            calls_sent=self._calls_sent,
            calls_served=self._calls_served,
            calls_failed=self._calls_failed,
            gossip_sent=self._gossip_sent,
            gossip_received=self._gossip_received,
            gossip_dropped=self._gossip_dropped,
            gossip_bytes_sent=self._gossip_bytes_sent,
            strangers_refused=self._strangers_refused,
        )

    # --- what the network does here -------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        return self.network.running(self._node_id) is self

    def deliver(self, event: PeerConnected | PeerDisconnected | KeyCopied) -> None:
        try:
            self._send_event.send_nowait(event)
        except trio.WouldBlock:
            raise AssertionError(f"{EVENT_QUEUE} events wait: nobody reads those of node {self._node_id}") from None

    def expect_gossip(self, author: NodeId, payload: bytes, delay_seconds: float) -> None:
        self._start(self._receive_gossip, author, payload, delay_seconds)

    def _start(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """In its process, by whoever; nothing once that is gone."""
        if self._nursery is not None:
            self._context.copy().run(self._nursery.start_soon, work, *arguments)

    async def _receive_gossip(self, author: NodeId, payload: bytes, delay_seconds: float) -> None:
        await trio.sleep(delay_seconds)
        if self._events.statistics().current_buffer_used >= GOSSIP_QUEUE:
            self._gossip_dropped += 1
            return
        self._gossip_received += 1
        self.network.arrived(self._node_id, GOSSIP, payload)
        self._send_event.send_nowait(GossipReceived(author, payload))

    async def _serve(self, caller: NodeId, method: str, payload: bytes, call: _Call) -> None:
        """The callee's side of one call. A caller that has gone away does not cancel it."""
        await self.network.carry(caller, self._node_id)
        self.network.arrived(self._node_id, method, payload)
        error: MeshinferError | None = None
        answer = b""
        async with self._slots[caller]:
            try:
                answer = await self._answer(caller, method, payload)
            except MeshinferError as raised:
                # As if it had crossed the wire: its class and words, without traceback, context or attributes.
                error = type(raised)(raised.what, expected=raised.expected, do=raised.do)
            except Exception as bug:  # a bug in one handler must not end the node; it is logged and kept for tests
                log.exception("handler of %s failed", method)
                self.network.failures.append(bug)
                error = MeshinferError(f"{method} failed in node {self._node_id}")
        await self.network.carry(self._node_id, caller)
        self.network.arrived(caller, method, answer)
        call.settle(answer, error)

    async def _answer(self, caller: NodeId, method: str, payload: bytes) -> bytes:
        handler = self._handlers.get(method)
        if handler is None:
            raise Refused(f"method {method!r} is not known here", expected=f"one of {', '.join(self._handlers)}")
        self._calls_served += 1
        answer = await handler(caller, payload)
        if len(answer) > MAX_CALL_BYTES:
            raise ProtocolError(f"an answer of {len(answer)} bytes to {method}", expected=f"at most {MAX_CALL_BYTES}")
        return answer
