"""Names of things: nodes, models, instances, sessions.

Distinct types, so that a checker refuses a model id where a node id is meant. Ids that come from
outside go through a `parse_*` function, which accepts one strict grammar and nothing else; no id
reaches a file path or the network before that.
"""

from __future__ import annotations

import hashlib
import re
from typing import NewType

from meshinfer.base.errors import BadInput

NodeId = NewType("NodeId", str)
"""A node's libp2p peer id in base58, `12D3KooW…`: the hash of its public key, so it cannot be claimed."""
ModelId = NewType("ModelId", str)
"""`name` or `owner/name`, as on the model hub."""
InstanceId = NewType("InstanceId", str)
"""16 hex digits; derived from the model id and the replica number, so that all planners name it alike."""
PlacementId = NewType("PlacementId", str)
"""32 hex digits: the digest of the placement's content."""
SessionId = NewType("SessionId", str)
"""32 hex digits, drawn by the origin for each request."""

# A part never starts with a dot or dash: no hidden files, no `..`, nothing a command could take for an option.
_MODEL_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_MODEL_ID = re.compile(rf"{_MODEL_PART}(/{_MODEL_PART})?")


def parse_model_id(text: str) -> ModelId:
    """The model id in `text`.

    Raises:
        BadInput: `text` is not `name` or `owner/name` of letters, digits, `.`, `_`, `-`.
    """
    if not _MODEL_ID.fullmatch(text) or ".." in text or "--" in text:
        raise BadInput(
            f"{text[:120]!r} is not a model id",
            expected="`name` or `owner/name` of letters, digits, '.', '_' and single '-'",
            do="`meshinfer models list` shows the ids that this node knows",
        )
    return ModelId(text)


def digest_hex(*parts: bytes, length_bytes: int = 16) -> str:
    """Hex digest (BLAKE2b) of `parts`, each framed by its length so that no two splits collide."""
    state = hashlib.blake2b(digest_size=length_bytes)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.hexdigest()


def instance_id_for(model_id: ModelId, replica: int = 0) -> InstanceId:
    """The id of the `replica`-th instance of a model: the same on every node that would place it."""
    return InstanceId(digest_hex(model_id.encode(), replica.to_bytes(4, "big"), length_bytes=8))
