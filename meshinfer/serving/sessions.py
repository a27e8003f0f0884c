"""A request's life at its origin: an instance, a session on it, tokens in order, an end.

The origin keeps the token log (prompt, emitted ids, seed): enough to go on anywhere. When the
instance breaks, the request waits for its next epoch (or for another placement) and opens its
session there with the log as its prompt. Sampling is a function of (seed, position), so what comes
is what would have come; tokens carry their index, so one that is here already is dropped and a
missing one is noticed. The client sees a pause.

Cancelling is closing: leaving the context ends the session on every stage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import trio

from meshinfer.base.errors import (
    ERRORS_BY_CODE,
    BadInput,
    DeadlineExceeded,
    MeshinferError,
    NodeLeaving,
    NoRoom,
    PeerLost,
    QueueFull,
    UnknownModel,
)
from meshinfer.base.ids import NodeId, SessionId
from meshinfer.base.looking import until
from meshinfer.planning.workload import Workload
from meshinfer.serving.events import EventStream
from meshinfer.serving.origin_links import Heard, OriginLink, OriginLinks
from meshinfer.serving.placing import Begun, Placer
from meshinfer.serving.ports import Ports
from meshinfer.serving.requests import Finished, Generated, GenerateRequest, GenerationFailed, Waiting
from meshinfer.serving.view import Instance
from meshinfer.topology.placement import Placement
from meshinfer.wire.records import OpenSession, Prefilled, RunnerRecord, SessionFailed, Token

log = logging.getLogger(__name__)

EVENT_BUFFER = 16
"""Between a session and its HTTP response: enough for a burst; beyond it the session's own queue holds the rest."""
DRAIN_SECONDS = 15.0
"""How long a node that leaves waits for its own clients' answers once its seats are others', since until then they may
have stood still; and for others' answers through seats that nobody could take. With the 20 s for that it is within the
agent's 45 s. Raising it keeps the person waiting."""
_ELSEWHERE = "ask again at another node"
SILENCE_SECONDS = 1.0
"""Without a token, while a node of the instance does not answer pings either: then it is not slow but gone."""
LOOK_SECONDS = 0.1
"""How often that is looked at once a second has been silent."""
NO_ROOM_SECONDS = 8.0
"""How long an answer that has begun waits for room, with signs of life to its client: a node that was buried while it
lives refutes that in seconds, and a restarted agent is back in five. A request that has not begun is told at once."""
LESS_ROOM_SECONDS = 6.0
"""Of these, before it makes do with less context, if that fits. Others of its instance may need all of what was reserved,
and cannot have it back before they end: so not before a restarted agent is there."""
SIGN_SECONDS = 1.0
"""Between two signs of life of a request that waits for room. It is asked for again then, and whenever the mesh changes.
Also the longest that one waits to ask a head with a full queue again: a place comes free with every answer that ends."""
MAX_FAILURES = 6
"""Attempts in a row that brought no token..."""
FAILING_SECONDS = 10.0
"""...and for how long, before the last of their reasons is the answer's. Where nodes lose sight of each other, as over a
stalled line, six repairs can break within two seconds; what they disagree on is settled in seven (`mesh.view`)."""
RETRY_SECONDS = 0.15
"""Times the number of failures: for the news of what broke to reach the view, which takes milliseconds, or, for a
stopped node, the rest of the three seconds."""
CANCEL_SECONDS = 2.0
"""For a request's task to end, before its client's response is given up: a channel that was being opened is closed."""
READY_SECONDS = 1.0
"""For a task of our own to run once; longer means that the event loop is held up."""
_ASK_AGAIN = "ask again: the model will be placed on the nodes that are left"


@dataclass(slots=True)
class TokenLog:
    """What has been emitted, in order; decides about each token that arrives."""

    emitted: list[int] = field(default_factory=list[int])
    model_digest: str = ""
    """Of the weights that go on with it."""
    reserved: Workload | None = None
    """Where it was last."""

    def goes_on_with(self, placement: Placement) -> None:
        """Raises GenerationFailed where other weights wrote what is there: two versions of a model are in the room."""
        model_digest = placement.model_digest
        if self.emitted and self.model_digest != model_digest:
            raise GenerationFailed(
                f"the answer's {len(self.emitted)} tokens were written by version {self.model_digest[:12]} of the model, "
                f"and what could go on is version {model_digest[:12]}",
                do="ask again; `meshinfer models rm` one of the two versions, so that all nodes have the same",
            )
        self.model_digest = model_digest
        self.reserved = Workload(placement.context_tokens, placement.concurrency)

    def accept(self, token: Token) -> bool:
        """Whether `token` is the next one; False if it is here already.

        Raises:
            PeerLost: one before it is missing, so the channel that brought it cannot be relied on.
        """
        if token.index < len(self.emitted):
            return False
        if token.index > len(self.emitted):
            raise PeerLost(f"token {len(self.emitted)} is missing: {token.index} came")
        self.emitted.append(token.token_id)
        return True


class Sessions:
    """All requests that entered the mesh through this node."""

    def __init__(self, ports: Ports, placer: Placer, links: OriginLinks) -> None:
        self._ports = ports
        self._placer = placer
        self._links = links
        self._running: dict[SessionId, trio.CancelScope] = {}
        """All and only requests in flight, each with what ends it."""
        self._nursery: trio.Nursery | None = None
        self._is_drained = False
        """What runs still is ended because this node leaves."""

    async def run(self) -> None:
        """Own the tasks of all requests until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def ready(self) -> tuple[bool, str]:
        """Whether a request would get as far as its instance: the tasks that carry it run; and why not."""
        if self._nursery is None:
            return False, "the node is starting"
        if self._ports.is_draining:
            return False, "the node is about to leave"
        answered = trio.Event()
        self._nursery.start_soon(_touch, answered)
        with trio.move_on_after(READY_SECONDS):
            await answered.wait()
            return True, ""
        return False, f"the request tasks did not answer within {READY_SECONDS:.0f} s"

    async def drain(self) -> None:
        """Wait a while for the requests in flight, then end those that are left, each with an error that says so.

        A node that drains takes no more.
        """
        await self._until_none_runs(DRAIN_SECONDS)
        self._is_drained = True
        for scope in self._running.values():
            scope.cancel()
        await self._until_none_runs(CANCEL_SECONDS)

    async def _until_none_runs(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await until(lambda: not self._running, 0.1)  # each ends in its own place; a tenth is soon enough

    @property
    def count(self) -> int:
        return len(self._running)

    def cancel(self, session_id: SessionId) -> bool:
        """End a request by its id; its client gets an error. False if it is not here."""
        scope = self._running.get(session_id)
        if scope is not None:
            scope.cancel()
        return scope is not None

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EventStream]:
        """Run `request`; leaving the context cancels it everywhere.

        Raises:
            NoRoom: this node has as many requests as it may.
            NodeLeaving: it takes no more.
        """
        limit = self._ports.settings.request_queue_limit
        if len(self._running) >= limit:
            raise NoRoom(f"this node has {limit} requests in flight", do="try again in a moment, or ask another node")
        if self._ports.is_draining:
            raise NodeLeaving("this node is leaving", do=_ELSEWHERE)
        if self._nursery is None:
            raise NoRoom("this node is starting", do="try again in a moment, or ask another node")
        events, scope, done = EventStream(EVENT_BUFFER), trio.CancelScope(), trio.Event()
        self._running[request.session_id] = scope
        # Not in a nursery of our own: what the reader raises would come out wrapped in a group.
        self._nursery.start_soon(self._run, request, events, scope, done)
        try:
            yield events
        finally:
            del self._running[request.session_id]
            scope.cancel()
            with trio.move_on_after(CANCEL_SECONDS, shield=True):
                await done.wait()

    async def _run(
        self, request: GenerateRequest, events: EventStream, scope: trio.CancelScope, done: trio.Event
    ) -> None:
        error: MeshinferError | None = None
        try:
            with scope:
                with trio.fail_after(request.deadline_seconds):
                    await self._answer(request, events)
        except trio.TooSlowError:
            error = DeadlineExceeded(
                f"the request took longer than {request.deadline_seconds:.0f} s",
                do="ask for less, or raise the deadline",
            )
        except MeshinferError as failure:
            error = failure
        finally:
            done.set()
        if scope.cancelled_caught and self._is_drained:
            error = NodeLeaving("this node is leaving, and the answer was not complete in time", do=_ELSEWHERE)
        elif scope.cancelled_caught:
            error = GenerationFailed("the request was cancelled")
        events.end(error)

    async def _answer(self, request: GenerateRequest, events: EventStream) -> None:
        """One attempt after the other, each going on where the last one broke off."""
        token_log = TokenLog()
        failures, failing_since = 0, 0.0
        refusals = 0
        """In a row, by a head with a full queue."""
        resumed = False
        avoid: frozenset[NodeId] = frozenset()
        no_room = ""
        """What was said last of what is missing."""
        no_room_since = math.inf
        watch = self._ports.watch()
        while True:
            emitted = len(token_log.emitted)
            instance: Instance | None = None
            makes_do = trio.current_time() >= no_room_since + LESS_ROOM_SECONDS
            try:
                instance = await self._find(request, token_log, events, avoid, resumed=resumed, makes_do=makes_do)
                return await self._run_on(instance, request, token_log, events, resumed=resumed)
            except (NoRoom, UnknownModel) as error:  # the only node with the files may be the one that was lost
                now = trio.current_time()
                no_room_since = min(no_room_since, now)
                if not resumed or now >= no_room_since + NO_ROOM_SECONDS:
                    raise
                if str(error) != no_room:
                    no_room = str(error)
                    log.info("request %s waits for room: %s", request.session_id, no_room)
                events.send_nowait(Waiting("repairing", 0.0))
                await trio.sleep(RETRY_SECONDS)
                with trio.move_on_after(SIGN_SECONDS):
                    await watch.changed()
                avoid = self._ports.out_of_reach()
            except QueueFull:
                if not resumed:
                    raise
                # Its client may have read a part of it, and all that is missing is its turn: until the deadline it waits.
                refusals += 1
                events.send_nowait(Waiting("queued", 0.0))
                await trio.sleep(min(SIGN_SECONDS, RETRY_SECONDS * refusals))
                avoid = self._ports.out_of_reach()
            except PeerLost as error:
                # Anything else is the request's own, and would come again.
                resumed, refusals = True, 0
                if len(token_log.emitted) > emitted:
                    failures = 0
                if instance:  # there was room for it: another fault, also before the next token, has time of its own
                    no_room, no_room_since = "", math.inf
                failing_since = failing_since if failures else trio.current_time()
                failures += 1
                avoid = self._ports.out_of_reach()
                if instance and failures > 1:  # others may use what one dial in vain is no reason to move
                    avoid |= self._ports.blocked_ends(instance.placement)
                if failures > MAX_FAILURES and trio.current_time() > failing_since + FAILING_SECONDS:
                    raise
                written = len(token_log.emitted)
                # Without what it tells a client to do: nobody has to do anything.
                log.info("request %s goes on after %d tokens: %s", request.session_id, written, error.what)
                events.send_nowait(Waiting("repairing", 0.0))
                await trio.sleep(RETRY_SECONDS * min(failures, MAX_FAILURES))

    async def _find(
        self,
        request: GenerateRequest,
        token_log: TokenLog,
        events: EventStream,
        avoid: frozenset[NodeId],
        *,
        resumed: bool,
        makes_do: bool,
    ) -> Instance:
        """Where the request can go on.

        What others of its instance may need is asked for first; if that fits nowhere, what sufficed where it was; and if it
        `makes_do`, no more than it needs itself.
        """

        def waiting(sign: Waiting) -> None:
            # To a client whose answer has begun, planning is a part of its repair and no news.
            is_repair = resumed and sign.phase == "planning"
            events.send_nowait(Waiting("repairing", sign.done) if is_repair else sign)

        tokens, wanted = _tokens_of(request, token_log)
        usual, was = request.workload, token_log.reserved
        begun = Begun(token_log.model_digest, wanted) if token_log.model_digest else None
        wishes = [usual]
        if was is not None:
            sufficed = min(usual.context_tokens, was.context_tokens), min(usual.concurrency, was.concurrency)
            wishes.append(Workload(*sufficed))
        if makes_do:
            wishes.append(Workload(max(request.least_context_tokens or usual.context_tokens, wanted), 1))

        async def find(wish: Workload) -> Instance:
            needs = tokens if wish == usual else wanted
            return await self._placer.ready_instance(request.model_id, wish, waiting, avoid, needs, begun)

        *sooner, last = dict.fromkeys(wishes)
        for wish in sooner:
            with suppress(NoRoom):
                return await find(wish)
        return await find(last)

    async def _run_on(
        self, instance: Instance, request: GenerateRequest, token_log: TokenLog, events: EventStream, *, resumed: bool
    ) -> None:
        """Run what is left of the request there.

        Raises:
            PeerLost: the instance broke; what came until then is in the log.
        """
        emitted = len(token_log.emitted)
        tokens, wanted = _tokens_of(request, token_log)
        tokens = max(wanted, min(tokens, instance.placement.context_tokens))
        _check_context(request, tokens, instance)
        token_log.goes_on_with(instance.placement)
        link = await self._links.get(instance)
        session = OpenSession(
            session_id=request.session_id,
            instance_id=instance.instance_id,
            epoch=instance.epoch,
            token_ids=(*request.prompt_ids, *token_log.emitted),
            emitted=emitted,
            max_new_tokens=tokens - len(request.prompt_ids) - emitted,
            stop_token_ids=request.stop_token_ids,
            sampling=request.sampling,
            resumed=resumed,
        )
        ended = False
        try:
            records = link.open(session)
            if resumed:
                log.info("request %s is open again, in epoch %d", request.session_id, instance.epoch)
            reason = await self._relay(records, link, token_log, events)
            ended = True
        finally:
            link.end(request.session_id, cancel=not ended)
        await events.send(Finished(reason, instance.placement.node_ids))

    async def _relay(
        self,
        records: trio.MemoryReceiveChannel[Heard],
        link: OriginLink,
        token_log: TokenLog,
        events: EventStream,
    ) -> Literal["stop", "length"]:
        """Pass tokens on until the last one."""
        nodes = link.instance.placement.node_ids
        # The head takes the session in, the last stage sends the tokens; what is between them is not ours to reach.
        ends = {link.instance.placement.seats[index].node_id for index in (0, -1)}
        patience = SILENCE_SECONDS
        while True:
            heard = None
            with trio.move_on_after(patience):
                try:
                    heard = await records.receive()
                except trio.EndOfChannel:
                    break
            if heard is not None:
                if reason := await self._take(*heard, token_log, events):
                    return reason
                patience = SILENCE_SECONDS
                continue
            patience = LOOK_SECONDS
            # A stopped machine keeps its sockets open. Slow is not gone: a neighbour's long prompt may be in the way.
            if silent := self._ports.doubtful().intersection(nodes):
                raise PeerLost(f"node {self._ports.called(min(silent))} does not answer any more")
            if silent := self._ports.out_of_reach() & ends:
                raise PeerLost(f"node {self._ports.called(min(silent))} answers others, but not this node")
        if link.lost_node is not None:
            self._ports.blame(link.lost_node)
        raise PeerLost(
            f"the answer broke off after {len(token_log.emitted)} tokens: {link.lost or 'the session was dropped'}",
            do=_ASK_AGAIN,
        )

    async def _take(
        self, node: NodeId, record: RunnerRecord, token_log: TokenLog, events: EventStream
    ) -> Literal["", "stop", "length"]:
        """Take in one record that `node` sent; why the answer ends with it, or ''."""
        match record:
            case Prefilled(_, tokens, total):
                events.send_nowait(Waiting("prefill", tokens / total if total else 1.0))
            case SessionFailed(_, code, what):
                # refused: the runner has another epoch by now, so the instance that was meant is gone; or what is left
                # of a lost channel has not ended yet.
                kind = PeerLost if code == "refused" else ERRORS_BY_CODE.get(code, GenerationFailed)
                if kind is BadInput:
                    raise kind(what)
                if kind is QueueFull:
                    raise kind(f"node {self._ports.called(node)} takes no more now: {what}", do="ask again in a moment")
                do = _ASK_AGAIN if kind is PeerLost else "ask again in a moment"
                raise kind(f"node {self._ports.called(node)} ended the answer: {what}", do=do)
            case Token():
                if token_log.accept(record):
                    await events.send(Generated(record.index, record.token_id, record.logprob, record.top_logprobs))
                    return record.finish
        return ""


async def _touch(event: trio.Event) -> None:
    await trio.lowlevel.checkpoint()
    event.set()


def _tokens_of(request: GenerateRequest, token_log: TokenLog) -> tuple[int, int]:
    """(of context that prompt and whole answer take, that it needs at least to go on)."""
    tokens = len(request.prompt_ids) + request.max_new_tokens
    return tokens, len(request.prompt_ids) + len(token_log.emitted) + 1 if request.is_open_ended else tokens


def _check_context(request: GenerateRequest, tokens: int, instance: Instance) -> None:
    """Raises BadInput where prompt and answer, `tokens` in all, do not fit what was reserved."""
    reserved = instance.placement.context_tokens
    if tokens > reserved:
        more = tokens - len(request.prompt_ids)
        raise BadInput(
            f"the prompt has {len(request.prompt_ids)} tokens and {more} more may be generated",
            expected=f"at most {reserved} in all, the context that is reserved for {instance.placement.model_id}",
            do="shorten the prompt, lower max_tokens, or place the model with a larger context",
        )
