"""Runners that failed, as this planner saw them: whose seat goes elsewhere, and how long it rests if nobody can take it.

    failed once      its seat is made again where it was, at once: the files are there
    again            elsewhere, if somebody can take it
    nobody can       2, 4, 8, then 16 s from one failure to the next try; in between, whoever asks is told so
    it has served    forgotten

Without the rest, a runner that dies at its first step has its layers loaded once a second, for as long as clients ask.
What fails alike every time (a damaged file) is not worth a rest: it is told to each client at once, and may be mended
any moment. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshinfer.base.ids import InstanceId, NodeId
from meshinfer.serving.view import Instance

LASTING_ERRORS = frozenset({"corrupt_model", "bad_input"})
"""Trying again on the same node changes nothing."""
FAILURES_BEFORE_ELSEWHERE = 2
"""A runner that crashed once is made again where it was; after the second time it goes elsewhere if it can."""
REST_SECONDS = 0.5
"""Times two to the number of failures. An answer that has begun waits for eight seconds: it outlives the first two rests."""
LONGEST_REST_SECONDS = 16.0
"""Less than layers stay warm that wait for a repair (`seats.WARM_SECONDS`, 20 s): after a longer rest every node would
load its own again, each time, for the sake of the one that fails."""
SERVED_SECONDS = 60.0
"""A seat that computed, and did not fail for so long, has served. Almost four longest rests: most of it was no waiting."""
FORGOTTEN_SECONDS = 600.0
"""Nobody has made that seat again, so nobody knows what it would do now."""


@dataclass(slots=True)
class _Record:
    """Of one node in one instance; mutable."""

    count: int = 0
    epoch: int = 0
    """The last in which it failed."""
    at: float = 0.0
    """When that was seen."""
    error: str = ""
    is_lasting: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """A node is not given its seat again yet."""

    node_id: NodeId
    failures: int
    error: str
    """The last one's."""
    seconds: float
    """From now on."""


class Failures:
    """What one planner remembers. Its size is bounded by time and by what it plans."""

    def __init__(self) -> None:
        self._records: dict[tuple[InstanceId, NodeId], _Record] = {}

    def learn(self, instance: Instance, now: float) -> None:
        """Take in what the seats of an instance say of themselves."""
        for seat, report in zip(instance.placement.seats, instance.reports, strict=True):
            key = (instance.instance_id, seat.node_id)
            if report is None:
                continue
            record = self._records.get(key)
            if record is not None and report.step_seconds and now >= record.at + SERVED_SECONDS:
                del self._records[key]
                record = None
            if report.state == "failed" and (record is None or record.epoch != instance.epoch):
                record = self._records.setdefault(key, _Record())
                record.count, record.epoch, record.at = record.count + 1, instance.epoch, now
                record.error, record.is_lasting = report.error, report.error_code in LASTING_ERRORS
        self._forget(now)

    def troubled(self, instance_id: InstanceId, now: float) -> frozenset[NodeId]:
        """Nodes whose seat goes elsewhere if it can."""
        self._forget(now)
        return frozenset(
            node
            for (of, node), record in self._records.items()
            if of == instance_id and (record.is_lasting or record.count >= FAILURES_BEFORE_ELSEWHERE)
        )

    def rests(self, instance_id: InstanceId, now: float) -> tuple[Rest, ...]:
        """Nodes that may not even have it if it can go nowhere else; sorted, the last to be tried again in front."""
        found: list[Rest] = []
        for (of, node), record in self._records.items():
            if of == instance_id and record.count >= FAILURES_BEFORE_ELSEWHERE and not record.is_lasting:
                rest = min(LONGEST_REST_SECONDS, REST_SECONDS * 2.0 ** min(record.count, 32))
                left = record.at + rest - now
                if left > 0:
                    found.append(Rest(node, record.count, record.error, left))
        return tuple(sorted(found, key=lambda rest: (-rest.seconds, rest.node_id)))

    def _forget(self, now: float) -> None:
        self._records = {key: one for key, one in self._records.items() if now < one.at + FORGOTTEN_SECONDS}
