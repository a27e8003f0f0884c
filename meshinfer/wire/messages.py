"""Control messages between agents: each RPC method with its request and its answer.

Methods are versioned in their name (`lease/1`); a node that does not know one answers `refused`,
so a newer peer can fall back. All numbers are bytes or seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshinfer.base.bounds import at_least, between, finite, sized
from meshinfer.base.wire_ids import WireInstanceId, WireModelId, WireNodeId, WirePlacementId
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Refusal
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.topology.card import Count, Epoch, NodeCard
from meshinfer.topology.link import Link
from meshinfer.topology.placement import Placement

Seconds = Annotated[float, between(0, 86400)]

# --- gossip: what a node says of itself ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The author does not reach `node`. A card of `node` above this incarnation was made after that, and refutes it."""

    node: WireNodeId
    incarnation: Count


@dataclass(frozen=True, slots=True)
class Announcement:
    """A node's card, its outgoing links and whom it suspects: the only thing that is gossiped."""

    card: NodeCard
    links: Annotated[tuple[Link, ...], sized(0, 256)] = ()
    suspects: Annotated[tuple[Suspicion, ...], sized(0, 64)] = ()


@dataclass(frozen=True, slots=True)
class SignedAnnouncement:
    """An encoded `Announcement` with its author's signature, so that others may pass it on but not change it."""

    author: WireNodeId
    payload: Annotated[bytes, sized(1, 64 * 1024)]
    signature: Annotated[bytes, sized(1, 256)]


VIEW_DIGESTS = "view-digests/1"


@dataclass(frozen=True, slots=True)
class ViewDigests:
    """What the peer's view knows, slice by slice (`mesh.view.SLICES`). Asked with an empty payload."""

    digests: Annotated[tuple[Annotated[bytes, sized(8, 8)], ...], sized(1, 256)]


PULL_VIEW = "view/1"


@dataclass(frozen=True, slots=True)
class PullView:
    """Asks for every announcement that the peer holds and that is newer than what `known` lists."""

    known: Annotated[tuple[tuple[WireNodeId, Count, Count], ...], sized(0, 2048)]
    """(node, incarnation, version)."""
    slices: Annotated[tuple[Annotated[int, between(0, 255)], ...], sized(0, 256)] = ()
    """Of nodes in these slices only; empty: of all."""


@dataclass(frozen=True, slots=True)
class ViewPulled:
    announcements: Annotated[tuple[SignedAnnouncement, ...], sized(0, 2048)]
    more: bool = False
    """The answer was cut at the size bound; ask again."""


PING = "ping/1"
"""The payload comes back as it went: the round trip of a small message, and a sign of life."""

PING_FOR_ME = "ping-req/1"


@dataclass(frozen=True, slots=True)
class PingForMe:
    """SWIM's indirect probe: does `target` answer you? It does not answer me."""

    target: WireNodeId


@dataclass(frozen=True, slots=True)
class PingedForYou:
    """Within its short deadline, or not. Saying no, too, tells that the way between asker and asked is fine."""

    reached: bool


# --- placing ------------------------------------------------------------------------------------

PLACE = "place/1"


@dataclass(frozen=True, slots=True)
class Place:
    """Origin → elected planner: see to it that an instance of this model exists."""

    model_id: WireModelId
    workload: Workload
    constraints: Constraints
    placement: Placement | None = None
    """Exactly this one, instead of planning."""
    out_of_reach: Annotated[tuple[WireNodeId, ...], sized(0, 256)] = ()
    """The origin does not reach these, though others do: an instance with them is no use to it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The instance that is there now or is being loaded."""

    instance_id: WireInstanceId
    epoch: Epoch
    placement: Placement
    refusals: Annotated[tuple[Refusal, ...], sized(0, 64)] = ()


LEASE = "lease/1"


@dataclass(frozen=True, slots=True)
class Lease:
    """Planner → seat: promise this much memory to this seat, for a short while."""

    instance_id: WireInstanceId
    epoch: Epoch
    placement: Placement
    seat_index: Annotated[int, between(0, 255)]
    need_bytes: Annotated[int, at_least(0)]
    begun_epoch: Epoch = 0
    """The first epoch that this placing tried: what it knew when it began is older than that. A deletion outranks it by
    this, however often it tries again with a higher epoch."""


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """Seat → planner: promised, or not and why."""

    granted: bool
    lapses_in_seconds: Seconds = 0.0
    """The promise ends by itself after this unless it is committed."""
    newest_epoch: Epoch = 0
    """Where the epoch was stale: the newest that the node has seen of this instance. Where it is deleted: the last that
    was (see `Deletion`)."""
    is_deleted: bool = False
    """The instance was deleted after this placing began: it must not go on."""
    why: Annotated[str, sized(0, 2048)] = ""


COMMIT = "commit/1"
RELEASE = "release/1"


@dataclass(frozen=True, slots=True)
class SeatRef:
    """Commit (load it now) or release (free it now) whatever this node holds of the instance's epoch."""

    instance_id: WireInstanceId
    epoch: Epoch
    placement_id: WirePlacementId
    reason: Annotated[str, sized(0, 256)] = ""
    keeps_layers: bool = False
    """release: it was a repair's, so layers that are in memory, or on their way, wait for the next one for a while."""


DELETE = "delete/1"


@dataclass(frozen=True, slots=True)
class Deletion:
    """Whoever deletes an instance → every node: `epoch` was the last, and what was begun to replace it is void."""

    instance_id: WireInstanceId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Done:
    """It is done; `freed_bytes` where memory was freed."""

    freed_bytes: Annotated[int, at_least(0)] = 0


# --- channels -----------------------------------------------------------------------------------

OPEN_CHANNEL = "channel/1"
ChannelRole = Literal["activations", "samples", "origin"]
"""activations: stage → next stage. samples: last stage → head. origin: an origin's agent → head or last stage."""


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """The dialling side's agent → the accepting side's agent: let my runner (or me) in."""

    instance_id: WireInstanceId
    epoch: Epoch
    from_seat: Annotated[int, between(-1, 255)]
    """−1: not a seat but an origin."""
    to_seat: Annotated[int, between(0, 255)]
    role: ChannelRole
    certificate_der: Annotated[bytes, sized(1, 4096)]
    """The dialler's ephemeral certificate, which the acceptor pins."""


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """Where to dial, what to pin, what to say first. The token works once and lapses."""

    hosts: Annotated[tuple[Annotated[str, sized(1, 64)], ...], sized(1, 32)]
    port: Annotated[int, between(1, 65535)]
    certificate_der: Annotated[bytes, sized(1, 4096)]
    token: Annotated[bytes, sized(16, 64)]
    loads: bool = False
    """Its process reads layers, and may answer late."""


# --- links --------------------------------------------------------------------------------------

LINK_PROBE = "link-probe/1"


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """Dialler → acceptor: let me measure the way between us, over a channel of the activations' kind."""

    certificate_der: Annotated[bytes, sized(1, 4096)]
    bulk_bytes: Annotated[int, between(0, 2**40)]
    """What bursts may use in all; 0: round trips only."""


@dataclass(frozen=True, slots=True)
class LinkProbeOffer:
    """Where, and how much of what was asked for: a node that is busy, or has used its budget up, allows no bursts."""

    offer: ChannelOffer
    bulk_bytes: Annotated[int, between(0, 2**40)]


LINK_REPORT = "link-report/1"


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What the caller measured of the callee's way to it, for the callee to publish. 0 or empty: not measured."""

    bandwidth_bytes_per_second: Annotated[float, finite(0)] = 0.0
    """At which the callee's bytes arrived here."""
    rtt_seconds: Seconds = 0.0
    message_seconds: Seconds = 0.0
    callee_host: Annotated[str, sized(0, 64)] = ""
    """The address pair that both ends use from now on: the one that decides has measured over it."""
    caller_host: Annotated[str, sized(0, 64)] = ""


LINKS_WANTED = "links-wanted/1"


@dataclass(frozen=True, slots=True)
class LinksWanted:
    """A planner → one of its candidates: measure your way to these nodes, if you have not yet."""

    targets: Annotated[tuple[WireNodeId, ...], sized(1, 16)]


# --- models -------------------------------------------------------------------------------------

MODEL_INFO = "model/1"
MODEL_CHUNK = "model-chunk/1"


@dataclass(frozen=True, slots=True)
class ModelInfoRequest:
    model_id: WireModelId


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model in a store."""

    name: Annotated[str, sized(1, 200)]
    size_bytes: Annotated[int, between(0, 2**53)]
    sha256: Annotated[str, sized(64, 64)]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a node that holds the model knows of it."""

    card: ModelCard
    files: Annotated[tuple[ModelFile, ...], sized(1, 1024)]


@dataclass(frozen=True, slots=True)
class ModelChunkRequest:
    """A range of one file of a model."""

    model_id: WireModelId
    digest: Annotated[str, sized(1, 128)]
    name: Annotated[str, sized(1, 200)]
    offset: Annotated[int, between(0, 2**53)]
    length: Annotated[int, between(1, 192 * 1024)]


@dataclass(frozen=True, slots=True)
class ModelChunk:
    data: Annotated[bytes, sized(0, 192 * 1024)]


# --- errors -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallError:
    """How a handler's error travels back."""

    code: Annotated[str, sized(1, 32)]
    what: Annotated[str, sized(0, 4096)]
    expected: Annotated[str, sized(0, 1024)] = ""
    do: Annotated[str, sized(0, 1024)] = ""
