"""How far away are the neighbours, and do they answer: a small ping to whoever was not heard for half a second.

A ping that comes in is a sign of life as good as an answer, so two neighbours take turns: who was pinged last
waits a little shorter and is the next to ping. One crosses each pair every half second, and each end measures
once a second. Being heard only puts a ping off, for a second at most, and never while one has no answer: it
is on answers alone that membership judges, since the way there may be broken when the way back is not.

Whose turn is almost due is pinged together with one that is due: then answers come together too, and so, half a second
later, do the pings of the others, whose turn it is. Neighbours come into step within some seconds, and where all are equally
near an idle node wakes up some five times a second for all of them instead of seven for four (simulated); over a radio on which
each message takes 2 to 30 ms, ten times instead of twelve. There are as many pings as before.

Smoothing is that of RFC 6298, on which the internet's timers rest: `srtt += (rtt − srtt)/8`, and the
mean deviation with a quarter. Pings overlap: each waits two seconds for its answer while the next
are sent, so an answer that comes late still counts as a sign of life, and three pings without one
are known after a second and a half.

Time is `trio.current_time()`: `perf_counter` plus a constant, so it resolves nanoseconds, never goes
back, and runs on virtual time in a simulation. It is read before the request is handed to the
transport and after the answer has come out of it: what a control message really takes.

What is announced of a link is steadied: a figure stands until the estimate has left it by a fifth.
So an idle mesh repeats itself word for word, and topologies keep their digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import trio
from trio import TaskStatus

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import NodeId
from meshinfer.mesh.membership_events import PingAnswered, PingSent
from meshinfer.topology.link import Link
from meshinfer.transport.base import Transport
from meshinfer.wire.messages import PING

SILENCE_SECONDS = 0.5
"""Halving it doubles probe traffic and finds silence a quarter second sooner."""
TURN_SECONDS = 0.05
"""By how much sooner it is the turn of the one who was pinged last. More than jitter, or both ping."""
PING_AT_LEAST_SECONDS = 1.1
"""Whatever is heard. A little more than the two turns, or they would never be taken."""
TOGETHER_SECONDS = 0.1
"""So much sooner than due a neighbour is pinged together with one that is due."""
PING_DEADLINE_SECONDS = 2.0
"""At most four pings to a neighbour are under way."""
LOSS_WINDOW = 40
"""Pings that `loss` looks back on: 40 s."""
STEADY_SHARE = 0.2
FOR_ANOTHER = b"for another"
"""What an indirect probe carries: it is no turn of the one who sends it."""
WARM_UP_ANSWERS = 2
"""The first ping pays for opening a stream (3 ms and more), often beside a start that keeps the machine busy: 67 ms were
seen where 2 ms are true. So it is shown until there is another, and then counts no more."""
MAX_RTT_SECONDS = 3600.0


@dataclass(slots=True)
class Turns:
    """When to ping one neighbour next. Pure."""

    heard: float
    """When it last gave a sign of life."""
    goes_first: bool
    """Of two whose pings crossed, or they would ping in step for ever. True at one end and False at the other."""
    sent: float = -float("inf")
    """When the last ping left."""
    unanswered: bool = False
    """The last ping."""
    is_ours: bool = False
    """It pinged last, so the next one is ours."""

    def due(self) -> float:
        if self.unanswered:
            return self.sent + SILENCE_SECONDS
        turn = self.heard + SILENCE_SECONDS - (TURN_SECONDS if self.is_ours else 0)
        return min(turn, self.sent + PING_AT_LEAST_SECONDS)

    def joins(self, now: float) -> bool:
        """It may be pinged with another that is due. Out of its turn it may not: pings would cross, twice as many."""
        return self.due() <= now + (TOGETHER_SECONDS if self.is_ours and not self.unanswered else 0)

    def pinging(self, now: float) -> None:
        self.sent, self.unanswered, self.is_ours = now, True, False

    def answered(self, now: float) -> None:
        self.heard, self.unanswered = now, False

    def pinged(self, now: float) -> None:
        """By the neighbour."""
        self.heard = now
        self.is_ours = self.goes_first or not self.unanswered


class LinkEstimate:
    """Running estimate of one link. Pure: it is told what was measured, and when."""

    def __init__(self) -> None:
        self.rtt_seconds = 0.0
        self.jitter_seconds = 0.0
        self.measured_at: float | None = None
        """When the last answer came; None before the first."""
        self._answers = 0
        self._outcomes: deque[bool] = deque(maxlen=LOSS_WINDOW)
        self._said = (0.0, 0.0)

    @property
    def loss(self) -> float:
        """Share of the last pings that had no answer in time."""
        return self._outcomes.count(False) / len(self._outcomes) if self._outcomes else 0.0

    def answered(self, rtt_seconds: float, now: float) -> None:
        self._answers += 1
        if self._answers <= WARM_UP_ANSWERS:
            self.rtt_seconds, self.jitter_seconds = rtt_seconds, rtt_seconds / 2
        else:
            self.jitter_seconds += (abs(self.rtt_seconds - rtt_seconds) - self.jitter_seconds) / 4
            self.rtt_seconds += (rtt_seconds - self.rtt_seconds) / 8
        self.measured_at = now
        self._outcomes.append(True)

    def lost(self) -> None:
        self._outcomes.append(False)

    def link(self, source: NodeId, target: NodeId, now: float) -> Link | None:
        """What to announce; None before the first answer."""
        if self.measured_at is None:
            return None
        said_rtt, said_jitter = self._said
        if abs(self.rtt_seconds - said_rtt) > STEADY_SHARE * said_rtt:
            self._said = said_rtt, said_jitter = self.rtt_seconds, self.jitter_seconds
        return Link(
            source,
            target,
            rtt_seconds=min(said_rtt, MAX_RTT_SECONDS),
            jitter_seconds=min(said_jitter, MAX_RTT_SECONDS),
            loss=round(self.loss, 2),
            age_seconds=round(max(0.0, now - self.measured_at), 1),
        )


@dataclass(frozen=True, slots=True)
class ProberStatistics:
    probed: int
    """Neighbours that are pinged now."""
    pings_sent: int
    pings_answered: int


class Prober:
    """Pings every neighbour that it was told to, and remembers how far each is."""

    def __init__(self, transport: Transport, on_event: Callable[[PingSent | PingAnswered], None]) -> None:
        self._transport = transport
        self._on_event = on_event
        self._nursery: trio.Nursery | None = None
        self._turns: dict[NodeId, Turns] = {}
        """Of all and only neighbours that are pinged now, each of one connection."""
        self._is_more = trio.Event()
        """Somebody was added to them."""
        self._estimates: dict[NodeId, LinkEstimate] = {}
        """Of those and of members whose connection is being replaced: a re-dial does not make a link unknown."""
        self._sent = self._answered = 0
        transport.serve(PING, self._echo)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                due = min((turns.due() for turns in self._turns.values()), default=float("inf"))
                if due > trio.current_time():
                    self._is_more = trio.Event()
                    with trio.move_on_at(due):  # it may be later by then
                        await self._is_more.wait()
                    continue
                now = trio.current_time()
                for peer, turns in self._turns.items():
                    if turns.joins(now):
                        turns.pinging(now)
                        self._nursery.start_soon(self._ping, peer, self._sent.to_bytes(8, "big"))
                await trio.lowlevel.checkpoint()

    def start(self, peer: NodeId) -> None:
        """Ping `peer` now and then; only while `run` runs."""
        if peer not in self._turns:
            self._turns[peer] = Turns(trio.current_time() - SILENCE_SECONDS, self._transport.node_id < peer)
            self._is_more.set()

    def ping_now(self, peer: NodeId) -> None:
        """Once, out of its turn, if `peer` is a neighbour."""
        if peer in self._turns and self._nursery is not None:
            self._nursery.start_soon(self._ping, peer, b"now")

    def stop(self, peer: NodeId) -> None:
        """Its connection is gone, and what becomes of the pings over it means nothing."""
        self._turns.pop(peer, None)

    def forget(self, peer: NodeId) -> None:
        """It is a member no more: what was measured means nothing now."""
        self._estimates.pop(peer, None)

    def rtt_seconds(self, peer: NodeId) -> float:
        """Smoothed round trip to `peer`; 0 before its first answer."""
        estimate = self._estimates.get(peer)
        return estimate.rtt_seconds if estimate else 0.0

    def links(self, source: NodeId, targets: Iterable[NodeId], now: float) -> tuple[Link, ...]:
        """What to announce of the links to `targets`, as far as they are measured; sorted by target."""
        estimates = ((target, self._estimates.get(target)) for target in sorted(targets))
        links = (estimate.link(source, target, now) for target, estimate in estimates if estimate)
        return tuple(link for link in links if link is not None)

    def statistics(self) -> ProberStatistics:
        return ProberStatistics(len(self._turns), self._sent, self._answered)

    async def _ping(self, peer: NodeId, payload: bytes) -> None:
        turns, sent = self._turns.get(peer), trio.current_time()
        if turns is None:
            return
        self._sent += 1
        self._on_event(PingSent(peer))
        try:
            answer = await self._transport.call(peer, PING, payload, PING_DEADLINE_SECONDS)
        except MeshinferError:
            answer = b""  # lost, late, or refused: in each case no answer to this ping
        if self._turns.get(peer) is not turns:
            return
        now = trio.current_time()
        estimate = self._estimates.setdefault(peer, LinkEstimate())
        if answer != payload:
            estimate.lost()
            return
        self._answered += 1
        turns.answered(now)
        estimate.answered(now - sent, now)
        self._on_event(PingAnswered(peer, now - sent))

    async def _echo(self, caller: NodeId, payload: bytes) -> bytes:
        turns = self._turns.get(caller)
        if turns is not None and payload != FOR_ANOTHER:
            turns.pinged(trio.current_time())
        return payload[:64]
