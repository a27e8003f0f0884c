"""The epochs of instances that a node has seen, and which of them are void since the instance was deleted.

No epoch is used twice: a lease for one that is not newer is refused with the newest (`StaleEpoch`), so a planner that
slept cannot bring back the past. A deletion is an epoch of its own, the one after the last. Every lease says with which
epoch its placing began; one that began no later than the deletion (a repair of what was deleted, say) is void and told
so (`DeletedMeanwhile`), however high the epoch that it tries by now. Whoever wants the model afterwards begins above it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from meshinfer.base.errors import Refused
from meshinfer.base.ids import InstanceId
from meshinfer.serving.held_seat import SeatKey
from meshinfer.wire.messages import Deletion

REMEMBERED_EPOCHS = 1024
"""Instances whose highest epoch and whose deletion are remembered; one takes about 200 bytes."""


class StaleEpoch(Refused):
    """A lease for the past; `newest` is what this node has seen."""

    def __init__(self, key: SeatKey, newest: int) -> None:
        self.newest = newest
        super().__init__(
            f"epoch {key.epoch} of instance {key.instance_id} is stale",
            expected=f"an epoch above {newest}",
            do="plan again with a higher epoch",
        )


class DeletedMeanwhile(Refused):
    """A lease of a placing that began before its instance was deleted; `deletion` is what this node knows of that."""

    def __init__(self, key: SeatKey, void: int) -> None:
        self.deletion = Deletion(key.instance_id, void - 1)
        super().__init__(
            f"instance {key.instance_id} was deleted while it was being placed",
            expected=f"a placing that begins above epoch {void}",
            do="ask for the model again",
        )


@dataclass(slots=True)
class _History:
    """Of one instance, on this node."""

    highest: int = 0
    """Of the epochs that were leased, released or deleted here, or heard of."""
    deleted: int = 0
    """What began with this epoch or an older one is void; 0: it never was deleted."""


class EpochBook:
    """What this node knows of the epochs of instances."""

    def __init__(self) -> None:
        self._histories: OrderedDict[InstanceId, _History] = OrderedDict()
        """The last one that was told of comes last."""

    def saw(self, instance_id: InstanceId, epoch: int) -> None:
        """It is used up."""
        self._remember(instance_id, epoch)

    def delete(self, instance_id: InstanceId, epoch: int) -> int:
        """Deleted when `epoch` was its last. What began with the epoch that is returned, or before, is void."""
        history = self._remember(instance_id, epoch + 1)
        # Never less than before: somebody else may know of a later deletion.
        history.deleted = max(history.deleted, epoch + 1)
        return history.deleted

    def is_deleted(self, instance_id: InstanceId, begun_epoch: int) -> bool:
        """Whether a placing of that instance which began with that epoch is void."""
        history = self._histories.get(instance_id)
        return history is not None and begun_epoch <= history.deleted

    def next(self, instance_id: InstanceId) -> int:
        """The lowest that is not used up; a planner takes the highest that any node knows of."""
        history = self._histories.get(instance_id)
        return history.highest + 1 if history else 1

    def _remember(self, instance_id: InstanceId, epoch: int) -> _History:
        history = self._histories.setdefault(instance_id, _History())
        history.highest = max(history.highest, epoch)
        self._histories.move_to_end(instance_id)
        while len(self._histories) > REMEMBERED_EPOCHS:
            self._histories.popitem(last=False)
        return history
