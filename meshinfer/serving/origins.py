"""Which of a runner's origins have vanished. Pure.

An origin that dies resets its channels, and the head frees its sessions at once. One whose machine sleeps or whose
cable is pulled says nothing, and the kernels at both ends keep what is on its way for a quarter of an hour; one that is
stopped even has its kernel acknowledge all that comes. That it is gone is known by the mesh alone, so its word goes to
the runner, which ends the channel as if its other end had closed it. Nothing is lost with that: the tokens are written
down at the origin, which opens its sessions again when it is back (docs/decisions/vanished-origins.md).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from meshinfer.base.ids import NodeId

GONE_SECONDS = 5.0
"""Out of the view, or out of this node's reach, before its sessions end here. The view takes two to three seconds to bury
anybody, and who was buried alive is back within five; raising it has stages compute longer for nobody."""


@dataclass(frozen=True, slots=True)
class _Origin:
    certificate_der: bytes
    """What it shows when it dials."""
    seen_at: float


@dataclass(slots=True)
class Origins:
    """Of one runner."""

    _known: dict[NodeId, _Origin] = field(default_factory=dict[NodeId, _Origin])
    """Who was offered a channel and has not vanished since. A node that lives on after its last session stays: it has one
    entry at most."""

    def came(self, node: NodeId, certificate_der: bytes, now: float) -> None:
        """It asks for a channel: there it is, whatever the view says."""
        self._known[node] = _Origin(certificate_der, now)

    def vanished(self, reached: AbstractSet[NodeId], now: float) -> list[bytes]:
        """Certificates of those that have been out of reach for long; each is told once. To be asked again and again."""
        for node, origin in list(self._known.items()):
            if node in reached:
                self._known[node] = _Origin(origin.certificate_der, now)
        gone = [node for node, origin in self._known.items() if now >= origin.seen_at + GONE_SECONDS]
        return [self._known.pop(node).certificate_der for node in gone]
