"""Who this node is: an Ed25519 key in its home, and the peer id that is made of its public half.

A peer id of an Ed25519 key *contains* the key (an identity multihash of 36 bytes), so anyone can
check a signature by a node that it has never met, from the id alone. The file holds libp2p's own
protobuf of the private key, so its tools can read it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from libp2p.crypto.ed25519 import Ed25519PublicKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair, KeyType
from libp2p.crypto.serialization import deserialize_private_key
from libp2p.peer.id import ID

from meshinfer.base.errors import BadInput, ProtocolError
from meshinfer.base.ids import NodeId
from meshinfer.transport.secret_files import read_secret, write_secret

_FILE = "identity.key"
IDS_REMEMBERED = 4096
"""In each of both forms: twice as many as a view has nodes. To make one from the other takes 0.1 ms, at every call."""
# Multihash `identity` (0x00) of 36 bytes, which are protobuf: key type 1 (Ed25519), then 32 bytes of key.
_PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
_PEER_ID_BYTES = len(_PEER_ID_PREFIX) + 32
_LONGEST_TEXT = 64
# The same key signs Noise handshakes and gossip, each with a prefix of libp2p's; no signature may pass for another's.
_SIGNING_PREFIX = b"meshinfer-signature:"


def load_or_make_identity(home: Path) -> KeyPair:
    """The identity of `home`: the same at each start.

    Raises:
        BadInput: the file is damaged or can be read by others. It is never replaced: a node that
            came back under another id would be a stranger to its own past.
    """
    path = home / _FILE
    content = read_secret(path)
    if content is None:
        made = create_new_key_pair()
        if write_secret(path, made.private_key.serialize(), replace=False):
            return made
        content = read_secret(path) or b""  # another first start in this home was quicker by a moment
    try:
        private = deserialize_private_key(content)
        keys = KeyPair(private, private.get_public_key())
    except Exception:  # noqa: BLE001 - the decoder of a foreign format: whatever it raises, the file is not a key
        keys = None
    if keys is None or keys.private_key.get_type() != KeyType.Ed25519:
        # Without the cause: its text may hold bytes of the key.
        raise BadInput(
            f"{path} is damaged",
            expected="an Ed25519 key of libp2p",
            do="restore it from a backup, or delete it: this node then has a new id",
        )
    return keys


@functools.lru_cache(maxsize=IDS_REMEMBERED)
def node_id_of(peer_id: ID) -> NodeId:
    return NodeId(peer_id.to_base58())


@functools.lru_cache(maxsize=IDS_REMEMBERED)
def peer_id_of(node_id: NodeId) -> ID:
    """libp2p's form of `node_id`.

    Raises:
        ProtocolError: it is not the id of an Ed25519 key.
    """
    if len(node_id) <= _LONGEST_TEXT:
        try:
            peer_id = ID.from_base58(node_id)
        except ValueError:
            peer_id = None
        if peer_id is not None and _is_ed25519(peer_id.to_bytes()) and peer_id.to_base58() == node_id:
            return peer_id
    raise ProtocolError(f"{node_id[:_LONGEST_TEXT]!r} is not a node id", expected="a peer id such as 12D3KooW…")


def sign_with(keys: KeyPair, payload: bytes) -> bytes:
    """64 bytes that `is_signed_by` accepts for the node of these keys, and for no other purpose of theirs."""
    return keys.private_key.sign(_SIGNING_PREFIX + payload)


def is_signed_by(author: NodeId, payload: bytes, signature: bytes) -> bool:
    """Whether `author` made `signature` over `payload`. Total: garbage gives False."""
    try:
        key = Ed25519PublicKey.from_bytes(peer_id_of(author).to_bytes()[len(_PEER_ID_PREFIX) :])
        return key.verify(_SIGNING_PREFIX + payload, signature)
    except Exception:  # noqa: BLE001 - three libraries parse what may be anything; not a signature is the answer to all
        return False


def _is_ed25519(raw: bytes) -> bool:
    return len(raw) == _PEER_ID_BYTES and raw.startswith(_PEER_ID_PREFIX)
