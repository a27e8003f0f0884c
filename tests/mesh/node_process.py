"""One real node in a process of its own, for tests that kill or stop it: prints its id and address, answers `echo`.

Run as: node_process.py HOME JOIN_CODE
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from meshinfer.base.ids import NodeId
from meshinfer.transport.libp2p import Libp2pSettings, Libp2pTransport
from meshinfer.transport.mesh_key import MeshKey, parse_join_code


async def echo(_peer: NodeId, payload: bytes) -> bytes:
    return payload


async def main(home: str, code: str) -> None:
    key = MeshKey.from_join_code(parse_join_code(code))
    transport = Libp2pTransport(Libp2pSettings(Path(home), key, listen_host="127.0.0.1", include_loopback=True))
    transport.serve("echo", echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(_run, transport)
        sys.stdout.write(f"{transport.node_id} {transport.addresses()[0]}\n")
        sys.stdout.flush()
        async for _ in transport.events:
            pass


async def _run(transport: Libp2pTransport, *, task_status: trio.TaskStatus[None]) -> None:
    await transport.run(task_status=task_status)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
