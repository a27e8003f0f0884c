"""Who plans: rendezvous (highest-random-weight) hashing over the live members.

Every node scores every member for a key and sorts; all that see the same members agree without a
word, and a member that leaves moves only the keys that it was first for. Thaler & Ravishankar,
"A Name-Based Mapping Scheme for Rendezvous" (1996). Election saves duplicate work and finds warm
caches; safety comes from leases, so two views that differ for a moment do no harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from meshinfer.base.ids import NodeId


def elect(key: str, members: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """All `members`, the one to ask first in front; the same on every node that sees the same members."""

    def weight(member: NodeId) -> bytes:
        return hashlib.blake2b(f"{len(key)}:{key}{member}".encode(), digest_size=16).digest()

    return tuple(sorted(set(members), key=lambda member: (weight(member), member), reverse=True))
