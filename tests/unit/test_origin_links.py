"""A link that cannot do what it must is lost, closed, and says whose fault it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from meshinfer.base.errors import BadInput, MeshinferError, PeerLost
from meshinfer.base.ids import InstanceId, NodeId, SessionId
from meshinfer.serving.events import EventStream
from meshinfer.serving.origin_links import OriginLink, OriginLinks
from meshinfer.serving.sessions import Sessions, TokenLog
from meshinfer.transport.origin import SEND_SECONDS
from meshinfer.wire.records import CancelSession, OpenSession, OriginRecord, RunnerRecord, Sampling, SessionFailed

HEAD, LAST = NodeId("a-head"), NodeId("b-last")
INSTANCE: Any = SimpleNamespace(
    instance_id=InstanceId("i"),
    epoch=1,
    placement=SimpleNamespace(
        placement_id="p",
        node_ids=(HEAD, LAST),
        seats=(SimpleNamespace(node_id=HEAD), SimpleNamespace(node_id=LAST)),
    ),
)


def session(number: int, tokens: int = 3) -> OpenSession:
    return OpenSession(SessionId(f"{number:032x}"), INSTANCE.instance_id, 1, (1,) * tokens, 0, 5, (), Sampling(seed=0))


class Channel:
    """As `transport.origin` has it: a record is sent whole, one after the other."""

    def __init__(self) -> None:
        self.sent: list[OriginRecord] = []
        self.takes = True
        self.closed = trio.Event()
        self._lock = trio.Lock()
        self.say, self._records = trio.open_memory_channel[RunnerRecord](9)

    async def send(self, record: OriginRecord) -> None:
        async with self._lock:
            if not self.takes:
                with trio.CancelScope(shield=True), trio.move_on_after(SEND_SECONDS):
                    await self.closed.wait()
                raise PeerLost("the channel to the runner is gone")
            self.sent.append(record)

    async def receive(self) -> RunnerRecord:
        try:
            return await self._records.receive()
        except trio.EndOfChannel:
            raise PeerLost("the runner closed the channel") from None

    async def aclose(self) -> None:
        self.closed.set()
        await trio.lowlevel.checkpoint()


class Mesh:
    """The ports and the seats of a node that has the whole instance to itself."""

    def __init__(self) -> None:
        self.channels: dict[int, Channel] = {}
        self.refused: set[int] = set()
        self.blamed: list[NodeId] = []
        self.node_id = NodeId("origin")
        self.origin_certificate_der = b""
        self.settings = SimpleNamespace(call_timeout_seconds=1.0)
        self.blame: Callable[[NodeId], None] = self.blamed.append

    def topology(self) -> Any:
        return SimpleNamespace(by_id={HEAD: 0, LAST: 0})

    def called(self, node: NodeId) -> str:
        return {HEAD: "anna", LAST: "ben"}[node]

    def watch(self) -> Any:
        return SimpleNamespace(changed=trio.sleep_forever)

    def doubtful(self) -> frozenset[NodeId]:
        return frozenset()

    out_of_reach = doubtful

    async def dial(self, _instance: Any, seat: int) -> Channel:
        await trio.lowlevel.checkpoint()
        if seat in self.refused:
            raise PeerLost(f"seat {seat} is not there")
        self.channels[seat] = Channel()
        return self.channels[seat]


@asynccontextmanager
async def connected(mesh: Mesh) -> AsyncIterator[OriginLinks]:
    links = OriginLinks(cast("Any", mesh), cast("Any", mesh))
    links._dial = mesh.dial  # type: ignore[method-assign, assignment]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(links.run)
        await trio.testing.wait_all_tasks_blocked()
        yield links
        nursery.cancel_scope.cancel()


async def relay(mesh: Mesh, link: OriginLink, records: Any) -> MeshinferError:
    sessions = Sessions(cast("Any", mesh), cast("Any", mesh), cast("Any", mesh))
    with pytest.raises(MeshinferError) as caught:
        await sessions._relay(records, link, TokenLog(), EventStream(9))
    return caught.value


async def test_a_cancel_that_cannot_be_sent_costs_the_link(autojump_clock: trio.testing.MockClock) -> None:
    """Else the head would work for nobody, and take the session's next opening for a second one."""
    mesh = Mesh()
    async with connected(mesh) as links, trio.open_nursery() as nursery:
        link = await links.get(INSTANCE)
        records = await link.open(session(1))
        mesh.channels[0].takes = False  # the socket is full of the next one's prompt

        async def open_second() -> None:
            with pytest.raises(PeerLost):
                await link.open(session(2, tokens=1000))

        nursery.start_soon(open_second)
        await trio.testing.wait_all_tasks_blocked()
        await link.end(session(1).session_id, cancel=True)
        assert "no cancel" in link.lost
        with pytest.raises(trio.EndOfChannel):
            await records.receive()
        await mesh.channels[0].closed.wait()
        await mesh.channels[1].closed.wait()
        # What comes next goes over a link of its own.
        again = await links.get(INSTANCE)
        assert again is not link
        await again.open(session(1))
        assert mesh.channels[0].sent == [session(1)]


async def test_a_cancel_that_arrives_costs_nothing(autojump_clock: trio.testing.MockClock) -> None:
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        await link.open(session(1))
        await link.end(session(1).session_id, cancel=True)
        assert mesh.channels[0].sent == [session(1), CancelSession(session(1).session_id)]
        assert (link.lost, await links.get(INSTANCE) is link) == ("", True)


async def test_where_the_head_is_not_there_the_last_stage_is_let_go() -> None:
    mesh = Mesh()
    mesh.refused.add(0)
    async with connected(mesh) as links:
        with pytest.raises(PeerLost, match="seat 0"):
            await links.get(INSTANCE)
        assert mesh.channels[1].closed.is_set()


@pytest.mark.parametrize(("seat", "node", "name"), [(0, HEAD, "anna"), (1, LAST, "ben")])
async def test_the_node_whose_channel_broke_is_blamed_and_named(
    seat: int, node: NodeId, name: str, autojump_clock: trio.testing.MockClock
) -> None:
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        records = await link.open(session(1))
        mesh.channels[seat].say.close()
        error = await relay(mesh, link, records)
    assert mesh.blamed == [node]
    assert f"node {name}: " in error.what
    assert error.do


@pytest.mark.parametrize("code", ["peer_lost", "refused"])
async def test_who_ended_a_session_is_named_and_what_to_do(code: str, autojump_clock: trio.testing.MockClock) -> None:
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        records = await link.open(session(1))
        await mesh.channels[1].say.send(SessionFailed(session(1).session_id, code, "killed by SIGKILL"))
        error = await relay(mesh, link, records)
        assert isinstance(error, PeerLost)
        assert "node ben ended" in error.what
        assert "SIGKILL" in error.what
        assert error.do
        await mesh.channels[0].say.send(SessionFailed(session(1).session_id, "bad_input", "513; expected 512"))
        error = await relay(mesh, link, records)
        assert (type(error), error.what) == (BadInput, "513; expected 512")
