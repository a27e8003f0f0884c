"""Every kind of fault that we claim to survive, a seed each; `./scripts/chaos` plays all of them, and many seeds.

A failure prints the command that plays it again.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import trio
import trio.testing

from meshinfer.base.ids import ModelId, NodeId
from meshinfer.serving.placing import REPAIR_SECONDS
from meshinfer.testing.chaos import (
    Answer,
    Fault,
    Outcome,
    Part,
    Reading,
    Scenario,
    answer_violations,
    faults_not_made,
    holder_now,
    kept_violations,
    rest_violations,
    scenarios,
)
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED, play, read_node
from meshinfer.testing.cluster import Cluster
from meshinfer.topology.placement import Placement, Seat

SEEDS = 1
SCENARIOS = scenarios()
COMMON_SECONDS = 10.0
"""Of a fault that passes: longer than it takes to be noticed."""
PAUSE_SECONDS = 3.0
"""Of a client after a silent stall, with the weights nearby; of virtual time."""
UNKNOWN_PAUSE_SECONDS = 8.0
"""The same before any step has shown how long steps are, or while layers are read."""


def kinds(scenario: Scenario) -> set[object]:
    """What it shows: its deed on that part, at that moment, for that time, with clocks so wrong. Of several, all at once."""
    fault, *others = scenario.faults
    if others:
        return {scenario}
    passes = math.isfinite(fault.seconds)
    skewed = scenario.skew_seconds != 0
    stage = (
        fault.deed,
        passes,
        scenario.nodes,
        scenario.outlasts,
        scenario.ends,
        skewed,
        scenario.fresh,
        scenario.clients,
    )
    shown = {"part": fault.part, "moment": fault.moment, "seconds": fault.seconds, "skew": scenario.skew_seconds}
    return {(*stage, *pair) for pair in shown.items()}


def one_of_each_kind(found: tuple[Scenario, ...]) -> list[Scenario]:
    """As few as show all that `found` shows: always the one with most that is new, of equals one of COMMON_SECONDS."""
    waiting = sorted(found, key=lambda scenario: scenario.faults[-1].seconds != COMMON_SECONDS)
    chosen: list[Scenario] = []
    seen: set[object] = set()
    while waiting:
        best = max(waiting, key=lambda scenario: len(kinds(scenario) - seen))
        if kinds(best) <= seen:
            break
        waiting.remove(best)
        chosen.append(best)
        seen |= kinds(best)
    return [scenario for scenario in found if scenario in chosen]


CHOSEN = one_of_each_kind(SCENARIOS)


@pytest.mark.parametrize("scenario", CHOSEN, ids=[scenario.name for scenario in CHOSEN])
def test_every_promise_holds(scenario: Scenario) -> None:
    """And every fault was made: a run that missed one has failed."""
    for seed in range(SEEDS):
        outcome = play(scenario, seed)
        assert outcome.violations == (), f"{outcome.replay}\n" + "\n".join(outcome.violations)


@pytest.mark.parametrize(("deed", "seed"), [("kill", 11), ("stop", 0)])
def test_a_repair_that_its_planner_left_half_made_holds_nobody_up(deed: str, seed: int) -> None:
    """Its leases end with it: the pause is that of any other loss."""
    name = f"kill middle, and {deed} planner between lease and commit"
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    assert play(scenario, seed).answers[0].pause_seconds <= PAUSE_SECONDS


def test_an_origin_whose_own_view_calls_its_instance_broken_asks_for_a_repair() -> None:
    """Nothing breaks at this end, and a second repair that nobody asks for waits until the first is ten seconds old."""
    name = "kill runner of last at prefill, then cut between head and middle for 10 s"
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    assert play(scenario, 0).answers[0].pause_seconds <= REPAIR_SECONDS / 2


UNKNOWN = [
    scenario
    for scenario in SCENARIOS
    if scenario.fresh or scenario.name.endswith("runner of replacement during the repair")
]


@pytest.mark.parametrize("scenario", UNKNOWN, ids=[scenario.name for scenario in UNKNOWN])
def test_what_stalls_before_anything_is_usual_costs_seconds(scenario: Scenario) -> None:
    for seed in range(2):
        assert play(scenario, seed).answers[0].pause_seconds < UNKNOWN_PAUSE_SECONDS


@pytest.mark.parametrize("part", ["replacement", "bystander"])
def test_a_run_whose_fault_hits_nobody_has_failed(part: Part) -> None:
    """Nothing was lost that is replaced; and everybody is a stage."""
    scenario = Scenario("nobody there", (Fault("kill", part),), nodes=3)
    assert play(scenario, 0).violations == (f"fault not made: kill {part} (token k)",)


def test_who_has_no_seat_has_no_next_one_to_be_cut_from() -> None:
    scenario = Scenario("no seat", (Fault("cut from next", "bystander", seconds=10.0),))
    assert play(scenario, 0).violations == ("fault not made: cut from next bystander (token k)",)


def test_of_equal_faults_each_must_be_made() -> None:
    kill, again = Fault("kill", "middle"), Fault("kill", "middle", "repair")
    assert faults_not_made((kill, again), (again, kill)) == []
    assert faults_not_made((kill, again, kill), (kill, again)) == ["fault not made: kill middle (token k)"]


@pytest.mark.parametrize(
    ("ends", "now"), [((30,), "n0"), ((5, 30), "n1"), ((10, 20, 30), "n1"), ((4, 8, 12, 30), "n2")], ids=str
)
def test_a_lost_seat_is_replaced_by_who_has_its_first_layer_however_many_seats_there_are(
    ends: tuple[int, ...], now: str
) -> None:
    seats = tuple(Seat(NodeId(f"n{index}"), start, end) for index, (start, end) in enumerate(pairwise((0, *ends))))
    repaired = Placement(ModelId("a-model"), "digest", 30, "pipeline", "libp2p", 512, 3, seats)
    assert holder_now(Seat(NodeId("lost"), 10, 20), repaired) == now


def test_a_seed_replays() -> None:
    def story(outcome: Outcome) -> object:
        return outcome.recomputed_tokens, [answer.times for answer in outcome.answers]

    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "kill middle at token k")
    assert story(play(scenario, 5)) == story(play(scenario, 5))


# --- the checks themselves see what they are there to see ---------------------------------------


def answer(got: str, *, error: str = "", ended_at: float = 2.0, ids: tuple[str, ...] = ("a",)) -> Answer:
    return Answer("first", "hello", 10.0, 0.0, got=list(got), ids=set(ids), error=error, ended_at=ended_at)


def test_an_answer_as_promised_is_no_violation() -> None:
    assert answer_violations(answer("hello"), "success") == []
    assert answer_violations(answer("hel", error="no_room"), "error") == []
    assert answer_violations(answer("hel", error="connection"), "success") != []
    lost = answer("hel", error="connection")
    lost.origin_was_lost = True
    assert answer_violations(lost, "success") == []


@pytest.mark.parametrize(
    ("bad", "promise"),
    [
        (answer("hel", ended_at=float("nan")), "1:"),
        (answer("hello", ended_at=12.0), "1:"),
        (answer("hel", error="internal"), "1:"),
        (answer("hello!"), "2:"),
        (answer("helo"), "2:"),
        (answer("hell"), "2:"),
        (answer("hello", ids=("a", "b")), "2:"),
        (answer("jello", error="peer_lost"), "2:"),
        (answer("hel", error="peer_lost"), "3:"),
    ],
)
def test_every_broken_promise_to_a_client_is_seen(bad: Answer, promise: str) -> None:
    assert any(violation.startswith(promise) for violation in answer_violations(bad, "success"))


def reading(node: str, **more: object) -> Reading:
    fields: dict[str, object] = {
        "members": frozenset("ab"),
        "instances": (("i", 1, "p", "ready"),),
        "requests": 0,
        "sessions": 0,
        "runners": 1,
        "seats": 1,
        "runner_files": (20,),
    }
    return Reading(node=node, **{**fields, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 1},
        {"sessions": 1},
        {"runners": 2},
        {"tasks": 1},
        {"files": 50},
        {"runner_files": (50,)},
        {"cache_bytes": 1},
        {"members": frozenset("abc")},
        {"instances": (("i", 2, "p", "ready"),)},
    ],
)
def test_every_trace_that_is_left_on_a_node_is_seen(wrong: dict[str, object]) -> None:
    before = [reading("a"), reading("b")]
    assert rest_violations(before, before) == []
    assert rest_violations(before, [reading("a"), reading("b", **wrong)]) != []


def test_what_stages_hold_of_an_answer_is_read_while_they_do_and_what_broke_off_until_it_lapses() -> None:
    async def main() -> None:
        cluster = Cluster(random.Random(1), memory_bytes=NODE_BYTES, speed=SPEED)
        holders: list[int] = []

        def holding(what: str) -> int:
            return sum(getattr(read_node(cluster, node), what) > 0 for node in cluster.live())

        async with cluster.running(4):
            origin = cluster.nodes[0]
            await cluster.ask(origin, cluster.request((1, 2), 5), lambda _: holders.append(holding("cache_bytes")))
            assert holders[0] == 3
            await cluster.until(lambda: not holding("cache_bytes"))
            (instance,) = origin.instances()
            lost = next(one for one in instance.placement.node_ids if one != origin.node_id)
            with trio.CancelScope() as client:

                def on_token(index: int) -> None:
                    if index == 2:
                        cluster.kill(next(node for node in cluster.live() if node.node_id == lost))
                        client.cancel()

                await cluster.ask(origin, cluster.request((1, 2), 50), on_token)
            await cluster.until(lambda: holding("kept_bytes") > 0 and not holding("cache_bytes"))
            await cluster.until(lambda: not holding("kept_bytes"))

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_what_is_kept_for_nobody_is_seen() -> None:
    assert kept_violations([reading("a")]) == []
    assert kept_violations([reading("a"), reading("b", kept_bytes=7)]) == ["4: node b keeps 7 bytes for nobody"]
