"""Who is alive: a pure machine over the evidence that this node has of each peer itself.

It is the first step towards SWIM (Das, Gupta, Motivala 2002) with Lifeguard (Dadgar, Phillips,
Currey 2018): the states, the incarnation and the table are theirs; indirect probes and suspicion
rumours come later, as new events and effects. What stands already:

    alive    connected, and answering pings
    suspect  not connected for a moment, or several pings without an answer: still a member
    dead     not back in time; for this node it holds nothing and can do nothing
    left     it said so itself; only a card of a higher incarnation brings it back

Two kinds of evidence lead out of `alive`, on purpose at two speeds. A lost connection is definite
(a killed process resets its sockets within milliseconds), so it gets one re-dial and half a second.
Silence is not (a lid, a stall, a slow radio), so it takes at least three pings in two seconds; a
single lost one removes nobody. That a connection was replaced by another is no news at all.

Silence is counted in pings that *we* sent and got no answer to, not in time alone. So a process that
was itself stopped, and on waking finds every clock two seconds on, blames nobody: it has one ping
under way to each peer, not three. (Lifeguard's first lesson, and here it costs nothing.)

This machine knows direct neighbours only. That a node further away is alive follows from the links
that living nodes announce; `view.View.live` derives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshinfer.base.ids import NodeId

MemberState = Literal["alive", "suspect", "dead", "left"]

MAX_MEMBERS = 2048
"""As many nodes as a view holds. Those connected now are not counted against it: the transport bounds them."""

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


@dataclass(frozen=True, slots=True)
class CardHeard:
    """The newest card of `node`, from whomever."""

    node: NodeId
    incarnation: int
    leaving: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`next_wakeup` has come."""


EventOfNode = Connected | Disconnected | RedialFailed | PingSent | PingAnswered | CardHeard
Event = EventOfNode | TimePassed

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateChanged:
    node: NodeId
    before: MemberState | None
    """None: not a member until now."""
    after: MemberState
    cause: str


@dataclass(frozen=True, slots=True)
class Redial:
    """Try all addresses of `node` at once, and say `RedialFailed` or let `Connected` come."""

    node: NodeId


Effect = StateChanged | Redial

# --- the table ----------------------------------------------------------------------------------

Trigger = Literal["connected", "disconnected", "unreachable", "silent", "long silent", "answered", "left", "returned"]
"""What an event means once the timers and the connection have been looked at."""

TRANSITIONS: dict[tuple[MemberState | None, Trigger], MemberState] = {
    (None, "connected"): "alive",
    ("alive", "disconnected"): "suspect",
    ("alive", "silent"): "suspect",
    ("alive", "left"): "left",
    ("suspect", "connected"): "alive",
    ("suspect", "answered"): "alive",
    ("suspect", "unreachable"): "dead",
    ("suspect", "long silent"): "dead",
    ("suspect", "left"): "left",
    ("dead", "connected"): "alive",
    ("dead", "answered"): "alive",
    ("dead", "left"): "left",
    ("left", "returned"): "alive",
}
"""All and only the changes of state; any other (state, trigger) leaves the state as it is."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When silence means what. `dead_after` + one ping interval + gossip must stay below the 3 s promised to all."""

    redial_grace_seconds: float = 0.5
    """A lost connection may be replaced within this. Raising it delays the notice of every killed node."""
    suspect_after_seconds: float = 1.0
    dead_after_seconds: float = 2.0
    """Since the oldest ping without an answer. Lowering it takes slow peers for dead: 4 pings fit into 2 s."""
    pings_before_dead: int = 3
    forget_after_seconds: float = 600.0
    """The dead and the left are listed for this long, for people to see."""


@dataclass(slots=True)
class _Member:
    state: MemberState
    since: float
    """When it came into `state`."""
    cause: str
    incarnation: int = 0
    """The highest heard."""
    left_incarnation: int = -1
    """Of the last card that said it leaves; −1: none did."""
    connected: bool = False
    unanswered: int = 0
    """Pings since the last answer, over this connection."""
    silent_since: float = 0.0
    """When the oldest of them was sent; meaningless while there is none."""


@dataclass(frozen=True, slots=True)
class Member:
    """One neighbour, as `Membership.members` shows it."""

    node: NodeId
    state: MemberState
    since: float
    """On this node's own clock."""
    cause: str
    incarnation: int
    connected: bool


class Membership:
    """The machine. Only `handle` changes it; `now` is seconds on any monotonic clock, never going back."""

    def __init__(self, timing: Timing | None = None) -> None:
        self._timing = timing or Timing()
        self._members: dict[NodeId, _Member] = {}
        self._next: float | None = None
        """The earliest moment at which time alone changes something; None if it never does."""

    def members(self) -> tuple[Member, ...]:
        """Everyone known, sorted by id."""
        return tuple(
            Member(node, m.state, m.since, m.cause, m.incarnation, m.connected)
            for node, m in sorted(self._members.items())
        )

    def state(self, node: NodeId) -> MemberState | None:
        member = self._members.get(node)
        return member.state if member else None

    def vouched(self) -> frozenset[NodeId]:
        """Neighbours that are alive on our own evidence; a suspect still is."""
        return frozenset(node for node, m in self._members.items() if m.state in ("alive", "suspect"))

    def dead(self) -> dict[NodeId, float]:
        """Neighbours held dead, and since when."""
        return {node: m.since for node, m in self._members.items() if m.state == "dead"}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; timers that are due by `now` count first."""
        effects = self._pass_time(now) if self._next is not None and self._next <= now else []
        if not isinstance(event, TimePassed):
            effects += self._take_in(event, now)
            effects += self._pass_time(now)  # a third ping without an answer may have made silence long enough
        due = (due for member in self._members.values() if (due := self._due(member)) is not None)
        self._next = min(due, default=None)
        return effects

    def next_wakeup(self) -> float | None:
        """When to send `TimePassed`; None if nothing is waited for."""
        return self._next

    # --- inside ---------------------------------------------------------------------------------

    def _take_in(self, event: EventOfNode, now: float) -> list[Effect]:
        effects: list[Effect] = []
        member = self._members.get(event.node)
        match event:
            case Connected(node):
                if member and member.state == "left" and member.incarnation > member.left_incarnation:
                    effects += self._apply(node, "returned", now, "connected again")
                effects += self._apply(node, "connected", now, "connected")
                self._members[node].connected = True
                self._members[node].unanswered = 0
                self._bound()
            case Disconnected(node) if member and member.connected:
                member.connected, member.unanswered = False, 0
                if member.state in ("alive", "suspect"):
                    effects += self._apply(node, "disconnected", now, "connection lost")
                    # A silent member whose connection breaks gets its grace from now, like any other.
                    member.since = now
                    effects.append(Redial(node))
            case RedialFailed(node) if member and not member.connected:
                effects += self._apply(node, "unreachable", now, "connection lost, and no address answers")
            case PingSent(node) if member and member.connected:
                if member.unanswered == 0:
                    member.silent_since = now
                member.unanswered += 1
            case PingAnswered(node) if member and member.connected:
                member.unanswered = 0
                effects += self._apply(node, "answered", now, "answers pings")
            case CardHeard(node, incarnation, leaving):
                effects += self._hear(node, incarnation, leaving, now)
            case _:
                pass  # evidence about a connection that is gone, or about no member
        return effects

    def _due(self, member: _Member) -> float | None:
        """When time alone changes something about `member`."""
        timing = self._timing
        if member.state in ("dead", "left"):
            return None if member.connected else member.since + timing.forget_after_seconds
        if not member.connected:
            return member.since + timing.redial_grace_seconds
        if member.state == "alive" and member.unanswered >= 2:
            return member.silent_since + timing.suspect_after_seconds
        if member.state == "suspect" and member.unanswered >= timing.pings_before_dead:
            return member.silent_since + timing.dead_after_seconds
        return None

    def _pass_time(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node, member in list(self._members.items()):
            # Twice at most: a machine that was not asked for long goes from alive to suspect to dead.
            while (due := self._due(member)) is not None and due <= now:
                if member.state in ("dead", "left"):
                    del self._members[node]
                    break
                silence = f"{member.unanswered} pings without an answer in {now - member.silent_since:.1f} s"
                if not member.connected:
                    effects += self._apply(node, "unreachable", now, "connection lost, and not back in time")
                elif member.state == "alive":
                    effects += self._apply(node, "silent", now, silence)
                else:
                    effects += self._apply(node, "long silent", now, silence)
        return effects

    def _hear(self, node: NodeId, incarnation: int, leaving: bool, now: float) -> list[Effect]:
        member = self._members.get(node)
        if member is None:
            return []  # no neighbour: the view alone speaks for it
        newer = incarnation > member.incarnation
        member.incarnation = max(member.incarnation, incarnation)
        if leaving and incarnation == member.incarnation:
            member.left_incarnation = incarnation
            return self._apply(node, "left", now, "said that it leaves")
        if newer and not leaving and member.connected and member.state == "left":
            return self._apply(node, "returned", now, f"came back with incarnation {incarnation}")
        return []

    def _bound(self) -> None:
        """Forget those longest gone when more are listed than a mesh can have nodes."""
        if len(self._members) > MAX_MEMBERS:
            gone = [node for node, m in self._members.items() if m.state in ("dead", "left") and not m.connected]
            for node in sorted(gone, key=lambda node: self._members[node].since)[: len(self._members) - MAX_MEMBERS]:
                del self._members[node]

    def _apply(self, node: NodeId, trigger: Trigger, now: float, cause: str) -> list[Effect]:
        member = self._members.get(node)
        before: MemberState | None = member.state if member else None
        after = TRANSITIONS.get((before, trigger)) or before
        if after is None or after == before:
            return []
        if member is None:
            self._members[node] = _Member(after, now, cause)
        else:
            member.state, member.since, member.cause = after, now, cause
        return [StateChanged(node, before, after, cause)]
