"""Whether a runner that lives does anything: told from what it says, and from its silence. Pure.

One that dies closes its sockets, and all know. One that is frozen or hangs closes nothing, and its whole instance
waits. Its own agent finds it out, and should do so before its head gives a step up (`pipeline.patience`):

    silent    it said nothing between some looks: none of its threads runs (stopped, swapped out)
    stuck     some heartbeats say that it has been in one step for too long: only the one that computes hangs
    waiting   it has sessions, is in no step and makes none: a neighbour's answer does not come
    overdue   a share of the first two, which is enough where others miss it, too (docs/decisions/overdue-is-not-warm.md)

What a machine does to all its processes is no runner's fault. A look or a heartbeat that comes late is of a node that
slept or whose cores are taken, and blames nobody; whose words come late as a rule may be silent for longer, and whose
steps are long may be in one for longer.

One that loads is given more time (docs/decisions/patience-before-anything-is-usual.md):

    silent    for three times as long: its disk, and the memory that others must give up for it, hold it up
    stalled   it reads no layer to its end, for so many looks as that layer may take by its size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshinfer.wire.runner_control import Heartbeat, Listening, Loading, RunnerMessage

LOOK_SECONDS = 0.25
"""Between two looks at the runners: as often as they send heartbeats. Twice that would add a quarter of a second to the
pause after a stall, half of this costs as much idle work again."""
LATE_SECONDS = 0.2
"""By how much a look or a heartbeat may come late and still say something of the runner, not of the machine. Raising it
has runners ended for what a starved core does to them; lowering it leaves one that hangs on a busy machine alone."""

SILENT_LOOKS = 7
"""A runner that said nothing between so many looks, and nothing for `SILENT_SECONDS`, is frozen. Looks that come late do
not count: a node that slept, or whose cores are all taken, blames none of its runners."""
SILENT_SECONDS = 1.75
"""Nearly as long as a head waits for a step of the others (`pipeline.patience`), and no Wi-Fi is in between. Of a head
nobody else takes notice: with this, its pause is three seconds like theirs."""
SILENT_FACTOR = 6.0
"""Of the longest gap between two words of that runner of late, if it is more: on a slow machine all come late."""
LONGEST_GAP_SECONDS = 1.7
"""More is a node that slept; a runner may be silent for ten seconds at most."""
GAP_FADES = 0.95
"""Per heartbeat: the longest gap is half forgotten after three seconds."""

STUCK_FLOOR_SECONDS = 0.75
STUCK_FACTOR = 5.0
"""How much longer than usual a step may take. A token of a prompt never takes longer than a step that samples one, and a
step of prompts no longer than the longest yet, or as many times that as it reads more."""
STUCK_FIRST_FLOOR_SECONDS = 3.75
"""Until a step has sampled: the first ones wait for pages, kernels and caches that later ones find. With the beats below,
one that hangs is known after five seconds."""
STUCK_UNMEASURED_SECONDS = 10.0
"""For the very first step, that measures how fast this runner reads (`pipeline.seat_loop.REHEARSED_TOKENS`): five times
what a stage of the small model takes on a slow machine with the slowest BLAS that we know."""
SLOWEST_REHEARSED_BYTES_PER_SECOND = 18e6
"""Of what a runner holds, if that takes longer: the largest stage of the small model, of 180 MB, has those ten seconds, one
of 3 GB nearly three minutes. Raising it ends sound runners of large layers on slow machines again and again."""
STUCK_BEATS = 5
"""Of one step that must say so; late ones do not count: a runner that was stopped in mid-step and goes on is through with it in
a second and a quarter. With the floor above, a step that hangs is known after 1.75 to 2 s: before its head gives it up."""

WAITING_SECONDS = 2.0
"""For a neighbour that does not answer this node's pings either. As long as a head waits for a step once it knows how long
steps are; for its very first one, it waits for half a minute."""

OVERDUE_SHARE = 0.6
"""Of what a runner is allowed when only its own agent misses it, where others miss it, too: its instance broke, or the
next epoch wants its layers. A head gives a step up after two seconds at least, so a frozen runner is known by then; one
that works misses two heartbeats at most by chance."""

LOADING_SHARE = 3.0
"""Of what a runner is allowed that runs steps: how long one that loads may be silent, which is 5.25 s. Heartbeats do not
wait for what is read: 0.43 s was the longest gap of five at once on two busy cores, with the small model."""
LAYER_FLOOR_SECONDS = 5.0
SLOWEST_BYTES_PER_SECOND = 5e6
"""Of a disk: a layer may take so long as one so slow needs for it, and the floor beside; 63 s for 290 MB, of a model of
20 GB. A disk that slept has been woken by then: the headers come before."""
UNCOUNTED_SECONDS = 20.0
"""For what reads no layer: the headers and the model's form at first, at last the kernels that a GPU compiles. The small
model needs 1 s for it on two busy cores."""


@dataclass(frozen=True, slots=True)
class RunnerWatch:
    """What has been noticed of one process; it holds whatever seat that process becomes."""

    heard_at: float = 0.0
    """When it said something last; 0: it never did."""
    silent_looks: int = 0
    """Since then; late ones left out."""
    longest_gap_seconds: float = 0.0
    """Between two words of late; it fades."""
    stuck_beats: int = 0
    """Since its last step of a usual length began."""
    steps: int = 0
    waits_since: float = math.inf
    """When it was first heard to wait since it last did anything."""
    idle_looks: int = 0
    """Since it last read a layer; late ones left out."""
    next_bytes: int = 0
    """Of the layer that it reads; 0: of none."""

    def heard(self, message: RunnerMessage, now: float) -> RunnerWatch:
        if isinstance(message, Listening | Loading):
            following = message.next_bytes if isinstance(message, Loading) else 0
            return replace(self, heard_at=now, silent_looks=0, idle_looks=0, next_bytes=following)
        if not isinstance(message, Heartbeat):
            return replace(self, heard_at=now, silent_looks=0)
        gap = now - self.heard_at if self.heard_at else 0.0
        stuck_beats = self.stuck_beats if is_late(gap) else self.stuck_beats + 1
        waits = message.sessions > 0 and not message.busy_seconds and message.steps == self.steps
        return replace(
            self,
            heard_at=now,
            silent_looks=0,
            longest_gap_seconds=max(min(gap, LONGEST_GAP_SECONDS), GAP_FADES * self.longest_gap_seconds),
            stuck_beats=stuck_beats if message.busy_seconds > _honest_seconds(message) else 0,
            steps=message.steps,
            waits_since=min(self.waits_since, now) if waits else math.inf,
        )

    def looked_at(self) -> RunnerWatch:
        """By a look that was not late."""
        return replace(self, silent_looks=self.silent_looks + 1, idle_looks=self.idle_looks + 1)

    def is_silent(self, now: float, share: float = 1.0) -> bool:
        honest_seconds = max(SILENT_SECONDS, SILENT_FACTOR * self.longest_gap_seconds)
        return self.silent_looks >= math.ceil(share * SILENT_LOOKS) and now - self.heard_at >= share * honest_seconds

    @property
    def is_stalled(self) -> bool:
        """While it loads. Told from looks alone: time in which this node slept, or had no core, is not counted."""
        by_size = LAYER_FLOOR_SECONDS + self.next_bytes / SLOWEST_BYTES_PER_SECOND
        return self.idle_looks * LOOK_SECONDS >= (by_size if self.next_bytes else UNCOUNTED_SECONDS)

    def is_stuck(self, share: float = 1.0) -> bool:
        return self.stuck_beats >= math.ceil(share * STUCK_BEATS)

    def is_waiting(self, now: float) -> bool:
        return now - self.waits_since >= WAITING_SECONDS

    def is_overdue(self, now: float, share: float = 1.0) -> bool:
        """Whether it is the likely reason, where others say that something is wrong."""
        return self.is_silent(now, share * OVERDUE_SHARE) or self.is_stuck(OVERDUE_SHARE)


def is_late(seconds: float) -> bool:
    """Whether so long after the one before, a look or a heartbeat says more of the machine than of the runner."""
    return seconds > LOOK_SECONDS + LATE_SECONDS


def _honest_seconds(beat: Heartbeat) -> float:
    """How long the step that a runner is in may take before something is wrong with it."""
    usual: list[float] = []
    if beat.step_seconds:
        usual.append(beat.step_seconds * max(1, beat.busy_tokens))
    if beat.prompt_tokens and (
        beat.busy_tokens or not usual
    ):  # one that samples takes no longer than one that reads some
        usual.append(beat.prompt_seconds * max(1.0, beat.busy_tokens / beat.prompt_tokens))
    if not usual:
        return max(STUCK_UNMEASURED_SECONDS, beat.active_bytes / SLOWEST_REHEARSED_BYTES_PER_SECOND)
    return max(STUCK_FLOOR_SECONDS if beat.step_seconds else STUCK_FIRST_FLOOR_SECONDS, STUCK_FACTOR * min(usual))
