"""What the rest of the agent may assume of the network between agents.

Two implementations: `transport.libp2p` and the simulated `testing.network.SimNetwork`; one
conformance suite runs against both. Everything here is for the control plane (small messages);
activations have channels of their own.

What a caller may assume:
- A peer that is `connected` has proved its node id and its knowledge of the mesh key.
- `call` ends by its deadline: with the answer, with the error that the peer's handler raised, or
  with `PeerLost` / `DeadlineExceeded`. A cancelled call harms nothing else.
- `publish` is best effort: messages may be lost, repeated or reordered.
- Events are delivered in order of happening, and `PeerDisconnected` comes once all connections
  to that peer are gone.
What it may not: that a connected peer makes progress (a stopped process keeps its sockets open).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import trio
from trio import TaskStatus

from meshinfer.base.ids import NodeId

MAX_CALL_BYTES = 256 * 1024
"""A call's request or answer. libp2p carries less than 1 MiB a message; control messages are small."""
MAX_GOSSIP_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: NodeId


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    peer: NodeId


@dataclass(frozen=True, slots=True)
class GossipReceived:
    author: NodeId
    """Who published it (proved by signature), not who forwarded it."""
    payload: bytes


@dataclass(frozen=True, slots=True)
class KeyCopied:
    """Another process has proved that it holds this node's own identity key. Told once for each address."""

    address: str
    """`host:port` where it listens, as far as we know."""


TransportEvent = PeerConnected | PeerDisconnected | GossipReceived | KeyCopied
Call = Callable[[NodeId, str, bytes, float], Awaitable[bytes]]
"""`Transport.call`, or what does more for its caller (`mesh.Mesh.call`)."""
Handler = Callable[[NodeId, bytes], Awaitable[bytes]]
"""Gets the calling peer and the request; returns the answer, or raises a MeshinferError that the caller will see."""


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    peers: int
    calls_sent: int
    calls_served: int
    calls_failed: int
    gossip_sent: int
    gossip_received: int
    gossip_dropped: int
    gossip_bytes_sent: int
    strangers_refused: int


class Transport(Protocol):
    """The network as the agent sees it."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def events(self) -> trio.MemoryReceiveChannel[TransportEvent]:
        """The one stream of events; a single reader. Bounded: gossip is dropped (and counted) when it is full."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Where peers can dial this node now: `host:port` for each usable interface, never a wildcard."""
        ...

    def peers(self) -> frozenset[NodeId]:
        """Those connected now."""
        ...

    def peer_host(self, peer: NodeId) -> str | None:
        """The IP address of the live connection to `peer`: an address that is known to work; None if not connected."""
        ...

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve until cancelled. Raises BadInput if the port is in use."""
        ...

    async def dial(self, address: str, expected: NodeId | None, timeout_seconds: float) -> NodeId:
        """Connect to `host:port`. With `expected`, a different node there is an error (PeerLost)."""
        ...

    async def call(self, peer: NodeId, method: str, payload: bytes, timeout_seconds: float) -> bytes: ...

    def serve(self, method: str, handler: Handler) -> None:
        """Answer `method`. Handlers run concurrently, a bounded number at once per peer."""
        ...

    async def publish(self, payload: bytes) -> None: ...

    def sign(self, payload: bytes) -> bytes:
        """By this node's identity key."""
        ...

    def verify(self, author: NodeId, payload: bytes, signature: bytes) -> bool:
        """Whether `author` signed `payload`. Total: garbage gives False."""
        ...

    def statistics(self) -> TransportStatistics: ...
