"""Real transports on loopback, each in a home of its own, all of one mesh unless said otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from meshinfer.base.ids import NodeId
from meshinfer.transport.base import Transport
from meshinfer.transport.libp2p import Libp2pSettings, Libp2pTransport
from meshinfer.transport.mesh_key import MeshKey, parse_join_code

KEY = MeshKey.from_join_code(parse_join_code("abacus abdomen abdominal abide abiding ability"))
OTHER_KEY = MeshKey.from_join_code(parse_join_code("zoom zoning zone zombie zoology ability"))

# Nothing here takes a second when the machine is free; it is shared, so a lost event should not look like a slow one.
PATIENCE_SECONDS = 20


@dataclass
class Nodes:
    """Starts transports in a nursery, by name; a name is a home, so starting one again is a restart."""

    nursery: trio.Nursery
    directory: Path
    scopes: dict[NodeId, trio.CancelScope]
    ended: dict[NodeId, trio.Event]

    def make(self, name: str, key: MeshKey = KEY, **settings: object) -> Libp2pTransport:
        home = self.directory / name
        chosen = {"listen_host": "127.0.0.1", "include_loopback": True, **settings}
        return Libp2pTransport(Libp2pSettings(home=home, mesh_key=key, **chosen))

    async def start(self, name: str, key: MeshKey = KEY, **settings: object) -> Libp2pTransport:
        transport = self.make(name, key, **settings)
        transport.serve("echo", echo)
        await self.nursery.start(self._run, transport)
        return transport

    async def stop(self, transport: Transport) -> None:
        self.scopes[transport.node_id].cancel()
        with trio.fail_after(PATIENCE_SECONDS):
            await self.ended[transport.node_id].wait()

    async def _run(self, transport: Transport, *, task_status: trio.TaskStatus[None]) -> None:
        ended = self.ended[transport.node_id] = trio.Event()
        with trio.CancelScope() as scope:
            self.scopes[transport.node_id] = scope
            await transport.run(task_status=task_status)
        ended.set()


async def echo(_peer: NodeId, payload: bytes) -> bytes:
    return payload


async def connect(dialler: Transport, acceptor: Transport) -> None:
    """Both know of each other when this returns."""
    reached = await dialler.dial(acceptor.addresses()[0], acceptor.node_id, PATIENCE_SECONDS)
    assert reached == acceptor.node_id
    await until(lambda: dialler.node_id in acceptor.peers() and acceptor.node_id in dialler.peers())


async def until(condition) -> None:
    """Waits for what happens in another task or process and sends no event of its own."""
    with trio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def next_event(transport: Transport, kind: type):
    """The next event of this kind; others are passed over."""
    with trio.fail_after(PATIENCE_SECONDS):
        while True:
            event = await transport.events.receive()
            if isinstance(event, kind):
                return event


@pytest.fixture
async def nodes(nursery: trio.Nursery, tmp_path: Path) -> Nodes:
    return Nodes(nursery, tmp_path, {}, {})
