"""Discovery over real multicast: on loopback, and between network namespaces without a default route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.ids import NodeId
from meshinfer.mesh.discovery import AnotherMesh, Discovery, Hint, PeerSeen, Self, read_hint

PATIENCE_SECONDS = 20
"""Agents find each other in half a second on a machine that is free; one that is shared may take longer."""


def oneself(name: str, mesh: str = "m") -> Self:
    return Self(NodeId(name), mesh, f"laptop of {name}", "0.1")


class Listener:
    """A discovery and what it heard."""

    def __init__(self, own: Self, port: int, host: str = "127.0.0.1") -> None:
        self.addresses = (f"{host}:{port}",)
        self.hints: list[Hint] = []
        self.discovery = Discovery(own, lambda: self.addresses, self.hints.append)

    def seen(self) -> dict[str, tuple[str, ...]]:
        return {hint.node_id: hint.addresses for hint in self.hints if isinstance(hint, PeerSeen)}


async def eventually(condition) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - hints come from a thread that knows no event of ours
            await trio.sleep(0.01)


async def test_three_on_one_machine_find_each_other() -> None:
    listeners = {name: Listener(oneself(name), port) for port, name in enumerate(["a1", "a2", "a3"], start=7001)}
    async with trio.open_nursery() as nursery:
        for listener in listeners.values():
            nursery.start_soon(listener.discovery.run)
        await eventually(lambda: all(len(listener.seen()) == 2 for listener in listeners.values()))
        nursery.cancel_scope.cancel()
    assert listeners["a1"].seen() == {"a2": ("127.0.0.1:7002",), "a3": ("127.0.0.1:7003",)}


async def test_another_mesh_is_told_once_with_what_to_do() -> None:
    ours = Listener(oneself("b1", "ours"), 7001)
    theirs = [Listener(oneself(name, "theirs"), 7002) for name in ("c1", "c2")]
    friend = Listener(oneself("b2", "ours"), 7003)
    async with trio.open_nursery() as nursery:
        for listener in (ours, *theirs, friend):
            nursery.start_soon(listener.discovery.run)
        await eventually(lambda: "b2" in ours.seen() and any(isinstance(hint, AnotherMesh) for hint in ours.hints))
        await eventually(lambda: all(len(listener.seen()) == 1 for listener in theirs))
        nursery.cancel_scope.cancel()
    others = [hint for hint in ours.hints if isinstance(hint, AnotherMesh)]
    assert len(others) == 1
    assert "theirs" in others[0].message
    assert "meshinfer join CODE" in others[0].message
    assert not ours.seen().keys() & {"c1", "c2"}


async def test_who_comes_later_finds_who_was_there(nursery) -> None:
    first, second = Listener(oneself("d1"), 7001), Listener(oneself("d2"), 7002)
    nursery.start_soon(first.discovery.run)
    await trio.lowlevel.checkpoint()
    nursery.start_soon(second.discovery.run)
    await eventually(lambda: first.seen() and second.seen())


async def test_cancelling_while_it_starts_ends_it() -> None:
    for _ in range(3):
        with trio.fail_after(PATIENCE_SECONDS), trio.move_on_after(0.01):
            await Listener(oneself("e1"), 7001).discovery.run()


# --- what strangers say -------------------------------------------------------------------------

texts = st.dictionaries(st.sampled_from(["v", "mesh", "node", "name", "version"]), st.text(max_size=80))


@given(texts, st.lists(st.text(max_size=40), max_size=40))
def test_anyones_words_become_a_bounded_hint_or_nothing(words: dict[str, str], addresses: list[str]) -> None:
    hint = read_hint(oneself("a"), words, addresses)
    if hint is not None:
        assert hint.node_id.isalnum()
        assert hint.name.isprintable()
        assert len(hint.name) <= 64


def test_a_name_that_would_write_on_the_terminal_is_not_shown() -> None:
    words = {"mesh": "other", "node": "nodeX", "name": "\x1b[2Jowned"}
    hint = read_hint(oneself("a"), words, [])
    assert isinstance(hint, AnotherMesh)
    assert hint.name == "nodeX"
    assert read_hint(oneself("a"), {**words, "mesh": "x\n"}, []) is None


def test_oneself_and_the_unusable_are_no_hints() -> None:
    own = oneself("a")
    assert read_hint(own, {"mesh": "m", "node": "a", "start": own.start + "1"}, ["192.0.2.1:1"]) is None
    copy = read_hint(own, {"mesh": "m", "node": "a", "start": "another"}, ["192.0.2.1:1"])
    assert copy == PeerSeen(NodeId("a"), "a", ("192.0.2.1:1",)), "an agent with a copy of our key"
    assert read_hint(own, {"mesh": "before", "node": "a"}, ["192.0.2.1:1"]) is None
    assert read_hint(own, {"mesh": "m", "node": "b"}, ["0.0.0.0:1"]) is None
    assert read_hint(own, {"mesh": "m", "node": "b"}, ["192.0.2.1:1"]) == PeerSeen(NodeId("b"), "b", ("192.0.2.1:1",))


# --- network namespaces -------------------------------------------------------------------------

LISTEN = """
import sys, json, time, trio
from meshinfer.mesh.discovery import Discovery, Self
from meshinfer.transport.addresses import dialable_hosts, format_address

name, port, want, loopback = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "loopback"
seen = {}

def addresses():
    return tuple(format_address(host, port) for host in dialable_hosts(["0.0.0.0"], include_loopback=loopback))

async def main():
    begun = time.monotonic()

    def hear(hint):
        seen.setdefault(hint.node_id, [*hint.addresses, round(time.monotonic() - begun, 3)])

    async with trio.open_nursery() as nursery:
        discovery = Discovery(Self(name, "m", name, "0"), addresses, hear)
        nursery.start_soon(discovery.run)
        print("listening", flush=True)
        with trio.move_on_after(20):
            while len(seen) < want:
                await trio.sleep(0.01)
        print(json.dumps(seen), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)  # until all have found all
        nursery.cancel_scope.cancel()

trio.run(main)
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def listen(namespace: str, name: str, port: int, want: int, loopback: bool) -> subprocess.Popen[str]:
    network = "loopback" if loopback else "lan"
    enter = f"ip netns exec {namespace}".split()
    return subprocess.Popen(
        [*enter, sys.executable, "-c", LISTEN, name, str(port), str(want), network],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def listening(processes: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    assert [process.stdout.readline() for process in processes] == ["listening\n"] * len(processes)
    return processes


def heard(processes: list[subprocess.Popen[str]]) -> list[dict[str, list[str | float]]]:
    try:
        return [json.loads(process.stdout.readline()) for process in processes]
    finally:
        for process in processes:
            process.communicate("", timeout=30)


@pytest.mark.root
@needs_root
def test_a_cable_without_router_or_name_server_is_enough() -> None:
    one, other = f"mi{os.getpid()}a", f"mi{os.getpid()}b"
    with namespaces(one, other):
        ip("link", "add", "lan0", "netns", one, "type", "veth", "peer", "name", "lan0", "netns", other)
        for index, name in enumerate((one, other), start=1):
            # A bridge to containers stands beside it, and must not be announced.
            ip("-n", name, "link", "add", "docker0", "type", "bridge")
            ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            ip("-n", name, "link", "set", "docker0", "up")
            ip("-n", name, "addr", "add", f"10.99.0.{index}/24", "dev", "lan0")
            ip("-n", name, "link", "set", "lan0", "up")
        first, second = heard(listening([listen(one, "n1", 7001, 1, False), listen(other, "n2", 7002, 1, False)]))
    assert first["n2"][:-1] == ["10.99.0.2:7002"]
    assert second["n1"][:-1] == ["10.99.0.1:7001"]


@pytest.mark.root
@needs_root
def test_three_agents_on_a_machine_without_any_network() -> None:
    name = f"mi{os.getpid()}c"
    with namespaces(name):
        found = heard(listening([listen(name, f"n{port}", port, 2, True) for port in (7001, 7002, 7003)]))
    assert [sorted(seen) for seen in found] == [["n7002", "n7003"], ["n7001", "n7003"], ["n7001", "n7002"]]
    assert found[0]["n7002"][:-1] == ["127.0.0.1:7002"]


@pytest.mark.root
@needs_root
def test_a_network_that_appears_later_is_followed() -> None:
    one, other = f"mi{os.getpid()}d", f"mi{os.getpid()}e"
    with namespaces(one, other):
        ip("link", "add", "lan0", "netns", one, "type", "veth", "peer", "name", "lan0", "netns", other)
        processes = listening([listen(one, "n1", 7001, 1, False), listen(other, "n2", 7002, 1, False)])
        for index, name in enumerate((one, other), start=1):
            ip("-n", name, "addr", "add", f"10.99.0.{index}/24", "dev", "lan0")
            ip("-n", name, "link", "set", "lan0", "up")
        first, second = heard(processes)
    assert first["n2"][:-1] == ["10.99.0.2:7002"]
    assert second["n1"][:-1] == ["10.99.0.1:7001"]
