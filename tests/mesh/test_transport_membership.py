"""The proof of membership, over memory streams: who passes, who does not, and what a stranger learns."""

from __future__ import annotations

import pytest
import trio
from conftest import KEY, OTHER_KEY
from trio.testing import memory_stream_pair

from meshinfer.transport.membership_proof import NotProved, prove_membership
from meshinfer.transport.mesh_key import MeshKey

A, B, MALLORY = b"peer a", b"peer b", b"mallory"
HELLO_BYTES, PROOF_BYTES = 45, 32


class Recorded:
    """A stream as the proof wants it, which remembers what the other side was told."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self._stream = stream
        self.sent = b""

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        self.sent += data
        await self._stream.send_all(data)

    async def hang_up(self) -> None:
        await self._stream.send_eof()


def channels() -> tuple[Recorded, Recorded]:
    one, other = memory_stream_pair()
    return Recorded(one), Recorded(other)


async def outcome(results: dict[str, str], name: str, channel: Recorded, *arguments) -> None:
    try:
        await prove_membership(channel, *arguments)
        results[name] = "proved"
    except NotProved as refusal:
        results[name] = str(refusal)
        await channel.hang_up()


async def prove_both(
    dialler_key: MeshKey, acceptor_key: MeshKey, *, dialler_sees: bytes = B, acceptor_sees: bytes = A
) -> tuple[dict[str, str], Recorded, Recorded]:
    dialling, accepting = channels()
    results: dict[str, str] = {}
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome, results, "dialler", dialling, dialler_key, "dialler", A, dialler_sees)
            nursery.start_soon(outcome, results, "acceptor", accepting, acceptor_key, "acceptor", B, acceptor_sees)
    return results, dialling, accepting


async def test_two_members_pass_and_nothing_is_left_over():
    results, dialling, accepting = await prove_both(KEY, KEY)
    assert results == {"dialler": "proved", "acceptor": "proved"}
    assert len(dialling.sent) == len(accepting.sent) == HELLO_BYTES + PROOF_BYTES


async def test_members_of_two_meshes_tell_each_other_apart_before_any_proof():
    results, dialling, accepting = await prove_both(OTHER_KEY, KEY)
    assert "another mesh" in results["dialler"]
    assert "another mesh" in results["acceptor"]
    assert len(dialling.sent) == len(accepting.sent) == HELLO_BYTES


async def test_every_run_is_fresh():
    _, first, _ = await prove_both(KEY, KEY)
    _, second, _ = await prove_both(KEY, KEY)
    assert first.sent != second.sent


@pytest.mark.parametrize("seen", [{"dialler_sees": MALLORY}, {"acceptor_sees": MALLORY}])
async def test_a_proof_that_somebody_relays_is_worthless(seen):
    """Mallory ends a Noise session with each, under its own id, and copies every byte between them."""
    results, _, accepting = await prove_both(KEY, KEY, **seen)
    assert results["acceptor"] == "it names this mesh and does not know its key"
    assert results["dialler"] != "proved"
    assert len(accepting.sent) == HELLO_BYTES


async def test_an_echo_proves_nothing():
    ours, theirs = channels()
    results: dict[str, str] = {}

    async def reflect() -> None:
        while True:
            data = await theirs.read(100)
            if not data:
                return
            await theirs.write(data)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reflect)
            await outcome(results, "dialler", ours, KEY, "dialler", A, A)
            nursery.cancel_scope.cancel()
    assert results["dialler"] == "it names this mesh and does not know its key"


async def test_a_recorded_conversation_does_not_open_the_door_again():
    _, dialling, _ = await prove_both(KEY, KEY)
    replaying, accepting = channels()
    results: dict[str, str] = {}
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome, results, "acceptor", accepting, KEY, "acceptor", B, A)
            await replaying.write(dialling.sent)
    assert results["acceptor"] == "it names this mesh and does not know its key"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "hung up"),
        (b"mesh", "hung up"),
        (b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n    ", "does not speak meshinfer"),
        (bytes(200), "does not speak meshinfer"),
        (b"mesh\x02" + bytes(40), "version 2 of the membership proof, this node 1: update this node"),
        (b"mesh\x00" + bytes(40), "update the other node"),
        (b"mesh\x01" + bytes(40), "another mesh"),
    ],
)
async def test_anything_else_is_refused_with_what_it_was(sent, says):
    stranger, accepting = channels()
    results: dict[str, str] = {}
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome, results, "acceptor", accepting, KEY, "acceptor", B, MALLORY)
            await stranger.write(sent)
            await stranger.hang_up()
    assert says in results["acceptor"]
    assert len(accepting.sent) == HELLO_BYTES


async def test_bytes_may_come_one_at_a_time():
    class Dripping(Recorded):
        async def read(self, n: int | None = None) -> bytes:
            return await super().read(1)

    one, other = memory_stream_pair()
    results: dict[str, str] = {}
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outcome, results, "dialler", Dripping(one), KEY, "dialler", A, B)
            nursery.start_soon(outcome, results, "acceptor", Dripping(other), KEY, "acceptor", B, A)
    assert results == {"dialler": "proved", "acceptor": "proved"}


async def test_neither_key_nor_code_is_in_what_crosses_the_wire():
    _, dialling, accepting = await prove_both(KEY, KEY)
    assert KEY._MeshKey__secret not in dialling.sent + accepting.sent
