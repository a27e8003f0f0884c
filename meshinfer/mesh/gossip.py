"""What this node says of itself reaches everyone, and what they say reaches it.

Two ways, since either alone is not enough:

- *Push.* This node's own announcement, never another's, is published at once on a change, every two
  seconds while anything is unsettled anywhere, and every four in a quiet mesh (`pace`). Changes are
  gathered for 50 ms, and a node that changes all the time is held to two announcements a second after
  its first few: what costs one node a line costs every other node 3 ms (measured over gossipsub among
  five, each of whom passes it on to all), and nothing per token belongs here.
- *Pull.* Whoever connects asks the other for all that it lacks, and every ten seconds each node asks
  one neighbour, picked at random. That repairs whatever push lost. A neighbour that is alive but has
  not been heard for six seconds is asked directly, so a mesh lives on, slower, with push broken.

What a node pays does not grow with the mesh, but for what really happens in it: beyond a full mesh each node repeats
itself rarer by as much as there are more of them (`neighbours.rarity`), and what only drifts or counts waits for that;
and two large views are compared by digests before anything is listed. Who lives, and what each seat is, is told as quickly
in any mesh; of other news the first few are, and a node that has more all the time is held to as much rarer announcements.

Everything heard is checked (`announcement.check`) before it is believed, and passed on only as its
author signed it.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio
from trio import TaskStatus

from meshinfer.base.beats import sleep_to_beat
from meshinfer.base.errors import MeshinferError, ProtocolError
from meshinfer.base.ids import NodeId
from meshinfer.mesh.announcement import Heard, check, sign
from meshinfer.mesh.changes import Changes
from meshinfer.mesh.neighbours import most_wanted, rarity
from meshinfer.mesh.own_card import OwnCard
from meshinfer.mesh.pace import PERIOD_SECONDS, Pace
from meshinfer.mesh.view import MergeResult, View
from meshinfer.topology.link import Link
from meshinfer.transport.base import MAX_CALL_BYTES, MAX_GOSSIP_BYTES, Transport
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import (
    PULL_VIEW,
    VIEW_DIGESTS,
    PullView,
    SignedAnnouncement,
    ViewDigests,
    ViewPulled,
)

log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.05
"""How long a change waits for others to travel with it."""
LINK_NEWS_SECONDS = 1.0
"""… news of links beyond a full mesh: a node that starts learns of a dozen within a second, and all would hear of each."""
BURST = 6
"""Announcements at `COALESCE_SECONDS` apart before a node is held to …"""
SUSTAINED_SECONDS = 0.5
"""… one in this time, in a full mesh. Placing a model changes a card about five times."""
MAX_CLAIMED_AHEAD = 1000
"""Starts. Who claims that ours is further ahead has no signature to show for it, and numbers must not run out."""
PULL_PERIOD_SECONDS = 10.0
"""Less than an announcement lives, so that this node sees what others hold of it. A call of a few hundred bytes."""
PULL_DEADLINE_SECONDS = 3.0
PULL_ROUNDS = 64
"""Rounds of one pull: at 200 KiB each, more than a view can hold."""
DIGESTS_FROM_NODES = 32
"""Smaller views are listed at once (2 KiB): digests would cost one round trip more when two nodes meet."""
PULL_WORKERS = 4
"""So that a neighbour that does not answer holds up three others by nothing."""
PULLS_WAITING = 64
ANSWER_BYTES = MAX_CALL_BYTES - 16 * 1024
"""Of announcements in one answer; the rest is for the envelope."""
MAX_ANNOUNCED_LINKS = 40
"""The 16 that planners may have asked for, which come first, and twice those that a node wants or that want it. More would
only be connections from a smaller mesh's time; 250 bytes each, to everyone, each period."""
MAX_ANNOUNCED_SUSPECTS = 32
"""Who suspects more has lost its own network."""
OVERHEAD_BYTES = 64
"""Of one announcement in an answer: field names and lengths."""


@dataclass(frozen=True, slots=True)
class GossipStatistics:
    published: int
    published_bytes: int
    accepted: int
    """Announcements that told something newer."""
    stale: int
    refused: int
    """Forged, garbled, or without room."""
    pulls: int
    pulls_failed: int


class Gossip:
    """The driver of push and pull between `transport` and `view`."""

    def __init__(
        self,
        transport: Transport,
        own_card: OwnCard,
        view: View,
        *,
        links: Callable[[], tuple[Link, ...]],
        asked_for: Callable[[], Collection[NodeId]],
        suspects: Callable[[], tuple[tuple[NodeId, int], ...]],
        neighbours: Callable[[], Collection[NodeId]],
        on_merge: Callable[[Heard, MergeResult], None],
        rng: random.Random,
    ) -> None:
        """
        Args:
            transport: running, or about to.
            own_card: what to announce.
            view: what has been heard; written here only.
            links: this node's outgoing links, to announce with the card.
            asked_for: those of their targets that planners count on; few.
            suspects: whom this node does not reach, likewise.
            neighbours: those that may be asked now: connected and alive.
            on_merge: called with each announcement that was taken in, our own included, and what it was.
            rng: picks whom to ask.
        """
        self._transport, self._own_card, self._view = transport, own_card, view
        self._links, self._asked_for, self._suspects = links, asked_for, suspects
        self._neighbours, self._on_merge, self._rng = neighbours, on_merge, rng
        self._pace = Pace(own_card.card, -math.inf)
        self._wanted = Changes()
        self._soon, self._urgent = trio.Event(), trio.Event()
        """Set while such news waits to be announced."""
        self._asking: set[NodeId] = set()
        """Peers that a worker asks now or that wait for one."""
        self._send_ask, self._receive_ask = trio.open_memory_channel[NodeId](PULLS_WAITING)
        self._published = self._published_bytes = 0
        self._accepted = self._stale = self._refused = 0
        self._pulls = self._pulls_failed = 0
        transport.serve(PULL_VIEW, self._answer_pull)
        transport.serve(VIEW_DIGESTS, self._answer_digests)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._pace.told(self._own_card.card, trio.current_time())  # the first announcement is for the caller to make
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._publish_often, name="publish")
            nursery.start_soon(self._pull_often, name="pull now and then")
            for _ in range(PULL_WORKERS):
                nursery.start_soon(self._pull_as_asked, name="pull")
            task_status.started()

    def wake(self, *, urgent: bool = False) -> None:
        """The own card has changed: say so soon. `urgent`: who lives or what a seat is has, and others wait to hear of it,
        so it is not held back more in a large mesh.
        """
        self._soon.set()
        if urgent:
            self._urgent.set()
            self._pace.stir(trio.current_time())
        self._wanted.notify()

    def link_told(self) -> None:
        """Something is known of a link for the first time: say so soon; in a large mesh, with what follows it."""
        self._wanted.notify()

    def drifted(self) -> None:
        """Figures of links have moved: all hear of it within a period."""
        self._pace.drifted()

    def ask(self, peer: NodeId) -> None:
        """Pull from `peer` soon. Too many at once are dropped; the periodic pull makes up for it."""
        if peer in self._asking:
            return
        try:
            self._send_ask.send_nowait(peer)
        except trio.WouldBlock:
            return
        self._asking.add(peer)

    def receive(self, author: NodeId, payload: bytes) -> None:
        """A gossip message, as the transport delivered it."""
        try:
            signed = decode(SignedAnnouncement, payload, MAX_GOSSIP_BYTES)
            if signed.author != author:
                raise ProtocolError(f"{author} published an announcement of {signed.author[:80]!r}", expected="its own")  # noqa: TRY301
        except ProtocolError as error:
            self._refuse(error)
            return
        self._take(signed)

    async def publish(self) -> None:
        """Announce this node as it is now."""
        links, suspects = self._told(self._links()), self._suspects()[:MAX_ANNOUNCED_SUSPECTS]
        own = sign(self._own_card.next_version(), links, self._transport.sign, suspects)
        same = own.says_the_same_as(self._view.own)
        now = trio.current_time()
        if own.suspects or not own.stands_as(self._view.own):
            self._pace.stir(now)  # should this one be lost, the next is not far
        self._pace.told(own.card, now)
        self._view.set_own(own)
        self._on_merge(own, "refreshed" if same else "changed")
        payload = encode(own.signed)
        try:
            await self._transport.publish(payload)
        except MeshinferError as error:
            log.warning("the announcement of this node was not sent: %s", error)
            return
        self._published += 1
        self._published_bytes += len(payload)

    def _told(self, links: tuple[Link, ...]) -> tuple[Link, ...]:
        """As many of `links` as an announcement has room for, in their order."""
        if len(links) <= MAX_ANNOUNCED_LINKS:
            return links
        targets = [link.target for link in links]
        kept = most_wanted(self._transport.node_id, targets, MAX_ANNOUNCED_LINKS, self._asked_for())
        return tuple(link for link in links if link.target in kept)

    def statistics(self) -> GossipStatistics:
        return GossipStatistics(
            self._published,
            self._published_bytes,
            self._accepted,
            self._stale,
            self._refused,
            self._pulls,
            self._pulls_failed,
        )

    # --- push -----------------------------------------------------------------------------------

    async def _publish_often(self) -> None:
        watch = self._wanted.watch()
        credit, credited = float(BURST), trio.current_time()
        while True:
            due = self._due()
            # No longer than a period: meanwhile something may stir, or drift, that wakes nobody.
            with trio.move_on_at(min(due, trio.current_time() + PERIOD_SECONDS)) as silence:
                await watch.changed()
            now, rare = trio.current_time(), rarity(self._view.count)
            if silence.cancelled_caught and now < self._due():
                continue
            credit, credited = min(BURST, credit + (now - credited) / (SUSTAINED_SECONDS * rare)), now
            if credit >= 1:
                with trio.move_on_after(LINK_NEWS_SECONDS if rare > 1 else 0):
                    await self._soon.wait()
                await trio.sleep(COALESCE_SECONDS)
            else:
                with trio.move_on_after(SUSTAINED_SECONDS * (rare - 1)):
                    await self._urgent.wait()
                await trio.sleep(SUSTAINED_SECONDS)
            watch = self._wanted.watch()  # what changed while this slept travels now
            self._soon, self._urgent = trio.Event(), trio.Event()
            credit -= 1
            await self.publish()

    def _due(self) -> float:
        """When to announce this node though there is no news of it."""
        return self._pace.due(self._own_card.card, rarity(self._view.count), trio.current_time())

    # --- pull -----------------------------------------------------------------------------------

    async def _pull_often(self) -> None:
        next_pull = trio.current_time() + PULL_PERIOD_SECONDS * self._rng.uniform(0.5, 1)
        while True:
            await sleep_to_beat(PERIOD_SECONDS)
            now = trio.current_time()
            neighbours = sorted(self._neighbours())
            long_ago = 3 * PERIOD_SECONDS * rarity(self._view.count)
            silent = [peer for peer in neighbours if self._view.age_seconds(peer, now) > long_ago]
            if silent:
                self.ask(self._rng.choice(silent))
            if neighbours and now >= next_pull:
                next_pull = now + PULL_PERIOD_SECONDS
                self.ask(self._rng.choice(neighbours))

    async def _pull_as_asked(self) -> None:
        async for peer in self._receive_ask:
            try:
                self._pulls += 1
                await self._pull(peer)
            except MeshinferError as error:
                self._pulls_failed += 1
                log.debug("pulling the view of %s: %s", peer, error)
            finally:
                self._asking.discard(peer)

    async def _pull(self, peer: NodeId) -> None:
        slices: tuple[int, ...] = ()
        if self._view.count >= DIGESTS_FROM_NODES:
            answer = await self._transport.call(peer, VIEW_DIGESTS, b"", PULL_DEADLINE_SECONDS)
            pairs = zip(self._view.digests(), decode(ViewDigests, answer).digests, strict=False)
            slices = tuple(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
            if not slices:
                return
        for _ in range(PULL_ROUNDS):
            request = encode(PullView(self._view.known(slices), slices))
            answer = await self._transport.call(peer, PULL_VIEW, request, PULL_DEADLINE_SECONDS)
            pulled = decode(ViewPulled, answer)
            taken = 0
            for signed in pulled.announcements:
                taken += self._take(signed)
                await trio.lowlevel.checkpoint()  # a signature takes 0.1 ms to check; 100 of them would hold up pings
            if not pulled.more or not taken:
                return

    async def _answer_digests(self, _caller: NodeId, _payload: bytes) -> bytes:
        return encode(ViewDigests(self._view.digests()))

    async def _answer_pull(self, _caller: NodeId, payload: bytes) -> bytes:
        asked = decode(PullView, payload)
        known = asked.known
        order = self._own_card.card.order
        for node, incarnation, version in known:
            is_ahead = node == self._transport.node_id and (incarnation, version) > order
            if is_ahead and incarnation <= order[0] + MAX_CLAIMED_AHEAD:
                # The caller remembers a start of ours that we forgot; the card itself may have expired there.
                self._own_card.outbid(incarnation)
        chosen: list[SignedAnnouncement] = []
        size = 0
        more = False
        for heard in self._view.newer_than(known, asked.slices):
            size += heard.size_bytes + OVERHEAD_BYTES
            if size > ANSWER_BYTES and chosen:
                more = True
                break
            chosen.append(heard.signed)
        return encode(ViewPulled(tuple(chosen), more))

    # --- both -----------------------------------------------------------------------------------

    def _take(self, signed: SignedAnnouncement) -> bool:
        """Check and merge; whether it told something newer."""
        held = self._view.get(signed.author)
        if held is not None and held.signed == signed:
            self._stale += 1
            return False
        try:
            heard = check(signed, self._transport.verify)
        except ProtocolError as error:
            self._refuse(error)
            return False
        result = self._view.merge(heard, trio.current_time())
        if result == "outbid":
            self._own_card.outbid(heard.card.incarnation)
        if result == "stale":
            self._stale += 1
            return False
        if result == "full":
            self._refuse(f"{heard.author}: the view is full")
            return False
        self._accepted += 1
        if heard.suspects or (result != "refreshed" and (held is None or not heard.stands_as(held))):
            self._pace.stir(trio.current_time())
        self._on_merge(heard, result)
        return True

    def _refuse(self, reason: object) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th, 8th …: a flood must not flood the log
            log.warning("refused an announcement (%d so far): %s", self._refused, reason)
