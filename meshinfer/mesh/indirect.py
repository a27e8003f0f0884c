"""Does a silent neighbour answer others? SWIM's indirect probe: a few of them ping it for us, at once.

Whoever is asked answers within a third of a second, also when the answer is no. Silence on the part of those
we ask is news of another kind: it may be that nobody hears *us*.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import trio
from trio import TaskStatus

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import NodeId
from meshinfer.mesh.membership_events import OthersDoNot, OthersReach
from meshinfer.mesh.prober import FOR_ANOTHER
from meshinfer.transport.base import Transport
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import PING, PING_FOR_ME, PingedForYou, PingForMe

RELAYS = 3
"""SWIM's k. One may be behind the same broken switch; each more is a call and a ping per suspicion."""
PING_SECONDS = 0.3
"""What the one who is asked gives the target. Round trips on the networks we serve take up to 100 ms."""
ASK_SECONDS = 0.45
"""Below the half second that a lost connection has to come back."""
REQUEST_BYTES = 256


class IndirectProbes:
    """Asks others, and answers them."""

    def __init__(
        self,
        transport: Transport,
        relays: Callable[[NodeId], Collection[NodeId]],
        on_event: Callable[[OthersReach | OthersDoNot], None],
        rng: random.Random,
    ) -> None:
        """
        Args:
            transport: carries the questions.
            relays: whom to ask about a node; some of them are picked.
            on_event: told of each question's outcome.
            rng: picks them.
        """
        self._transport, self._relays, self._on_event, self._rng = transport, relays, on_event, rng
        self._nursery: trio.Nursery | None = None
        self._asking: set[NodeId] = set()
        """About whom a question is under way."""
        transport.serve(PING_FOR_ME, self._answer)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # it takes no more tasks

    def ask(self, target: NodeId) -> None:
        """Find out, and tell `on_event`; nothing while a question about `target` is under way."""
        if self._nursery is not None and target not in self._asking:
            self._asking.add(target)
            self._nursery.start_soon(self._ask, target, name=f"ask others about {target}")

    async def _ask(self, target: NodeId) -> None:
        candidates = sorted(self._relays(target))
        relays = self._rng.sample(candidates, min(RELAYS, len(candidates)))
        reached_by: list[NodeId] = []
        unanswered = 0

        async def ask_one(relay: NodeId, scope: trio.CancelScope) -> None:
            nonlocal unanswered
            try:
                request = encode(PingForMe(target))
                answer = await self._transport.call(relay, PING_FOR_ME, request, ASK_SECONDS)
                reached = decode(PingedForYou, answer).reached
            except MeshinferError:
                unanswered += 1
                return
            if reached:
                reached_by.append(relay)
                scope.cancel()  # one is enough

        try:
            async with trio.open_nursery() as nursery:
                for relay in relays:
                    nursery.start_soon(ask_one, relay, nursery.cancel_scope)
        finally:
            self._asking.discard(target)
        self._on_event(OthersReach(target, reached_by[0]) if reached_by else OthersDoNot(target, unanswered))

    async def _answer(self, _caller: NodeId, payload: bytes) -> bytes:
        target = decode(PingForMe, payload, REQUEST_BYTES).target
        reached = False
        # Only neighbours: nobody makes this node dial, or look for, anyone.
        if target in self._transport.peers():
            try:
                reached = await self._transport.call(target, PING, FOR_ANOTHER, PING_SECONDS) == FOR_ANOTHER
            except MeshinferError:
                reached = False
        return encode(PingedForYou(reached))
