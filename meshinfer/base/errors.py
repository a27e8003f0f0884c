"""The errors that cross a door: each says what was wrong, what was expected and what to do.

A small tree. Catch what you can act on (`PeerLost`: plan anew; `NoRoom`: 503 with the reason);
anything else rises. `code` is the stable word that travels between nodes and to HTTP clients.
"""

from __future__ import annotations

from typing import ClassVar


class MeshinferError(Exception):
    """Something a person or a caller can act on.

    Args:
        what: what was wrong, with the numbers or names in it.
        expected: what would have been right.
        do: what to do now.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, what: str, *, expected: str = "", do: str = "") -> None:
        self.what, self.expected, self.do = what, expected, do
        super().__init__(str(self))

    def __str__(self) -> str:
        expected = f"; expected {self.expected}" if self.expected else ""
        advice = f". {self.do[:1].upper()}{self.do[1:]}." if self.do else ""
        # A text that is a sentence already (a planner's explanation) is not ended twice.
        what = self.what.removesuffix(".") if expected or advice else self.what
        return f"{what}{expected}{advice}"


class BadInput(MeshinferError):
    """The caller sent something that cannot be right, now or later."""

    code = "bad_input"


class UnknownModel(MeshinferError):
    """No live node has this model, and it is not one that can be fetched by itself."""

    code = "model_not_found"


class UnknownInstance(MeshinferError):
    """No such instance is announced by any live node."""

    code = "instance_not_found"


class NoRoom(MeshinferError):
    """The request is right, but the mesh cannot hold it now (memory, queue)."""

    code = "no_room"


class NodeLeaving(MeshinferError):
    """The node that was asked is leaving: it takes no request, or could not bring one to its end in time."""

    code = "node_leaving"


class QueueFull(MeshinferError):
    """As many requests as may be wait there already; a place comes free as soon as one ends."""

    code = "queue_full"


class Refused(MeshinferError):
    """A node refused a lease, a command or a frame, with its reason (also: a stale epoch)."""

    code = "refused"


class PeerLost(MeshinferError):
    """A node, a runner or a channel that was being used is gone or makes no progress."""

    code = "peer_lost"


class DeadlineExceeded(MeshinferError):
    """A wait came to its deadline."""

    code = "deadline_exceeded"


class ProtocolError(MeshinferError):
    """Bytes from outside that are not what the protocol allows."""

    code = "protocol_error"


class CorruptModel(MeshinferError):
    """A model's files are missing, truncated or not what their digest says."""

    code = "corrupt_model"


ERRORS_BY_CODE: dict[str, type[MeshinferError]] = {
    error.code: error
    for error in (
        MeshinferError,
        BadInput,
        UnknownModel,
        UnknownInstance,
        NoRoom,
        NodeLeaving,
        QueueFull,
        Refused,
        PeerLost,
        DeadlineExceeded,
        ProtocolError,
        CorruptModel,
    )
}
"""How an error that travelled as (code, what, expected, do) becomes itself again."""
