"""Who is alive: a pure machine over the evidence that this node has of each neighbour.

It is SWIM (Das, Gupta, Motivala 2002) with Lifeguard (Dadgar, Phillips, Currey 2018), on connections:

    alive    connected, and answering pings
    suspect  not connected for a moment, or silent for half a second: still a member, others are asked
    distant  we do not reach it, another member does: it lives, but is no neighbour of ours
    dead     neither we nor those whom we asked reach it; for this node it holds nothing and can do nothing
    left     it said so itself; only a card of a higher incarnation brings it back

What of theirs is here:

- *Indirect probes.* Whoever becomes suspect is pinged by up to three others for us (`AskOthers`). One that
  reaches it makes it `distant` instead of dead: when only the link between two nodes breaks, neither buries the
  other. `view.View.live` then derives from the others' links that it is there, as it does for all who are
  further away than a neighbour.
- *Refutation.* Each node announces whom it suspects, with the incarnation that it knew. The suspect raises its
  incarnation above it; a card with the higher one was made after the accusation, so its author lives.
- *Confirmations.* How long a suspect may be silent shrinks from 2 s to 1.5 with each other node that suspects it
  on its own, and with the data path's word (`Blamed`): a channel to it broke, or its step came too late.
- *Self-awareness.* What looks like everyone's silence is often our own: see below.

What is not, on purpose: a rumour alone makes nobody suspect. It makes us ping at once, and our own evidence
decides. And a lost connection is no lost probe, it is definite (a killed process resets its sockets within
milliseconds), so it gets one re-dial, the others' word, and at most half a second. That a connection was
replaced by another is no news at all; a single ping without an answer removes nobody.

*Slow is not gone.* A node that took long to answer of late (its cores are taken, its link is full) may be silent
for four times as long as the slowest of its answers, if that is more, but no longer than 6 s; who answers in
milliseconds, as nearly all do, is held to the figures above.

*Doubting oneself.* Silence is counted in pings that we sent and had no answer to, never in time alone. An event
loop that comes late by `s` seconds (a lid, SIGSTOP, a starved core) says `Late(s)`: that time is taken off
everyone's silence and off the answers that were under way, and for some seconds all timeouts stretch, the more the
later it came, to three times their length at most. A node that others suspect stretches them too.
When most neighbours fall silent at once, or those whom we ask do not answer either, the fault is likely
ours, and nothing shortens the timeout.

This machine knows direct neighbours only, and only this node's monotonic clock. No caller waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from meshinfer.base.ids import NodeId
from meshinfer.mesh.membership_events import (
    Accused,
    AskOthers,
    Blamed,
    CardHeard,
    Connected,
    Disconnected,
    Effect,
    Event,
    EventOfNode,
    Late,
    LinkDoubted,
    MemberState,
    OthersDoNot,
    OthersReach,
    PingAnswered,
    PingSent,
    Probe,
    Redial,
    RedialFailed,
    StateChanged,
    SuspectedOurselves,
    TimePassed,
)
from meshinfer.mesh.self_doubt import SelfDoubt

MAX_MEMBERS = 2048
"""As many nodes as a view holds. Those connected now are not counted against it: the transport bounds them."""
MAX_ACCUSERS = 16
"""Remembered per member; three confirmations have the full effect already."""

# --- the table ----------------------------------------------------------------------------------

Trigger = Literal[
    "connected", "disconnected", "silent", "answered", "given up", "others reach", "refuted", "left", "returned"
]
"""What an event means once the timers, the connection and the others' answers have been looked at."""

TRANSITIONS: dict[tuple[MemberState | None, Trigger], MemberState] = {
    (None, "connected"): "alive",
    ("alive", "disconnected"): "suspect",
    ("alive", "silent"): "suspect",
    ("alive", "left"): "left",
    ("suspect", "connected"): "alive",
    ("suspect", "answered"): "alive",
    ("suspect", "given up"): "dead",
    ("suspect", "others reach"): "distant",
    ("suspect", "left"): "left",
    ("distant", "connected"): "alive",
    ("distant", "answered"): "alive",
    ("distant", "left"): "left",
    ("dead", "connected"): "alive",
    ("dead", "answered"): "alive",
    ("dead", "refuted"): "distant",
    ("dead", "left"): "left",
    ("left", "returned"): "alive",
}
"""All and only the changes of state; any other (state, trigger) leaves the state as it is."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When silence means what. All counted from the oldest ping without an answer, which a stop precedes by up to
    half a second; `dead_max` + that + gossip must stay below the 3 s promised of whoever answered quickly, to whoever
    does not doubt itself. Of the slow, and to those who doubt, it may be 6.5 s: `view.Bounds.doubt_seconds` waits for them.
    """

    redial_grace_seconds: float = 0.5
    """A lost connection may be replaced within this. Raising it delays the notice of every killed node."""
    suspect_after_seconds: float = 0.5
    """And two pings. Nobody is dropped for being suspect; no new work is put there, and others are asked."""
    suspect_after_blame_seconds: float = 0.25
    """And one ping, if the data path has lost it too."""
    dead_min_seconds: float = 1.5
    """And three pings, with others to confirm it. Lowering it takes slow peers for dead."""
    dead_max_seconds: float = 2.0
    """Likewise, with nobody's confirmation."""
    pings_before_dead: int = 3
    slow_factor: float = 4.0
    """Of the slowest answer of late: so long a node may be silent before it is dead, half as long before it is suspect."""
    slow_fades: float = 0.8
    """Per answer: a slow one is half forgotten after three, about as many seconds."""
    slow_max_seconds: float = 6.0
    """More is granted to nobody: a node that slow is no help. An answer that took 1.5 s or longer earns it; five quick ones
    later the node is held to 2 s again."""
    late_seconds: float = 0.25
    """A loop that comes this late, or later, is a whole unit of doubt; one that comes half as late, half of one."""
    confirmations: int = 3
    """So many have the full effect; fewer if there are fewer who could."""
    self_doubt_max: int = 4
    """Each unit stretches the timeouts by half."""
    self_doubt_fades_seconds: float = 2.0
    """One unit in this time."""
    accuse_seconds: float = 10.0
    """For how long the dead are still announced as suspects, so that one who lives hears of it and refutes."""
    forget_after_seconds: float = 600.0
    """The dead, the distant and the left are listed for this long, for people to see."""


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
    slowest_seconds: float = 0.0
    """Answer of late, without what we stood still meanwhile; it fades. At most what earns `slow_max_seconds`."""
    blamed: bool = False
    """By the data path, since the last answer."""
    accusers: set[NodeId] = field(default_factory=set[NodeId])
    """Who announces suspicion of the incarnation that we know, or of a later one."""
    suspected_incarnation: int = 0
    """The one it had when it last became suspect."""
    redial_failed: bool = False
    others: Literal["unknown", "reach", "do not"] = "unknown"
    """What those say whom we asked since it became suspect."""
    reached_by: str = ""
    """In words."""
    relays_silent: bool = False
    """Some of them said nothing."""

    @property
    def link_is_silent(self) -> bool:
        """Others reach it and we do not, though we are connected. A lost connection is decided soon, or comes back."""
        return self.state == "suspect" and self.others == "reach" and self.connected and self.unanswered >= 2


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
        self._doubt = SelfDoubt(self._timing.self_doubt_max, self._timing.self_doubt_fades_seconds)

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

    def doubtful(self) -> frozenset[NodeId]:
        """Neighbours that do not answer right now."""
        return frozenset(node for node, m in self._members.items() if m.state == "suspect")

    def out_of_reach(self) -> frozenset[NodeId]:
        """Neighbours that others reach and we do not: between them and us it is the link that broke."""
        return frozenset(
            node
            for node, m in self._members.items()
            if m.state == "distant" or (m.state == "suspect" and m.others == "reach")
        )

    def reached(self) -> frozenset[NodeId]:
        """Neighbours on the links to which a plan may count: it is `vouched` for, and the link is not in doubt."""
        return frozenset(node for node in self.vouched() if not self._members[node].link_is_silent)

    def dead(self) -> dict[NodeId, float]:
        """Neighbours held dead, and since when."""
        return {node: m.since for node, m in self._members.items() if m.state == "dead"}

    def suspects(self, now: float) -> tuple[tuple[NodeId, int], ...]:
        """Whom to announce as suspect, each with the incarnation that it must outbid; sorted by id.

        Not those whose connection was lost a moment ago: whoever is gone, all its neighbours see that for themselves.
        """
        recent = self._timing.accuse_seconds
        return tuple(
            (node, m.suspected_incarnation)
            for node, m in sorted(self._members.items())
            if (m.state == "suspect" and m.connected) or (m.state == "dead" and now - m.since < recent)
        )

    def self_doubt(self, now: float) -> float:
        """0: this node trusts its own clock and links. Each unit stretches its timeouts by half."""
        return self._doubt.units(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; timers that are due by `now` count first."""
        if isinstance(event, Late):
            self._take_off(event.seconds, now)
        effects = self._pass_time(now) if self._next is not None and self._next <= now else []
        match event:
            case Late(seconds):
                self._doubt.add(min(1.0, seconds / self._timing.late_seconds), now)
            case SuspectedOurselves():
                self._doubt.add(1.0, now)
            case Accused(by, suspects):
                effects += self._take_accusations(by, dict(suspects))
            case TimePassed():
                pass
            case _:
                effects += self._take_in(event, now)
        if not isinstance(event, TimePassed):
            effects += self._pass_time(now)  # a third ping without an answer may have made silence long enough
        due = (due for member in self._members.values() if (due := self._due(member, now)) is not None)
        self._next = min(due, default=None)
        return effects

    def next_wakeup(self) -> float | None:
        """When to send `TimePassed`; None if nothing is waited for."""
        return self._next

    # --- evidence -------------------------------------------------------------------------------

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
                    member.since, member.redial_failed = now, False
                    effects.append(Redial(node))
            case RedialFailed(node) if member and not member.connected:
                member.redial_failed = True
                effects += self._settle(node, member, now)
            case PingSent(node) if member and member.connected:
                if member.unanswered == 0:
                    member.silent_since = now
                member.unanswered += 1
            case PingAnswered(node, seconds) if member and member.connected:
                member.unanswered, member.blamed = 0, False
                most = self._timing.slow_max_seconds / self._timing.slow_factor
                took = min(self._doubt.without_stops(seconds, now), most)
                member.slowest_seconds = max(took, self._timing.slow_fades * member.slowest_seconds)
                effects += self._apply(node, "answered", now, "answers pings")
            case OthersReach(node, by) if member and member.state == "suspect":
                effects += self._reached(node, member, f"{by} reaches it", now)
            case OthersDoNot(node, unanswered) if member and member.state == "suspect" and member.others == "unknown":
                member.others, member.relays_silent = "do not", unanswered > 0
                effects += self._settle(node, member, now)
            case Blamed(node) if member and member.connected and member.state == "alive" and not member.blamed:
                member.blamed = True
                effects.append(Probe(node))
            case CardHeard(node, incarnation, leaving):
                effects += self._hear(node, incarnation, leaving, now)
            case _:
                pass  # evidence about a connection that is gone, or about no member
        return effects

    def _take_accusations(self, by: NodeId, suspects: dict[NodeId, int]) -> list[Effect]:
        effects: list[Effect] = []
        for node, member in self._members.items():
            if suspects.get(node, -1) < member.incarnation:
                member.accusers.discard(by)  # says nothing of it, or what it refuted already
            elif by not in member.accusers and len(member.accusers) < MAX_ACCUSERS:
                member.accusers.add(by)
                if member.state == "alive" and member.unanswered == 0:
                    effects.append(Probe(node))
        return effects

    def _reached(self, node: NodeId, suspect: _Member, by: str, now: float) -> list[Effect]:
        """Others reach a suspect: it is our link that is in doubt, and they should hear of that before we are sure."""
        is_news = suspect.others != "reach"
        suspect.others, suspect.reached_by = "reach", by
        settled = self._settle(node, suspect, now)
        return [LinkDoubted(node)] if is_news and suspect.link_is_silent and not settled else settled

    def _hear(self, node: NodeId, incarnation: int, leaving: bool, now: float) -> list[Effect]:
        member = self._members.get(node)
        if member is None:
            return []  # no neighbour: the view alone speaks for it
        newer = incarnation > member.incarnation
        member.incarnation = max(member.incarnation, incarnation)
        if newer:
            member.accusers.clear()
        if leaving and incarnation == member.incarnation:
            member.left_incarnation = incarnation
            return self._apply(node, "left", now, "said that it leaves")
        if not newer or leaving:
            return []
        if member.connected and member.state == "left":
            return self._apply(node, "returned", now, f"came back with incarnation {incarnation}")
        if member.state == "suspect" and member.suspected_incarnation > 0:
            # The suspect itself has refuted, and its word came through others.
            return self._reached(node, member, f"refuted it with incarnation {incarnation}", now)
        if member.suspected_incarnation > 0:
            return self._apply(node, "refuted", now, f"refuted it with incarnation {incarnation}")
        return []

    # --- time -----------------------------------------------------------------------------------

    def _due(self, member: _Member, now: float) -> float | None:
        """When time alone changes something about `member`."""
        timing = self._timing
        if member.state in ("dead", "distant", "left"):
            return None if member.connected else member.since + timing.forget_after_seconds
        stretch = self._doubt.stretch(now)
        if not member.connected:
            return member.since + timing.redial_grace_seconds * stretch
        slow = timing.slow_factor * member.slowest_seconds
        if member.state == "alive":
            if member.blamed and member.unanswered >= 1:
                return member.silent_since + max(timing.suspect_after_blame_seconds * stretch, slow / 2)
            if member.unanswered >= 2:
                return member.silent_since + max(timing.suspect_after_seconds * stretch, slow / 2)
        elif member.unanswered >= timing.pings_before_dead:
            return member.silent_since + max(self._silence_allowed(member) * stretch, slow)
        return None

    def _silence_allowed(self, suspect: _Member) -> float:
        """Lifeguard's dynamic timeout: from the longest without confirmations towards the shortest with all of them."""
        timing = self._timing
        others = [member for member in self._members.values() if member.connected and member is not suspect]
        silent = sum(member.unanswered >= 2 for member in others)
        if suspect.relays_silent or 2 * silent > len(others):
            return timing.dead_max_seconds  # it may well be our own link
        wanted = min(timing.confirmations, len(others))
        if wanted == 0:
            return timing.dead_min_seconds  # nobody could confirm anything
        had = min(len(suspect.accusers) + suspect.blamed, wanted)
        share = math.log(had + 1) / math.log(wanted + 1)
        return timing.dead_max_seconds - share * (timing.dead_max_seconds - timing.dead_min_seconds)

    def _pass_time(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node, member in list(self._members.items()):
            # Twice at most: a machine that was not asked for long goes from alive to suspect to dead.
            while (due := self._due(member, now)) is not None and due <= now:
                if member.state in ("dead", "distant", "left"):
                    del self._members[node]
                    break
                if member.state == "alive":
                    effects += self._apply(node, "silent", now, self._silence(member, now))
                else:
                    effects += self._give_up(node, member, now)
        return effects

    def _settle(self, node: NodeId, member: _Member, now: float) -> list[Effect]:
        """A lost connection is decided as soon as both the re-dial and the others have spoken; silence takes its time."""
        if member.state == "suspect" and not member.connected and member.redial_failed and member.others != "unknown":
            return self._give_up(node, member, now)
        return []

    def _give_up(self, node: NodeId, member: _Member, now: float) -> list[Effect]:
        """We do not reach it; what the others say makes the difference."""
        if member.connected:
            why = self._silence(member, now)
        else:
            why = "connection lost, and " + ("no address answers" if member.redial_failed else "not back in time")
        if member.others == "reach":
            return self._apply(node, "others reach", now, f"{why}; {member.reached_by}")
        return self._apply(node, "given up", now, why)

    @staticmethod
    def _silence(member: _Member, now: float) -> str:
        return f"{member.unanswered} pings without an answer in {now - member.silent_since:.1f} s"

    # --- ourselves ------------------------------------------------------------------------------

    def _take_off(self, seconds: float, now: float) -> None:
        """While we stood still nobody could answer us, and no re-dial could come back."""
        self._doubt.stood_still(seconds, now)
        for member in self._members.values():
            if member.unanswered:
                member.silent_since = min(now, member.silent_since + seconds)
            if member.state == "suspect":
                member.since = min(now, member.since + seconds)

    # --- inside ---------------------------------------------------------------------------------

    def _bound(self) -> None:
        """Forget those longest gone when more are listed than a mesh can have nodes."""
        if len(self._members) > MAX_MEMBERS:
            gone = [n for n, m in self._members.items() if m.state in ("dead", "distant", "left") and not m.connected]
            for node in sorted(gone, key=lambda node: self._members[node].since)[: len(self._members) - MAX_MEMBERS]:
                del self._members[node]

    def _apply(self, node: NodeId, trigger: Trigger, now: float, cause: str) -> list[Effect]:
        member = self._members.get(node)
        before: MemberState | None = member.state if member else None
        after = TRANSITIONS.get((before, trigger)) or before
        if after is None or after == before:
            return []
        if member is None:
            member = self._members[node] = _Member(after, now, cause)
        else:
            member.state, member.since, member.cause = after, now, cause
        effects: list[Effect] = [StateChanged(node, before, after, cause)]
        if after == "suspect":
            member.suspected_incarnation = member.incarnation
            member.others, member.reached_by, member.relays_silent, member.redial_failed = "unknown", "", False, False
            effects.append(AskOthers(node))
        elif after == "alive":
            member.blamed = False
            member.accusers.clear()  # who still suspects it says so again within two seconds
        return effects
