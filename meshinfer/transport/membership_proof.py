"""Membership, proved before anything else is said.

Noise has just told each side the other's peer id, and no more: anybody can make an identity. So
before a muxer or any protocol exists on the connection, both sides prove that they know the mesh
key, over the encrypted channel, in two fixed-size messages each:

    both at once    hello: magic, version, mesh tag (8 bytes, public), fresh nonce (32 bytes)
    dialler first   proof: HMAC(mesh key; version, role, both nonces, both peer ids)
    then acceptor   proof, likewise with its own role

- The peer ids are those that Noise authenticated, so a proof that a third party passes on is made
  for other ids and fails: one cannot be relayed through.
- The role is in the MAC, so a proof cannot be reflected.
- The dialler proves first: a stranger who dials us gets a random number and nothing to guess at. A
  stranger whom *we* dial sees one MAC of a key stretched from 77 bits.
- The tag names the mesh, so that a wrong code is told from a broken program; what it says is as
  public as discovery's announcements.

It costs two round trips and, on a stranger, 45 bytes and a deadline.
"""

from __future__ import annotations

import secrets
import struct
from typing import Literal, Protocol

from meshinfer.transport.mesh_key import MeshKey

VERSION = 1
_MAGIC = b"mesh"
_HELLO = struct.Struct(">4sB8s32s")
_MAC_BYTES = 32
_PURPOSE = b"membership"

Role = Literal["dialler", "acceptor"]


class Channel(Protocol):
    """The encrypted connection. `read` may return fewer bytes, and none at its end."""

    async def read(self, n: int | None = None) -> bytes: ...

    async def write(self, data: bytes) -> None: ...


class NotProved(Exception):
    """The other side is no member, or not of our mesh, or speaks another version. The text says which."""


async def prove_membership(channel: Channel, key: MeshKey, role: Role, own_id: bytes, peer_id: bytes) -> None:
    """Proves our membership to the peer, and has it prove its own. The caller sets the deadline.

    The ids are libp2p's peer ids as bytes; the peer's as Noise authenticated it.

    Raises:
        NotProved: the peer is to be refused.
    """
    own_nonce = secrets.token_bytes(32)
    await channel.write(_HELLO.pack(_MAGIC, VERSION, _tag(key), own_nonce))
    peer_nonce = _nonce_in(await _read_exactly(channel, _HELLO.size), key)
    if role == "dialler":
        transcript = (own_nonce, peer_nonce, own_id, peer_id)
        await channel.write(_mac(key, "dialler", transcript))
        await _check(channel, key, "acceptor", transcript)
    else:
        transcript = (peer_nonce, own_nonce, peer_id, own_id)
        await _check(channel, key, "dialler", transcript)
        await channel.write(_mac(key, "acceptor", transcript))


def _tag(key: MeshKey) -> bytes:
    return key.mac(b"mesh tag")[:8]


def _nonce_in(hello: bytes, key: MeshKey) -> bytes:
    magic, version, tag, nonce = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise NotProved("it does not speak meshinfer")
    if version != VERSION:
        older = "this node" if version > VERSION else "the other node"
        raise NotProved(f"it speaks version {version} of the membership proof, this node {VERSION}: update {older}")
    if tag != _tag(key):
        raise NotProved(
            "it belongs to another mesh: if the two should be one, run `meshinfer join CODE` on one of them"
        )
    return nonce


def _mac(key: MeshKey, role: Role, transcript: tuple[bytes, ...]) -> bytes:
    return key.mac(_PURPOSE, bytes([VERSION]), role.encode(), *transcript)


async def _check(channel: Channel, key: MeshKey, role: Role, transcript: tuple[bytes, ...]) -> None:
    mac = await _read_exactly(channel, _MAC_BYTES)
    if not key.proves(mac, _PURPOSE, bytes([VERSION]), role.encode(), *transcript):
        raise NotProved("it names this mesh and does not know its key")


async def _read_exactly(channel: Channel, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = await channel.read(count - len(received))
        if not more:
            raise NotProved("it hung up before it had proved its membership: perhaps it refused ours")
        received += more
    return received
