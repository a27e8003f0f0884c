"""An exact engine without numbers: runners and their channels in one process, on trio's clock.

It answers the same control messages as a real runner and serves the same records, so that whole
agents run in a simulation. The next token is a pure function of (token ids so far, seed), so an
answer can be compared to the letter, whoever computed it and however often it was interrupted.

`FakeFabric` is the wire between runners: it knows who listens where, and does to runners what
`SimNetwork` does to agents (`kill`, `stop`, `resume` of a node). What it does not model: bandwidth,
memory that is really used, batching (sessions run side by side, each at its own pace).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from meshinfer.base.errors import PeerLost
from meshinfer.base.ids import NodeId, SessionId
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import ChannelOffer, ChannelRole
from meshinfer.wire.records import CancelSession, OpenSession, OriginRecord, RunnerRecord, SessionFailed, Token
from meshinfer.wire.runner_control import (
    AgentMessage,
    ChannelLost,
    DialChannel,
    ExpectChannel,
    Heartbeat,
    Linked,
    Listening,
    Loaded,
    Loading,
    LoadSeat,
    Rebind,
    RunnerMessage,
    StopRunner,
)

VOCABULARY = 256
HEARTBEAT_SECONDS = 0.5


def exact_token(token_ids: Sequence[int], seed: int) -> int:
    """The token that follows `token_ids`: what every FakeRunner computes."""
    content = ",".join(str(token) for token in token_ids)
    return hashlib.blake2b(f"{seed}:{content}".encode(), digest_size=1).digest()[0] % VOCABULARY


def exact_answer(prompt_ids: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
    """`count` tokens after `prompt_ids`, as any failure-free run gives them."""
    token_ids = list(prompt_ids)
    for _ in range(count):
        token_ids.append(exact_token(token_ids, seed))
    return tuple(token_ids[len(prompt_ids) :])


@dataclass(frozen=True, slots=True)
class FakeSpeed:
    """How fast a fake runner is."""

    start_seconds: float = 0.5
    load_seconds: float = 1.0
    step_seconds: float = 0.01
    """One token through one stage."""


class FakeFabric:
    """All fake runners and the channels between them."""

    def __init__(self, speed: FakeSpeed | None = None) -> None:
        self.speed = speed or FakeSpeed()
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

    async def open_channel(self, offer: ChannelOffer) -> FakeChannel:
        """For `Ports.open_channel`: an origin dials a runner."""
        await trio.lowlevel.checkpoint()
        runner = self.listener(offer)
        return FakeChannel(runner)

    def listener(self, offer: ChannelOffer) -> FakeRunner:
        """Raises PeerLost where nobody listens, or the token is not (or no longer) expected."""
        runner = self._listeners.get(offer.port)
        if runner is None or runner.dead or offer.token not in runner.expected:
            raise PeerLost(f"nobody who expects us listens on port {offer.port}")
        runner.expected.discard(offer.token)
        return runner

    def runners_of(self, node_id: NodeId) -> list[FakeRunner]:
        """Live runners of a node that have been told what seat to be: no spares."""
        return [runner for runner in self._processes_of(node_id) if runner.is_seated]

    def _processes_of(self, node_id: NodeId) -> list[FakeRunner]:
        return [runner for runner in self._listeners.values() if runner.node_id == node_id and not runner.dead]

    def kill(self, node_id: NodeId) -> None:
        """All runners of a node die at once."""
        self.resume(node_id)
        for runner in self._processes_of(node_id):
            runner.die("killed")

    def stop(self, node_id: NodeId) -> None:
        """SIGSTOP: channels stay open, nothing moves."""
        self._stopped.setdefault(node_id, trio.Event())

    def resume(self, node_id: NodeId) -> None:
        if event := self._stopped.pop(node_id, None):
            event.set()

    async def moves(self, node_id: NodeId) -> None:
        """Wait while the node is stopped."""
        while node_id in self._stopped:
            await self._stopped[node_id].wait()


@dataclass(eq=False)
class FakeChannel:
    """An origin's end of a channel to a fake runner."""

    runner: FakeRunner
    _closed: bool = False
    _send: trio.MemorySendChannel[RunnerRecord] = field(init=False)
    _receive: trio.MemoryReceiveChannel[RunnerRecord] = field(init=False)

    def __post_init__(self) -> None:
        # Unlike a socket it does not push back: a simulation's answers are short.
        self._send, self._receive = trio.open_memory_channel[RunnerRecord](100_000)
        self.runner.channels.append(self)

    async def send(self, record: OriginRecord) -> None:
        await trio.lowlevel.checkpoint()
        if self.runner.dead or self._closed:
            raise PeerLost("the runner is gone")
        await self.runner.take(record, self)

    async def receive(self) -> RunnerRecord:
        try:
            return await self._receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise PeerLost("the channel to the runner was closed") from error

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.hang_up()

    def deliver(self, record: RunnerRecord) -> None:
        if not self._closed:
            self._send.send_nowait(record)

    def hang_up(self) -> None:
        self._closed = True
        self._send.close()


class FakeRunner:
    """One seat's runner, as `serving.runners.Runner` has it."""

    def __init__(self, fabric: FakeFabric, node_id: NodeId, port: int) -> None:
        self.node_id = node_id
        self.port = port
        self.dead = ""
        """Why it is; empty while it lives."""
        self.expected: set[bytes] = set()
        self.channels: list[FakeChannel] = []
        self.sessions: dict[SessionId, trio.CancelScope] = {}
        self.is_seated = False
        self._fabric = fabric
        self._seat: LoadSeat | None = None
        self._neighbours: dict[ChannelRole, FakeRunner] = {}
        """role → the runner that we dialled."""
        self._listening: Listening | None = None
        self._heard = trio.Event()
        self._inbox_send, self._inbox = trio.open_memory_channel[AgentMessage](64)
        self._outbox_send, self._outbox = trio.open_memory_channel[RunnerMessage](1024)
        self._nursery: trio.Nursery | None = None
        self._tokens = 0
        self._broken = False

    # --- as the agent sees it -------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.port

    @property
    def is_alive(self) -> bool:
        return not self.dead

    @property
    def listening(self) -> Listening | None:
        return self._listening

    @property
    def heard(self) -> trio.Event:
        return self._heard

    async def send(self, message: AgentMessage) -> None:
        await trio.lowlevel.checkpoint()
        if self.dead:
            raise trio.BrokenResourceError
        match message:
            case ExpectChannel(token=token):
                self.expected.add(token)
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

    async def stop(self) -> None:
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

    # --- the runner itself ----------------------------------------------------------------------

    async def _live(self) -> None:
        speed = self._fabric.speed
        await self._pause(speed.start_seconds)
        async for message in self._inbox:
            match message:
                case LoadSeat():
                    self._say(Listening(self.port, b"fake"))
                    for tenth in range(10):
                        self._say(Loading(tenth, 10))
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
                    await self._pause(0.001)
                    try:
                        self._neighbours[message.role] = self._fabric.listener(message.offer)
                    except PeerLost as error:
                        self._break(message.role, str(error))
                    else:
                        self._say(Linked())
                case _:
                    pass

    def _be(self, seat: LoadSeat) -> None:
        self._seat, self._broken = seat, False
        self._neighbours.clear()
        if len(seat.placement.seats) == 1:
            self._say(Linked())

    async def _watch(self) -> None:
        """Notice at once when a neighbour that we dialled is gone."""
        while not self.dead:
            for role, neighbour in list(self._neighbours.items()):
                if neighbour.dead:
                    self._break(role, neighbour.dead)
            await self._pause(0.02)

    def _break(self, role: ChannelRole, why: str) -> None:
        if not self._broken:
            self._broken = True
            self._neighbours.clear()
            self._drop_sessions(f"the {role} channel broke: {why}")
            self._say(ChannelLost(role, 0, why))

    async def _beat(self) -> None:
        while not self.dead:
            await self._pause(HEARTBEAT_SECONDS)
            self._say(Heartbeat(self._tokens, 0.0, len(self.sessions), 0, 1000, 0, 1000, 0.01, self._tokens))

    async def take(self, record: OriginRecord, channel: FakeChannel) -> None:
        """Head: an origin's record."""
        match record:
            case OpenSession():
                if self._nursery is not None and not self.dead:
                    self._nursery.start_soon(self._run_session, record, channel)
            case CancelSession(session_id):
                if scope := self.sessions.get(session_id):
                    scope.cancel()

    async def _run_session(self, session: OpenSession, head_channel: FakeChannel) -> None:
        assert self._seat is not None
        if session.epoch != self._seat.epoch:
            head_channel.deliver(SessionFailed(session.session_id, "refused", f"epoch {session.epoch} is stale"))
            return
        with trio.CancelScope() as scope:
            self.sessions[session.session_id] = scope
            token_ids = list(session.token_ids)
            index = session.emitted
            while True:
                last = await self._step(self._seat.placement)
                if last is None:
                    head_channel.deliver(SessionFailed(session.session_id, "peer_lost", "a stage is gone"))
                    break
                token = exact_token(token_ids, session.sampling.seed)
                token_ids.append(token)
                done = index + 1 - session.emitted
                finish = "stop" if token in session.stop_token_ids else ""
                finish = finish or ("length" if done >= session.max_new_tokens else "")
                record = Token(session.session_id, index, token, finish)  # type: ignore[arg-type]
                for channel in last.channels:  # only its own origin knows the session
                    channel.deliver(record)
                self._tokens += 1
                index += 1
                if finish:
                    break
        self.sessions.pop(session.session_id, None)

    async def _step(self, placement: Placement) -> FakeRunner | None:
        """One token through every stage; the last one, or None if a stage is gone."""
        runner: FakeRunner = self
        for index in range(len(placement.seats)):
            await runner._pause(self._fabric.speed.step_seconds)
            if runner.dead or self.dead:
                return None
            if index < len(placement.seats) - 1:
                following = runner._neighbours.get("activations")
                if following is None:
                    return None
                runner = following
        return runner

    def _drop_sessions(self, why: str) -> None:
        for session_id, scope in list(self.sessions.items()):
            scope.cancel()
            for channel in self.channels:
                channel.deliver(SessionFailed(session_id, "peer_lost", why))

    async def _pause(self, seconds: float) -> None:
        await trio.sleep(seconds)
        await self._fabric.moves(self.node_id)

    def _say(self, message: RunnerMessage) -> None:
        if not self.dead:
            self._outbox_send.send_nowait(message)
