"""Whoever is not of the mesh gets nothing, costs little, and disturbs nobody."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from mesh import FRANCE, Room, ask, room, wait_until

from meshinfer.testing.agent_process import agent
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code

NAMES = ("alpha", "beta")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_store: Path) -> Iterator[Room]:
    with room(tmp_path_factory.mktemp("room"), model_store, NAMES, "--memory", "340MiB") as here:
        assert "Paris" in ask(here.url("alpha"), FRANCE)
        yield here


def test_an_agent_with_another_key_stays_outside_and_is_told_how_to_join(mesh: Room, tmp_path: Path) -> None:
    ours = os.environ[JOIN_CODE_VARIABLE]
    os.environ[JOIN_CODE_VARIABLE] = new_join_code().reveal()
    addresses = [address for address in mesh.agents["alpha"].started["addresses"] if address.startswith("127.")]
    try:
        with agent(tmp_path / "stranger", "--name", "mallory", "--loopback", "--peer", addresses[0]) as stranger:
            wait_until(lambda: "another mesh" in stranger.log(), 30, "it hears of the mesh")
            assert "meshinfer join" in stranger.log()
            wait_until(lambda: "stranger" in stranger.log() or "refused" in stranger.log(), 30, "it is refused")
            seen = httpx.get(f"{stranger.url}/topology", timeout=10).json()["nodes"].values()
            assert [node["name"] for node in seen] == ["mallory"]
            assert ours not in stranger.log()
    finally:
        os.environ[JOIN_CODE_VARIABLE] = ours
    assert all(mesh.sees(name) == set(NAMES) for name in NAMES)
    assert all(ours not in running.log() for running in mesh.agents.values())
    assert "Paris" in ask(mesh.url("beta"), FRANCE)


def test_garbage_on_every_port_leaves_the_mesh_serving(mesh: Room) -> None:
    rng = random.Random(7)
    ports = sorted({port for running in mesh.agents.values() for port in _listening(running.process.pid)})
    # Two agents with an API and a libp2p port each, and a runner with a channel port each.
    assert len(ports) >= 6
    payloads = [
        b"",
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x13/multistream/1.0.0\n\x11/plaintext/2.0.0\n",
        b"\x16\x03\x01\xff\xff" + rng.randbytes(512),
        b"\xff" * 65536,
        *(rng.randbytes(rng.randrange(1, 20_000)) for _ in range(10)),
    ]

    def shout(port: int) -> None:
        for payload in payloads:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
                sock.sendall(payload)
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    while sock.recv(65536):
                        pass

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, mesh.url(name), FRANCE) for name in NAMES]
        list(pool.map(shout, ports))
        assert all("Paris" in answer.result() for answer in answers)
    assert "Paris" in ask(mesh.url("alpha"), FRANCE)
    assert all(running.process.poll() is None for running in mesh.agents.values())
    assert all(mesh.sees(name) == set(NAMES) for name in NAMES)


def _listening(pid: int) -> set[int]:
    """TCP ports on which the agent or one of its runners listens."""
    agent_process = psutil.Process(pid)
    return {
        connection.laddr.port
        for process in [agent_process, *agent_process.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
