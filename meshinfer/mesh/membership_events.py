"""What the membership machine hears, and what it asks for: its events and effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshinfer.base.ids import NodeId

MemberState = Literal["alive", "suspect", "distant", "dead", "left"]
"""See `membership`."""

# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """The first connection to `node` is there; the handshake proved that it answers."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The last connection to `node` is gone."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class RedialFailed:
    """All its known addresses were tried and none let us in."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class PingSent:
    node: NodeId


@dataclass(frozen=True, slots=True)
class PingAnswered:
    node: NodeId
    seconds: float = 0.0
    """How long it took."""


@dataclass(frozen=True, slots=True)
class OthersReach:
    """`by`, whom we asked, has had an answer from `node` just now."""

    node: NodeId
    by: NodeId


@dataclass(frozen=True, slots=True)
class OthersDoNot:
    """Nobody whom we asked reaches `node`, or there was nobody to ask."""

    node: NodeId
    unanswered: int
    """Of those asked, how many said nothing at all: perhaps it is us whom nobody reaches."""


@dataclass(frozen=True, slots=True)
class Blamed:
    """The data path has lost `node`: a channel to it broke, or a step of its came too late."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class CardHeard:
    """The newest card of `node`, from whomever."""

    node: NodeId
    incarnation: int
    leaving: bool


@dataclass(frozen=True, slots=True)
class Accused:
    """All whom `by` suspects now, each with the incarnation that it knows of it."""

    by: NodeId
    suspects: tuple[tuple[NodeId, int], ...]


@dataclass(frozen=True, slots=True)
class SuspectedOurselves:
    """Somebody cannot reach this node: its own view of others deserves less trust for a while."""


@dataclass(frozen=True, slots=True)
class Late:
    """This node's event loop stood still for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`next_wakeup` has come."""


EventOfNode = (
    Connected | Disconnected | RedialFailed | PingSent | PingAnswered | OthersReach | OthersDoNot | Blamed | CardHeard
)
Event = EventOfNode | Accused | SuspectedOurselves | Late | TimePassed

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateChanged:
    node: NodeId
    before: MemberState | None
    """None: not a member until now."""
    after: MemberState
    cause: str


@dataclass(frozen=True, slots=True)
class LinkDoubted:
    """`node` is suspect and others reach it (`Membership.out_of_reach`): no plan should count on our link to it."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Redial:
    """Try all addresses of `node` at once, and say `RedialFailed` or let `Connected` come."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Probe:
    """Ping `node` now; do not wait for its turn."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class AskOthers:
    """Have some members ping `node`; the first to reach it is `OthersReach`, else comes `OthersDoNot`."""

    node: NodeId


Effect = StateChanged | LinkDoubted | Redial | Probe | AskOthers
