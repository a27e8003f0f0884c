"""What agents say in their logs of a repair: where its time went, and whether a fault came in time to disturb it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise

from meshinfer.testing.chaos import Answer, Fault

PHASES = {
    "noticed": "goes on after",
    "placed": "is placed on",
    "no spare": "no spare runner is at hand",
    "process": "is to be its runner",
    "loaded": "its layers are loaded",
    "linked": "its channels are open",
    "opened": "is open again, in epoch",
}
"""What agents say in their logs when it happens."""


def came_too_late(
    told: Sequence[tuple[float, str]], answer: Answer, faulted_at: float, struck: Sequence[tuple[Fault, float]]
) -> str:
    """Which fault did, and for what; empty if none.

    Args:
        told: by the origin, in its log, at so many seconds after the first fault.
        answer: of the first client.
        faulted_at: when the first fault was made, by the wall clock.
        struck: each fault, and when it was made.
    """
    if faulted_at - time.time() + time.monotonic() > answer.ended_at:
        return "the answer was there before the fault: more tokens are needed"
    opened = next((at for at, line in told if PHASES["opened"] in line), math.inf)
    for fault, at in struck:
        if fault.moment == "repair" and at - faulted_at > opened:
            return f"{fault.deed} {fault.part}: the session was open again {at - faulted_at - opened:.2f} s before"
    return ""


def phases_of(story: Sequence[tuple[float, str]], answer: Answer, faulted_at: float) -> tuple[tuple[str, float], ...]:
    """Where the longest wait of `answer` went, by the agents' logs; of each thing the last time that it happened.

    Empty where that wait was over before the fault, and where there was none.
    """
    times = [answer.asked_at, *answer.times]
    if len(times) < 2 or not faulted_at:
        return ()
    _, ended_at = max(pairwise(times), key=lambda wait: wait[1] - wait[0])
    ended = ended_at + time.time() - time.monotonic() - faulted_at
    if ended < 0:
        return ()
    found: list[tuple[str, float]] = []
    for phase, words in PHASES.items():
        moments = [at for at, line in story if words in line and at <= ended]
        if moments:
            found.append((phase, moments[0] if phase == "noticed" else moments[-1]))
    return (*sorted(found, key=lambda moment: moment[1]), ("token", ended))
