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
from meshinfer.transport.origin import PIECE_BYTES, STALL_SECONDS, OriginChannel
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
        self.takes = trio.Event()
        self.takes.set()
        self.closed = trio.Event()
        self.say, self._records = trio.open_memory_channel[RunnerRecord](9)

    async def send(self, record: OriginRecord) -> None:
        with trio.move_on_after(STALL_SECONDS) as stalled:
            await self.takes.wait()
        if stalled.cancelled_caught:
            raise PeerLost("the runner took nothing")
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
        self.silent: set[NodeId] = set()
        self.seen = (INSTANCE.epoch, "ready")
        """The instance in this node's view."""
        self.view_changed = trio.Event()
        self.node_id = NodeId("origin")
        self.origin_certificate_der = b""
        self.settings = SimpleNamespace(call_timeout_seconds=1.0)
        self.blame: Callable[[NodeId], None] = self.blamed.append

    def topology(self) -> Any:
        return SimpleNamespace(by_id={HEAD: 0, LAST: 0})

    def called(self, node: NodeId) -> str:
        return {HEAD: "anna", LAST: "ben"}[node]

    def watch(self) -> Any:
        return SimpleNamespace(changed=self._changed)

    async def _changed(self) -> None:
        await self.view_changed.wait()
        self.view_changed = trio.Event()

    async def see(self, epoch: int, state: str) -> None:
        self.seen = epoch, state
        self.view_changed.set()
        await trio.testing.wait_all_tasks_blocked()

    def instances(self) -> list[Any]:
        epoch, state = self.seen
        same = {"instance_id": INSTANCE.instance_id, "placement": INSTANCE.placement}
        return [SimpleNamespace(**same, epoch=epoch, state=state, error="a channel broke")]

    def doubtful(self) -> frozenset[NodeId]:
        return frozenset(self.silent)

    def out_of_reach(self) -> frozenset[NodeId]:
        return frozenset()

    async def dial(self, _instance: Any, seat: int) -> Channel:
        await trio.lowlevel.checkpoint()
        if INSTANCE.placement.node_ids[seat] in self.silent:
            await trio.sleep_forever()
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


async def test_who_leaves_while_another_s_prompt_is_on_its_way_disturbs_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its cancel is the next that is sent; a session that the head has not heard of needs none."""
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        head = mesh.channels[0]
        link.open(session(1))
        await trio.testing.wait_all_tasks_blocked()
        head.takes = trio.Event()
        for number in (2, 3, 4):
            link.open(session(number, tokens=1000))
        await trio.sleep(0.9 * STALL_SECONDS)  # the second's is slow
        for number in (1, 3):
            link.end(session(number).session_id, cancel=True)
        head.takes.set()
        await trio.testing.wait_all_tasks_blocked()
        first, second, fourth = session(1), session(2, tokens=1000), session(4, tokens=1000)
        assert head.sent == [first, second, CancelSession(first.session_id), fourth]
        assert (link.lost, link.sessions) == ("", 2)


async def test_many_prompts_that_take_their_time_all_get_there(autojump_clock: trio.testing.MockClock) -> None:
    """However long the last one waits for its turn."""
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        here, there = trio.testing.lockstep_stream_pair()
        mesh.channels[0].send = OriginChannel(here).send  # type: ignore[method-assign]
        for number in range(8):
            link.open(session(number, tokens=PIECE_BYTES))
        read = 0
        with trio.move_on_after(8 * STALL_SECONDS):
            while True:
                read += len(await there.receive_some(PIECE_BYTES))
                await trio.sleep(STALL_SECONDS / 5)
        assert read > 8 * PIECE_BYTES
        assert link.lost == ""


async def test_a_head_that_takes_nothing_costs_the_link(autojump_clock: trio.testing.MockClock) -> None:
    """Else it would work for nobody, and take a session's next opening for a second one."""
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        mesh.channels[0].takes = trio.Event()
        records = link.open(session(1))
        with pytest.raises(trio.EndOfChannel):
            await records.receive()
        assert "took nothing" in link.lost
        await mesh.channels[0].closed.wait()
        await mesh.channels[1].closed.wait()
        # What comes next goes over a link of its own.
        again = await links.get(INSTANCE)
        assert again is not link
        again.open(session(1))
        await trio.testing.wait_all_tasks_blocked()
        assert mesh.channels[0].sent == [session(1)]


async def test_a_session_that_is_opened_again_is_cancelled_first() -> None:
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        link.open(session(1))
        await trio.testing.wait_all_tasks_blocked()
        link.end(session(1).session_id, cancel=True)
        link.open(session(1))
        await trio.testing.wait_all_tasks_blocked()
        assert mesh.channels[0].sent == [session(1), CancelSession(session(1).session_id), session(1)]
        assert (link.lost, await links.get(INSTANCE) is link) == ("", True)


async def test_an_instance_that_the_view_calls_broken_has_no_link() -> None:
    """Nothing breaks at this end where two seats are cut off from each other."""
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        records = link.open(session(1))
        await mesh.see(INSTANCE.epoch, "broken")
        assert "a channel broke" in link.lost
        with pytest.raises(trio.EndOfChannel):
            await records.receive()


@pytest.mark.parametrize(("epoch", "state"), [(0, "broken"), (2, "placing"), (2, "broken"), (1, "loading")])
async def test_what_the_view_says_of_another_epoch_ends_no_link(epoch: int, state: str) -> None:
    """An old view is late, and the next epoch may come to nothing."""
    mesh = Mesh()
    async with connected(mesh) as links:
        link = await links.get(INSTANCE)
        await mesh.see(epoch, state)
        assert link.lost == ""


@pytest.mark.parametrize(("seat", "node", "name"), [(0, HEAD, "anna"), (1, LAST, "ben")])
async def test_a_node_that_is_silent_is_not_waited_for(
    seat: int, node: NodeId, name: str, autojump_clock: trio.testing.MockClock
) -> None:
    mesh = Mesh()
    mesh.silent.add(node)
    async with connected(mesh) as links:
        with pytest.raises(PeerLost, match=f"node {name} does not answer any more"):
            await links.get(INSTANCE)
        assert 1 not in mesh.channels or mesh.channels[1].closed.is_set()


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
        records = link.open(session(1))
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
        records = link.open(session(1))
        await mesh.channels[1].say.send(SessionFailed(session(1).session_id, code, "killed by SIGKILL"))
        error = await relay(mesh, link, records)
        assert isinstance(error, PeerLost)
        assert "node ben ended" in error.what
        assert "SIGKILL" in error.what
        assert error.do
        await mesh.channels[0].say.send(SessionFailed(session(1).session_id, "bad_input", "513; expected 512"))
        error = await relay(mesh, link, records)
        assert (type(error), error.what) == (BadInput, "513; expected 512")
