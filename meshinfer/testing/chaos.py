"""Chaos as values: what is done to whom and when, and what must hold all the same.

    Scenario ──► a stage for it: simulated agents (`chaos_room`) or real processes (`scripts/chaos.py`)
                     │ one `Answer` per client, one `Reading` per node before and after
                     ▼
                 violations(): the same checks for both

A scenario says nothing of how its faults are made, so that one list serves the simulation and the real
thing. Who plays which part, and at which token it is hit, the stage draws from the run's seed; a run that
fails prints it. Pure.

A fault that was wanted and could not be made (nobody played its part, say) proves nothing: such a run has failed
(`faults_not_made`), whatever its clients saw.

The promises, numbered as in the reports:
1. every request ends, with success or one error that has a name, within its deadline;
2. what the client has is what the failure-free run gives: all of it after a success, a beginning of it
   after an error; so no token is lost, doubled or changed, and the answer's id never changes;
3. success wherever the model still fits on who is left, and again once it does where it did not;
4. five seconds after the last request, sessions, tasks, links and files are as before it, and after FREED_SECONDS
   nobody computes for an origin that has vanished; what stages keep of answers that broke off, in case they are opened
   again, is gone after the 20 s of `engine.keeping`;
5. all live nodes see each other, and the same instances in the same epochs;
6. no stage ran a step of an epoch that its node no longer holds;
7. what runners hold never exceeded what their node offers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from meshinfer.base.ids import NodeId
from meshinfer.topology.placement import Placement, Seat

HOUR_SECONDS = 3600.0
"""What wrong clocks are wrong by."""
FREED_SECONDS = 12.0
"""An origin that stops or is cut off is out of the view after three seconds, seven where all comes late, and five more let
it come back (`serving.origins`)."""

Deed = Literal[
    "kill",
    "leave",
    "stop",
    "kill runner",
    "hang runner",
    "freeze runner",
    "cut off",
    "deafen",
    "mute",
    "cut from origin",
    "cut from next",
    "mute to next",
    "deafen to next",
    "split",
    "step clocks",
    "starve runner",
    "refuse memory",
    "slow down",
    "fill disk",
    "delay lines",
    "throttle lines",
    "corrupt lines",
    "stall lines",
    "drop lines",
    "half-close lines",
    "reset lines",
    "delay channels",
    "throttle channels",
    "corrupt channels",
    "stall channels",
    "drop channels",
    "half-close channels",
    "reset channels",
]
"""kill: agent and runners die at once. leave: the agent is asked to go (SIGTERM), and does. stop: they freeze, and their sockets stay open. kill runner, hang runner: its
runner alone dies, or computes no more while it goes on to send heartbeats. freeze runner: it alone is stopped. cut off: nothing passes from or to it;
deafen: to it; mute: from it. cut from origin: nothing passes between it and the request's origin, while all others
reach both (a bridge). cut from next: nothing passes between it and the seat after it, the head after the last one, while
all others reach both; mute to next: nothing from it to that one; deafen to next: nothing from that one to it. split: the mesh falls into the origin with as many others as the model needs, and the rest.
step clocks: its wall clock steps by an hour, ahead or back.
Of real machines only: starve runner: the kernel kills it for want of memory; refuse memory: it gets no more of it;
slow down: its cable carries 200 kbit/s; fill disk: no byte more can be written in its home. … lines: its
control connections (not those of its runners) suffer that from a fault proxy, both ways. … channels: those of its runners
do, and those that its own clients' answers come by (of these, the simulation has the stall)."""
OF_RUNNERS: frozenset[Deed] = frozenset(
    ("kill runner", "freeze runner", "hang runner", "starve runner", "refuse memory")
)
"""They need one that has a seat."""
Part = Literal["origin", "head", "middle", "last", "planner", "replacement", "holder", "bystander"]
"""head, middle, last: of the placement before anything happened. replacement: who has the first layer of the seat that
was lost first now, in a newer epoch. holder: any with a seat. bystander: one without a seat that is not the origin."""
Moment = Literal["prefill", "first token", "token k", "repair", "placing"]
"""Of the first client's request. token k: any but the first and the last. repair: after the origin noticed
an earlier fault, before the session is open again. placing: between the first lease and the last commit of the next epoch, or just after."""


@dataclass(frozen=True, slots=True)
class Fault:
    deed: Deed
    part: Part
    moment: Moment = "token k"
    seconds: float = math.inf
    """Until it is undone: the killed restarted, the stopped woken, the cut mended. Infinite: not while it matters."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Faults, and on what stage."""

    name: str
    faults: tuple[Fault, ...]
    nodes: int = 5
    stages: int = 3
    """As many nodes as the model needs at least."""
    fresh: bool = False
    """The instance is new: nobody asked it anything yet, so no step of it is usual."""
    skew_seconds: float = 0.0
    """How far the clocks of one node, which the seed picks, are ahead of the others', from the start."""
    outlasts: bool = False
    """The first two clients' answers go on when the faults are over."""
    ends: Literal["success", "error", "either"] = "success"
    """What the clients of live origins must see. either: the fault outlasts what a request waits for, or hits the
    origin itself."""
    clients: int = 3
    """Who ask at once."""


NEIGHBOURS: tuple[tuple[Part, Part], ...] = (("head", "middle"), ("middle", "last"), ("last", "head"))
BETWEEN: dict[Deed, str] = {
    "cut from next": "cut between {} and {}",
    "mute to next": "nothing passes from {} to {}",
    "deafen to next": "nothing passes to {} from {}",
}
"""What is done to two neighbours in the pipeline, neither of which is the origin."""


def scenarios() -> tuple[Scenario, ...]:
    """Every fault that we claim to survive."""
    found: list[Scenario] = []
    moments: tuple[Moment, ...] = ("prefill", "first token", "token k")
    parts: tuple[Part, ...] = ("head", "middle", "last", "planner")
    for part in parts:
        found += [Scenario(f"kill {part} at {moment}", (Fault("kill", part, moment),)) for moment in moments]
    # Who sat in the middle is dead by then: `replacement` is who sits there now.
    during: tuple[Part, ...] = ("head", "last", "planner", "replacement")
    first = Fault("kill", "middle")
    for part in during:
        found.append(Scenario(f"kill middle, and {part} during the repair", (first, Fault("kill", part, "repair"))))
    found.append(
        Scenario("kill middle, and origin during the repair", (first, Fault("kill", "origin", "repair")), nodes=6)
    )
    ends: tuple[Part, ...] = ("head", "last")
    for part in ends:
        name = f"kill middle, and runner of {part} during the repair"
        found.append(Scenario(name, (first, Fault("kill runner", part, "repair"))))
    for planner in (Fault("kill", "planner", "placing"), Fault("stop", "planner", "placing", seconds=10.0)):
        name = f"kill middle, and {planner.deed} planner between lease and commit"
        found.append(Scenario(name, (Fault("kill", "middle"), planner), nodes=8))
    found.append(Scenario("kill head and middle at once", (Fault("kill", "head"), Fault("kill", "middle"))))
    found.append(Scenario("kill middle and last at once", (Fault("kill", "middle"), Fault("kill", "last"))))
    for part in ("head", "middle", "last"):
        found += [Scenario(f"kill runner of {part} at {m}", (Fault("kill runner", part, m),)) for m in moments]
        found.append(Scenario(f"hang runner of {part}", (Fault("hang runner", part),)))
        found.append(Scenario(f"freeze runner of {part}", (Fault("freeze runner", part),)))
        newly = Fault("hang runner", part, "first token")
        found.append(Scenario(f"hang runner of {part} at the first token of a fresh instance", (newly,), fresh=True))
    newly = Fault("freeze runner", "middle", "first token")
    found.append(Scenario("freeze runner of middle at the first token of a fresh instance", (newly,), fresh=True))
    found.append(
        Scenario(
            "hang runner of middle at prefill of a fresh instance",
            (replace(newly, deed="hang runner", moment="prefill"),),
            fresh=True,
        )
    )
    stalls: tuple[Deed, ...] = ("hang runner", "freeze runner")
    for deed in stalls:
        again = (Fault("kill", "middle"), Fault(deed, "replacement", "repair"))
        found.append(Scenario(f"kill middle, and {deed} of replacement during the repair", again))
    # The seat may be made again where it was, or elsewhere.
    again = (Fault("kill runner", "middle"), Fault("kill runner", "replacement", "repair"))
    found.append(Scenario("kill runner of middle, again during the repair", again))
    for seconds in (2.0, 10.0, 60.0):
        for part in parts:
            found.append(Scenario(f"stop {part} for {seconds:.0f} s", (Fault("stop", part, seconds=seconds),)))
        origin = (Fault("stop", "origin", seconds=seconds),)
        found.append(Scenario(f"stop origin for {seconds:.0f} s", origin, ends="either"))
    origin = (Fault("stop", "origin", seconds=10.0),)
    found.append(Scenario("stop origin for 10 s in a long answer", origin, nodes=6, outlasts=True))
    origin = (Fault("cut off", "origin", seconds=15.0),)
    found.append(Scenario("cut off origin for 15 s in a long answer", origin, nodes=6, outlasts=True, ends="either"))
    for moment in moments:
        found.append(Scenario(f"kill origin at {moment}", (Fault("kill", "origin", moment),), nodes=6))
    # Asked to leave, a node has its seats loaded elsewhere and lets its own clients' answers end: nobody sees an error.
    leavers: tuple[Part, ...] = (*parts, "origin")
    found += [Scenario(f"{part} leaves", (Fault("leave", part),)) for part in leavers]
    both: tuple[tuple[Part, Part], ...] = (("head", "middle"), ("middle", "last"))
    for one, other in both:
        found.append(
            Scenario(f"{one} and {other} leave at once", (Fault("leave", one), Fault("leave", other)), nodes=6)
        )
    found.append(Scenario("kill a bystander", (Fault("kill", "bystander"),)))
    for part in ("head", "middle"):
        name = f"kill {part} while more clients ask than there are places"
        found.append(Scenario(name, (Fault("kill", part),), clients=9))
    found.append(Scenario("kill and restart middle", (Fault("kill", "middle", seconds=1.0),)))
    split = (Fault("split", "origin", seconds=10.0),)
    found.append(Scenario("split for 10 s", split, nodes=6))
    found.append(Scenario("split for 10 s in a long answer", split, nodes=6, outlasts=True))
    found.append(Scenario("cut off middle for 10 s", (Fault("cut off", "middle", seconds=10.0),)))
    for part in ("head", "last"):
        found.append(Scenario(f"deafen {part} for 10 s", (Fault("deafen", part, seconds=10.0),)))
        found.append(Scenario(f"mute {part} for 10 s", (Fault("mute", part, seconds=10.0),)))
        bridge = (Fault("cut from origin", part, seconds=10.0),)
        found.append(Scenario(f"bridge: {part} and origin cannot reach each other for 10 s", bridge))
    # A head that has stepped a few times only is patient for half a minute: the nodes beside the cut notice, not the data path.
    again = (Fault("kill runner", "last", "prefill"), Fault("cut from next", "head", "first token", seconds=10.0))
    found.append(Scenario("kill runner of last at prefill, then cut between head and middle for 10 s", again))
    for part, following in NEIGHBOURS:
        for deed, how in BETWEEN.items():
            found.append(Scenario(f"{how.format(part, following)} for 10 s", (Fault(deed, part, seconds=10.0),)))
    for part in ("head", "last"):  # as a firewall does it that knows the agents and not their runners
        stalled = (Fault("stall channels", part, seconds=10.0),)
        found.append(Scenario(f"stall channels of {part} for 10 s", stalled))
        found.append(Scenario(f"stall channels of {part} for 10 s in a long answer", stalled, nodes=6, outlasts=True))
    lost = (Fault("kill", "middle"),)
    for part in ("middle", "planner"):
        for way, skew in (("ahead", HOUR_SECONDS), ("behind", -HOUR_SECONDS)):
            name = f"kill {part}, one node's clocks an hour {way}"
            found.append(Scenario(name, (Fault("kill", part),), skew_seconds=skew))
    found.append(Scenario("step clocks of origin", (Fault("step clocks", "origin"),)))
    step = Fault("step clocks", "planner", "first token")
    found.append(Scenario("step clocks of planner, and kill last", (step, Fault("kill", "last"))))
    found.append(Scenario("kill middle, and the model fits nowhere", lost, nodes=3, ends="error"))
    lost = (Fault("kill", "head"), Fault("kill", "middle"))
    found.append(Scenario("kill head and middle at once, and the model fits nowhere", lost, nodes=3, ends="error"))
    return tuple(found)


def machine_scenarios() -> tuple[Scenario, ...]:
    """What an operating system does to programs; the simulation has none."""
    found: list[Scenario] = []
    for part in ("head", "last"):
        found.append(Scenario(f"runner of {part} out of memory", (Fault("starve runner", part),)))
        found.append(Scenario(f"runner of {part} is refused memory", (Fault("refuse memory", part, "prefill"),)))
        found.append(Scenario(f"slow cable of {part} for 10 s", (Fault("slow down", part, seconds=10.0),)))
    full: tuple[Part, ...] = ("head", "last", "planner", "origin", "bystander")
    disks = tuple(Fault("fill disk", part, "first token") for part in full)
    found.append(Scenario("all disks full", disks))
    found.append(Scenario("all disks full, and kill and restart last", (*disks, Fault("kill", "last", seconds=1.0))))
    lines: tuple[Deed, ...] = ("delay lines", "throttle lines", "corrupt lines", "stall lines", "drop lines")
    found += [Scenario(f"{deed} of last for 10 s", (Fault(deed, "last", "first token", 10.0),)) for deed in lines]
    at_once: tuple[Deed, ...] = ("half-close lines", "reset lines")
    found += [Scenario(f"{deed} of last", (Fault(deed, "last"),)) for deed in at_once]
    channels: tuple[Deed, ...] = (
        "delay channels",
        "throttle channels",
        "corrupt channels",
        "drop channels",
    )
    broken: tuple[Deed, ...] = ("half-close channels", "reset channels")
    for part in ("head", "last"):
        found += [Scenario(f"{deed} of {part} for 10 s", (Fault(deed, part, seconds=10.0),)) for deed in channels]
        found += [Scenario(f"{deed} of {part}", (Fault(deed, part),)) for deed in broken]
    slow = Fault("delay lines", "planner", "prefill", seconds=20.0)
    found.append(Scenario("kill last while the lines of the planner are slow", (slow, Fault("kill", "last"))))
    return tuple(found)


# --- what is read ------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """One request as its client saw it."""

    client: str
    expected: Sequence[object]
    """The failure-free answer: token ids, or characters."""
    deadline_seconds: float
    asked_at: float
    origin_was_lost: bool = False
    """Its origin died with it: then it may end as a broken connection, at any token."""
    got: list[object] = field(default_factory=list[object])
    times: list[float] = field(default_factory=list[float])
    """When each came."""
    ids: set[str] = field(default_factory=set[str])
    """Of the response, as its chunks carried them."""
    ended_at: float = math.nan
    error: str = ""
    """The code of the error that it ended with; empty after a success."""
    said: str = ""
    """The error's words."""

    @property
    def succeeded(self) -> bool:
        return not math.isnan(self.ended_at) and not self.error

    @property
    def pause_seconds(self) -> float:
        """The longest that its client waited for the next token, the first included."""
        times = [self.asked_at, *self.times]
        return max((after - before for before, after in pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """One live node's own account of itself, at rest."""

    node: str
    members: frozenset[str]
    instances: tuple[tuple[str, int, str, str], ...]
    """(id, epoch, placement, state), sorted."""
    requests: int
    """In flight, with this node as their origin."""
    sessions: int
    """In its runners."""
    runners: int
    seats: int
    """That should have a runner."""
    tasks: int = 0
    """Of requests and links. Simulated agents only: real ones show theirs nowhere."""
    files: int = 0
    """Open file descriptors; 0 where that means nothing."""
    runner_files: tuple[int, ...] = ()
    """The same, of each of its runners, where channels are."""
    cache_bytes: int = 0
    """Keys and values of sessions in its runners; of the exact engine, their tokens."""
    kept_bytes: int = 0
    """What its runners hold in case a session is opened again: on purpose, for some seconds after a repair."""


FILES_SLACK = 12
"""Connections to a peer that came back, and files that the interpreter opens late. Whoever plays many runs with the same
processes compares with the first reading of each, so that a leak of one a run shows too."""
RUNNER_FILES_SLACK = 2
"""The first and the last stage have a channel to each origin and so the most: 10 with two of them. What is closing counts, too."""
TYPED = frozenset(
    (
        "no_room",
        "queue_full",
        "peer_lost",
        "deadline_exceeded",
        "generation_failed",
        "model_not_found",
        "node_leaving",
    )
)
"""Codes that an answer may end with when nodes are lost: each says what it means. `internal` is none of them."""


def answer_violations(answer: Answer, ends: str) -> list[str]:
    """Promises 1 to 3, for one client."""
    found: list[str] = []
    who = f"client {answer.client}"
    expected, got = tuple(answer.expected), tuple(answer.got)
    if math.isnan(answer.ended_at):
        found.append(f"1: {who} was left in silence with {len(got)} of {len(expected)} tokens")
    elif answer.ended_at > answer.asked_at + answer.deadline_seconds + 1.0:
        found.append(f"1: {who} ended {answer.ended_at - answer.asked_at:.1f} s after it asked")
    if got != expected[: len(got)]:
        at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(expected))
        found.append(f"2: {who} has {got[at : at + 3]} from token {at} on; expected {expected[at : at + 3]}")
    elif answer.succeeded and len(got) < len(expected):
        found.append(f"2: {who} was told that {len(got)} tokens are all; expected {len(expected)}")
    if len(answer.ids) > 1:
        found.append(f"2: {who} got several response ids: {sorted(answer.ids)}")
    if answer.origin_was_lost:
        return found
    if answer.error and answer.error not in TYPED:
        found.append(f"1: {who} got {answer.error!r}: {answer.said}")
    if ends == "success" and answer.error:
        found.append(f"3: {who} failed after {len(got)} tokens with {answer.error}: {answer.said}")
    if ends == "error" and answer.succeeded:
        found.append(f"3: {who} has an answer from a model that fits nowhere")
    return found


def holder_now(lost: Seat, placement: Placement) -> NodeId:
    """Who has the first layer of a seat that was lost: the seats of a repair may be fewer, or cut elsewhere."""
    return next(seat.node_id for seat in placement.seats if seat.start <= lost.start < seat.end)


def faults_not_made(wanted: Iterable[Fault], made: Iterable[Fault]) -> list[str]:
    """A run without them shows nothing of what its name says."""
    missing = Counter(wanted) - Counter(made)
    return [f"fault not made: {fault.deed} {fault.part} ({fault.moment})" for fault in missing.elements()]


def trace_violations(before: Iterable[Reading], after: Iterable[Reading]) -> list[str]:
    """Promise 4."""
    found: list[str] = []
    once = {reading.node: reading for reading in before}
    most = max((files for reading in once.values() for files in reading.runner_files), default=math.inf)
    for reading in after:
        who = f"node {reading.node}"
        leaky = [files for files in reading.runner_files if files > most + RUNNER_FILES_SLACK]
        found += [f"4: a runner of {who} has {files} open files; {most} was the most before" for files in leaky]
        if reading.requests or reading.sessions:
            found.append(f"4: {who} still has {reading.requests} requests and {reading.sessions} sessions")
        if reading.cache_bytes:
            found.append(f"4: {who} still has {reading.cache_bytes} bytes of keys and values")
        if reading.runners != reading.seats:
            found.append(f"4: {who} has {reading.runners} runners for {reading.seats} seats")
        was = once.get(reading.node)
        if was is not None and reading.tasks > was.tasks:
            found.append(f"4: {who} has {reading.tasks} tasks, {was.tasks} before")
        if was is not None and reading.files > was.files + FILES_SLACK:
            found.append(f"4: {who} has {reading.files} open files, {was.files} before")
    return found


def agreement_violations(after: Sequence[Reading]) -> list[str]:
    """Promise 5; `after` has all and only the live nodes."""
    found: list[str] = []
    live = frozenset(reading.node for reading in after)
    for reading in after:
        who = f"node {reading.node}"
        if reading.members != live:
            found.append(f"5: {who} sees {sorted(reading.members)}; alive are {sorted(live)}")
        if reading.instances != after[0].instances:
            found.append(f"5: {who} sees {reading.instances}, {after[0].node} sees {after[0].instances}")
    return found


def rest_violations(before: Iterable[Reading], after: Sequence[Reading]) -> list[str]:
    """Promises 4 and 5, once nodes that were apart have had time to meet."""
    return trace_violations(before, after) + agreement_violations(after)


def kept_violations(after: Iterable[Reading]) -> list[str]:
    """The rest of promise 4, once what is kept on purpose has lapsed."""
    return [f"4: node {one.node} keeps {one.kept_bytes} bytes for nobody" for one in after if one.kept_bytes]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    scenario: str
    seed: int
    answers: tuple[Answer, ...]
    violations: tuple[str, ...]
    recomputed_tokens: float = math.nan
    """Positions that a stage read again, or that a replacement read for the lost one, over all stages."""
    recompute_seconds: float = math.nan
    """What reading them took of the first client's pause, where that can be told."""
    settled_seconds: float = 0.0
    """From the last fault's end (and the last answer's) to rest: all promises of 4 and 5 hold."""
    phases: tuple[tuple[str, float], ...] = ()
    """Of the first client's longest pause: what happened, and how many seconds after the fault; where that can be told."""

    @property
    def replay(self) -> str:
        """The command that plays it again."""
        return f"./scripts/chaos --only {self.scenario!r} --seed {self.seed}"


def percentile(values: Iterable[float], share: float) -> float:
    """By nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
