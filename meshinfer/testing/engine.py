"""An exact engine without numbers: runners and their channels in one process, on trio's clock.

It answers the same control messages as a real runner and serves the same records, so that whole
agents run in a simulation; what it answers is known beforehand (`testing.exact_answers`).

`FakeFabric` is the wire between runners: it knows who listens where, and does to runners what
`SimNetwork` does to agents (`kill`, `stop`, `resume` of a node); latencies and cuts are the network's
own. As real runners do, a head gives up on a step that gets no answer in time, and a head whose
origin hung up, or has vanished, drops its sessions. Of more sessions than its placement has places for, the rest wait,
those that have begun before those that have not; a full queue takes no more. Every step is shown to `witness`, with the
epoch that it was sent for, so that a test can say who ran what. What it does not model: bandwidth, memory that is really
used (it counts the tokens that sessions hold), places that are held or given up for answers that have begun, batching
(sessions run side by side, each at its own pace).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import trio

from meshinfer.base.errors import PeerLost
from meshinfer.base.ids import InstanceId, NodeId, SessionId
from meshinfer.testing.clocks import shared_time, sleep_until_shared
from meshinfer.testing.exact_answers import exact_token
from meshinfer.testing.fake_channel import FakeChannel, certificate_of
from meshinfer.testing.fake_places import MAX_RETURNING, MAX_WAITING, FakePlaces
from meshinfer.testing.network import SimNetwork
from meshinfer.transport.dialling import Unanswered
from meshinfer.wire.messages import ChannelOffer, ChannelRole
from meshinfer.wire.records import CancelSession, OpenSession, OriginRecord, SessionFailed, Token
from meshinfer.wire.runner_control import (
    AgentMessage,
    ChannelLost,
    DialChannel,
    ExpectChannel,
    Heartbeat,
    Linked,
    LinkSample,
    Listening,
    Loaded,
    Loading,
    LoadSeat,
    OriginGone,
    Rebind,
    RunnerMessage,
    StopRunner,
)

HEARTBEAT_SECONDS = 0.25
"""As real ones."""
PATIENCE_SECONDS = 2.0
"""How long a head waits for one stage of a step: the floor of real heads."""
FIRST_PATIENCE_SECONDS, FIRST_STEPS = 5.0, 3
"""Before it has seen so many steps, as real ones."""
UNKNOWN_PATIENCE_SECONDS = 30.0
"""Before it has seen one."""
REHEARSED_TOKENS = 16
"""As real ones: what a runner knows of its pace before its first step."""
DIAL_SECONDS = 2.0
"""For an answer of any kind; real ones wait longer for a runner that loads."""
KEPT_SECONDS = 20.0
"""What broke off is kept so long once the pipeline is whole again, as by real ones."""


@dataclass(frozen=True, slots=True)
class FakeSpeed:
    """How fast a fake runner is."""

    start_seconds: float = 0.5
    load_seconds: float = 1.0
    step_seconds: float = 0.01
    """One token through one stage."""
    prefill_seconds_per_token: float = 0.0
    """One token of a prompt through one stage."""


@dataclass(frozen=True, slots=True)
class Step:
    """Some tokens through one stage."""

    node_id: NodeId
    instance_id: InstanceId
    epoch: int
    """That it was sent for; the runner's own, or it would have refused."""
    seat_index: int
    session_id: SessionId
    start: int
    """Position of the first token."""
    tokens: int


class FakeFabric:
    """All fake runners and the channels between them."""

    def __init__(self, network: SimNetwork, speed: FakeSpeed | None = None) -> None:
        self.network = network
        self.speed = speed or FakeSpeed()
        self.witness: Callable[[Step], None] = lambda _: None
        """Called for every step, after it."""
        self.max_waiting, self.max_returning = MAX_WAITING, MAX_RETURNING
        self._listeners: dict[int, FakeRunner] = {}
        self._stopped: dict[NodeId, trio.Event] = {}
        """Nodes that are stopped, each with what is set when they go on."""
        self._next_port = 20000

    def start_runner(self, node_id: NodeId) -> Callable[[], Awaitable[FakeRunner]]:
        """For `Ports.start_runner` of that node."""

        async def start() -> FakeRunner:
            runner = FakeRunner(self, node_id, self._next_port)
            self._next_port += 1
            self._listeners[runner.port] = runner
            return runner

        return start

    def open_channel(self, origin: NodeId) -> Callable[[ChannelOffer], Awaitable[FakeChannel]]:
        """For `Ports.open_channel` of that node."""

        async def dial(offer: ChannelOffer) -> FakeChannel:
            return FakeChannel(await self.dial(origin, offer), origin)

        return dial

    async def dial(self, source: NodeId, offer: ChannelOffer) -> FakeRunner:
        """There and back.

        Raises:
            Unanswered: nothing comes back.
            PeerLost: nobody listens, or the token is not expected (any more).
        """
        runner = self._listeners.get(offer.port)
        if runner is not None:
            with trio.move_on_after(DIAL_SECONDS) as scope:
                await self.network.carry(source, runner.node_id, channel=True)
                await self.moves(runner.node_id)
                await self.network.carry(runner.node_id, source, channel=True)
            if scope.cancelled_caught:
                raise Unanswered(f"port {offer.port} did not answer in {DIAL_SECONDS:.0f} s")
        return self.listener(offer)

    def listener(self, offer: ChannelOffer) -> FakeRunner:
        """Raises PeerLost where nobody listens, or the token is not (or no longer) expected."""
        runner = self._listeners.get(offer.port)
        if runner is None or runner.dead or offer.token not in runner.expected:
            raise PeerLost(f"nobody who expects us listens on port {offer.port}")
        runner.expected.discard(offer.token)
        return runner

    @property
    def runners(self) -> list[FakeRunner]:
        """All live ones that are seats."""
        return [runner for runner in self._listeners.values() if runner.is_seated and not runner.dead]

    def runners_of(self, node_id: NodeId) -> list[FakeRunner]:
        """Live runners of a node that have been told what seat to be: no spares."""
        return [runner for runner in self.processes_of(node_id) if runner.is_seated]

    def processes_of(self, node_id: NodeId) -> list[FakeRunner]:
        """Live runners of a node, spares too."""
        return [runner for runner in self._listeners.values() if runner.node_id == node_id and not runner.dead]

    def kill(self, node_id: NodeId) -> None:
        """All runners of a node die at once."""
        self.resume(node_id)
        for runner in self.processes_of(node_id):
            runner.die("killed")
        for runner in self.runners:
            for channel in [channel for channel in runner.channels if channel.origin == node_id]:
                channel.hang_up()

    def stop(self, node_id: NodeId) -> None:
        """SIGSTOP: channels stay open, nothing moves."""
        self._stopped.setdefault(node_id, trio.Event())

    def resume(self, node_id: NodeId) -> None:
        event = self._stopped.pop(node_id, None)
        if event is not None:
            event.set()

    async def moves(self, node_id: NodeId) -> None:
        """Wait while the node is stopped."""
        while node_id in self._stopped:
            await self._stopped[node_id].wait()


class FakeRunner:
    """One seat's runner, as `serving.runners.Runner` has it."""

    def __init__(self, fabric: FakeFabric, node_id: NodeId, port: int) -> None:
        self.node_id = node_id
        self.port = port
        self.dead = ""
        """Why it is; empty while it lives."""
        self.expected: set[bytes] = set()
        self.channels: list[FakeChannel] = []
        self.network = fabric.network
        self.sessions: dict[SessionId, tuple[FakeChannel, trio.CancelScope]] = {}
        """Head: all and only those that run or wait, each with its origin's channel and what ends it."""
        self.held: dict[SessionId, int] = {}
        """Tokens whose keys and values a real one would have: of all and only the sessions that its head has not ended."""
        self._kept: dict[SessionId, int] = {}
        """Those of sessions that broke off, until they are opened again or lapse."""
        self._lapses_at = math.inf
        """When they do; infinite while the pipeline is broken."""
        self.is_seated = False
        self._fabric = fabric
        self._seat: LoadSeat | None = None
        self._neighbours: dict[ChannelRole, FakeRunner] = {}
        """role → the runner that we dialled."""
        self._diallers: list[FakeRunner] = []
        """Those that dialled us."""
        self._listening: Listening | None = None
        self._heard = trio.Event()
        self._send_lock = trio.Lock()
        self._inbox_send, self._inbox = trio.open_memory_channel[AgentMessage](64)
        self._outbox_send, self._outbox = trio.open_memory_channel[RunnerMessage](1024)
        self._nursery: trio.Nursery | None = None
        self._places = FakePlaces()
        """Head: for its sessions."""
        self._tokens = 0
        self._steps = 0
        self._steps_led = 0
        """As head, in this epoch."""
        self._usual_seconds = 0.0
        """Of a token's step; 0 before the first."""
        self._broken = False
        self._hangs_since: float | None = None
        self._is_frozen = False
        self._started_at = shared_time()
        self._started_here_at = trio.current_time()

    # --- as the agent sees it -------------------------------------------------------------------

    @property
    def seat(self) -> LoadSeat | None:
        """What it is; None until its layers are loaded."""
        return self._seat

    @property
    def kept(self) -> int:
        """Tokens of sessions that broke off and may be opened again."""
        return sum(self._kept.values()) if shared_time() < self._lapses_at else 0

    @property
    def pid(self) -> int:
        return self.port

    @property
    def is_alive(self) -> bool:
        return not self.dead

    @property
    def started_at(self) -> float:
        return self._started_here_at

    @property
    def listening(self) -> Listening | None:
        return self._listening

    @property
    def heard(self) -> trio.Event:
        return self._heard

    async def send(self, message: AgentMessage) -> None:
        async with self._send_lock:  # keeps the order, as a real one's does
            await trio.lowlevel.checkpoint()
            self._take(message)

    def _take(self, message: AgentMessage) -> None:
        if self.dead:
            raise trio.BrokenResourceError
        match message:
            case ExpectChannel(token=token):
                self.expected.add(token)
            case OriginGone(certificate_der):
                for channel in [one for one in self.channels if certificate_of(one.origin) == certificate_der]:
                    channel.hang_up()
                    self.origin_lost(channel)
            case StopRunner():
                self.die("stopped")
            case LoadSeat() | DialChannel() | Rebind():
                self.is_seated = True
                self._inbox_send.send_nowait(message)

    async def listen(self, heard: Callable[[RunnerMessage], Awaitable[None]]) -> str:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if not self.dead:
                nursery.start_soon(self._live)
                nursery.start_soon(self._beat)
                nursery.start_soon(self._watch)
                async for message in self._outbox:
                    if isinstance(message, Listening):
                        self._listening = message
                        self._heard.set()
                    await heard(message)
            nursery.cancel_scope.cancel()
        return f"its runner was {self.dead}"

    async def stop(self, *, at_once: bool = False) -> None:
        del at_once
        with trio.CancelScope(shield=True):  # as a real one's
            await trio.lowlevel.checkpoint()
        self.die("stopped")

    def die(self, why: str) -> None:
        """The process is gone: its channels break, its neighbours notice."""
        if self.dead:
            return
        self.dead = why
        self._outbox_send.close()
        for channel in self.channels:
            channel.hang_up()

    def large_frame_came(self, seat: int, byte_count: int, seconds: float) -> None:
        """From that seat's runner; it says so as a real one does."""
        self._outbox_send.send_nowait(LinkSample(seat, byte_count, seconds))

    def hang(self, *, frozen: bool = False) -> None:
        """Its MLX thread does nothing any more; heartbeats go on, unless the whole process is `frozen`."""
        self._hangs_since, self._is_frozen = shared_time(), frozen

    # --- the runner itself ----------------------------------------------------------------------

    async def _live(self) -> None:
        speed = self._fabric.speed
        await sleep_until_shared(self._started_at + speed.start_seconds)  # a spare has done so already
        await self.moves()
        async for message in self._inbox:
            match message:
                case LoadSeat():
                    self._say(Listening(self.port, b"fake"))
                    for tenth in range(10):
                        self._say(Loading(tenth, 10, 1))
                        await self._pause(speed.load_seconds / 10)
                    self._say(Loaded(1000, 1000, speed.load_seconds))
                    self._be(message)
                case Rebind(epoch, placement, seat_index):
                    assert self._seat is not None
                    self._drop_sessions("its seat goes on in another epoch")
                    for channel in self.channels:
                        channel.hang_up()
                    self.channels.clear()
                    self._be(replace(self._seat, epoch=epoch, placement=placement, seat_index=seat_index))
                case DialChannel():
                    assert self._nursery is not None
                    self._nursery.start_soon(self._dial, message, self._seat)
                case _:
                    pass

    async def _dial(self, message: DialChannel, seat: LoadSeat | None) -> None:
        try:
            neighbour = await self._fabric.dial(self.node_id, message.offer)
            await self.moves()
        except PeerLost as error:
            if self._seat is seat:
                self._break(message.role, str(error), message.to_seat, unanswered=isinstance(error, Unanswered))
            return
        if seat is not None and self._seat is seat:
            self._neighbours[message.role] = neighbour
            neighbour._diallers.append(self)  # noqa: SLF001 - one of us
            self._say(Linked(seat.epoch))

    def _be(self, seat: LoadSeat) -> None:
        self._keep()
        self._seat, self._broken, self._steps_led = seat, False, 0
        self._lapses_at = shared_time() + KEPT_SECONDS
        self._neighbours.clear()
        self._diallers.clear()
        if len(seat.placement.seats) == 1:
            self._say(Linked(seat.epoch))

    async def _watch(self) -> None:
        """Notice at once when a neighbour that we dialled is gone."""
        while not self.dead:
            for role, neighbour in list(self._neighbours.items()):
                if neighbour.dead and self.network.passes(neighbour.node_id, self.node_id, channel=True):
                    self._break(role, neighbour.dead)
            if any(one.dead and self.network.passes(one.node_id, self.node_id, channel=True) for one in self._diallers):
                self._diallers.clear()
                self._keep()
            await self._pause(0.02)

    def _break(self, role: ChannelRole, why: str, seat: int = 0, *, unanswered: bool = False) -> None:
        if not self._broken:
            self._broken = True
            self._keep()
            self._neighbours.clear()
            self._drop_sessions(f"the {role} channel broke: {why}")
            assert self._seat is not None
            self._say(ChannelLost(self._seat.epoch, role, seat, why, unanswered))

    async def _beat(self) -> None:
        while not self.dead:
            await trio.sleep(HEARTBEAT_SECONDS)
            await self._fabric.moves(self.node_id)
            # Before it is loaded, it is in no step.
            hangs = self._hangs_since if self._seat is not None else None
            busy = shared_time() - hangs if hangs is not None else 0.0
            if not self._is_frozen:
                cached = sum(self.held.values())
                counts = (
                    self._steps,
                    busy,
                    self._places.taken or len(self.held),  # only a head has places
                    self._places.waiting,
                    1000,
                    cached,
                    1000,
                    self._usual_seconds,
                    self._tokens,
                )
                rehearsed = REHEARSED_TOKENS if self._seat is not None else 0
                self._say(Heartbeat(*counts, kept_bytes=self.kept, prompt_seconds=0.01, prompt_tokens=rehearsed))

    def take_channel(self, channel: FakeChannel) -> None:
        """An origin has dialled."""
        self.channels.append(channel)
        if self._nursery is not None and not self.dead:
            self._nursery.start_soon(channel.carry)

    def take(self, record: OriginRecord, channel: FakeChannel) -> None:
        """Head: an origin's record."""
        match record:
            case OpenSession() if self._broken:
                channel.deliver(SessionFailed(record.session_id, "peer_lost", "the instance is broken"))
            case OpenSession():
                if self._nursery is not None and not self.dead:
                    self._nursery.start_soon(self._run_session, record, channel)
            case CancelSession(session_id):
                if session_id in self.sessions and self.sessions[session_id][0] is channel:
                    self.sessions[session_id][1].cancel()

    def origin_lost(self, channel: FakeChannel) -> None:
        """Nobody is there any more for the sessions of this channel."""
        if channel in self.channels:
            self.channels.remove(channel)
        for owner, scope in list(self.sessions.values()):
            if owner is channel:
                scope.cancel()

    async def _run_session(self, session: OpenSession, head_channel: FakeChannel) -> None:
        seat = self._seat
        if seat is None or session.epoch != seat.epoch:
            head_channel.deliver(SessionFailed(session.session_id, "refused", f"epoch {session.epoch} is stale"))
            return
        places = self._places
        if places.waiting >= (self._fabric.max_returning if session.resumed else self._fabric.max_waiting):
            what = f"{places.taken} sessions run and {places.waiting} wait"
            head_channel.deliver(SessionFailed(session.session_id, "queue_full", what))
            return
        scope = trio.CancelScope()
        self.sessions[session.session_id] = (head_channel, scope)
        try:
            with scope:
                async with places.one_of(seat.placement.concurrency, self._rank(session)):
                    await self._compute(seat, session, head_channel)
        finally:
            if self.sessions.get(session.session_id, (None, None))[1] is scope:
                del self.sessions[session.session_id]
                self._forget(session.session_id)

    def _rank(self, session: OpenSession) -> int:
        """Lower ones go first: what has begun, then what was open before, then what is new."""
        has_begun = session.emitted > 0 or (session.resumed and session.session_id in self._kept)
        return 0 if has_begun else 1 if session.resumed else 2

    async def _compute(self, seat: LoadSeat, session: OpenSession, head_channel: FakeChannel) -> None:
        """One token after the other, until the last."""
        token_ids = list(session.token_ids)
        index, new = session.emitted, len(token_ids)
        while True:
            last = await self._step(seat, session.session_id, len(token_ids) - new, new)
            if last is None:
                head_channel.deliver(SessionFailed(session.session_id, "peer_lost", "a stage is gone"))
                return
            token = exact_token(token_ids, session.sampling.seed)
            token_ids.append(token)
            done = index + 1 - session.emitted
            finish = "stop" if token in session.stop_token_ids else ""
            finish = finish or ("length" if done >= session.max_new_tokens else "")
            record = Token(session.session_id, index, token, finish)  # type: ignore[arg-type]
            for channel in last.channels:
                if channel.origin == head_channel.origin:
                    channel.deliver(record)
            self._tokens += 1
            index, new = index + 1, 1
            if finish:
                return

    def _forget(self, session_id: SessionId) -> None:
        """Head: the session has ended; each stage hears of it from the one before, if it is still there."""
        runner: FakeRunner | None = self
        while runner is not None and not runner.dead:
            runner.held.pop(session_id, None)
            following = runner._neighbours.get("activations")  # noqa: SLF001 - one of us
            is_cut = following is None or not self.network.passes(runner.node_id, following.node_id, channel=True)
            runner = None if is_cut else following

    def _keep(self) -> None:
        """The pipeline is broken: what its sessions have may be of use to them yet."""
        self._kept = {**self._kept, **self.held} if shared_time() < self._lapses_at else dict(self.held)
        self._lapses_at = math.inf
        self.held.clear()

    async def _step(self, seat: LoadSeat, session_id: SessionId, start: int, tokens: int) -> FakeRunner | None:
        """`tokens` tokens through every stage; the last one, or None if a stage is gone."""
        speed = self._fabric.speed
        seconds = speed.step_seconds if tokens == 1 else speed.prefill_seconds_per_token * tokens
        stages = len(seat.placement.seats)
        patience = PATIENCE_SECONDS if self._steps_led >= FIRST_STEPS else FIRST_PATIENCE_SECONDS
        patience = patience if self._steps_led else UNKNOWN_PATIENCE_SECONDS
        with trio.move_on_after(patience + 5 * seconds * stages):
            runner = self
            for index in range(stages):
                step = Step(runner.node_id, seat.instance_id, seat.epoch, index, session_id, start, tokens)
                following = await runner.run_stage(step, seconds)
                if self.dead or following is None:
                    return None
                if index + 1 < stages:
                    await self.network.carry(runner.node_id, following.node_id, channel=True)
                runner = following
            await self.network.clear(runner.node_id, self.node_id, channel=True)
            self._steps_led += 1
            return runner
        await self.moves()
        if self._seat is seat:
            self._break("activations", f"a step had no answer for {patience:.0f} s")
        return None

    async def run_stage(self, step: Step, seconds: float) -> FakeRunner | None:
        """This stage's part of a step; who has the next one, itself if it is the last; None if it cannot."""
        await self._pause(seconds)
        seat = self._seat
        if self.dead or self._broken or seat is None or seat.epoch != step.epoch:
            return None
        self._kept.pop(step.session_id, None)
        self.held[step.session_id] = step.start + step.tokens
        self._steps += 1
        self._usual_seconds = 0.01 if step.tokens == 1 else self._usual_seconds
        self._fabric.witness(step)
        return self if step.seat_index == len(seat.placement.seats) - 1 else self._neighbours.get("activations")

    def _drop_sessions(self, why: str) -> None:
        for session_id, (channel, scope) in list(self.sessions.items()):
            scope.cancel()
            channel.deliver(SessionFailed(session_id, "peer_lost", why))

    async def moves(self) -> None:
        """Wait while its node is stopped or it hangs."""
        await self._fabric.moves(self.node_id)
        if self._hangs_since is not None:
            await trio.sleep_forever()

    async def _pause(self, seconds: float) -> None:
        await trio.sleep(seconds)
        await self.moves()

    def _say(self, message: RunnerMessage) -> None:
        if not self.dead:
            self._outbox_send.send_nowait(message)
