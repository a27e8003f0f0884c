"""What ends a pipeline, as the MLX thread of one of its seats sees it."""

from __future__ import annotations

from meshinfer.base.errors import PeerLost
from meshinfer.wire.messages import ChannelRole


class PipelineBroken(PeerLost):
    """A neighbour, or the channel to it, is gone: no session of this instance can go on."""

    def __init__(self, role: ChannelRole, seat: int, reason: str, *, unanswered: bool = False) -> None:
        """`unanswered`: it was dialled, and nothing came back."""
        self.role: ChannelRole = role
        self.seat = seat
        self.reason = reason
        self.unanswered = unanswered
        super().__init__(f"seat {seat} is lost ({role}): {reason}", do="let the instance be placed anew")
