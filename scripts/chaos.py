"""Chaos, the long run: every scenario many times, what churn costs, and a table of it in docs/log/.

    ./scripts/chaos                                   all of it: an hour and more
    ./scripts/chaos --real-runs 0                     simulation only
    ./scripts/chaos --only "kill middle" --seed 7     one run again, with the agents' log

What limits what: in the simulation a pause is made of what the protocol waits for (a broken channel: nothing;
a silent node: two seconds) and of what loading and reading the prompt again are said to take. On real agents it
is made of those and of this machine: all agents, all runners and this script share its cores, so pauses there
say what a small machine does with everything on it, not what laptops do.

Exit code 0 only if every promise held in every run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import platformdirs
import psutil

from meshinfer.base.errors import MeshinferError
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
from meshinfer.testing import chaos_agents, chaos_room, churn, failing_stages, neighbours
from meshinfer.testing.agent_room import LITTLE_MEMORY_BYTES, MEMORY_BYTES, MODEL, AgentRoom, agent_room
from meshinfer.testing.agent_witness import idle_cpu
from meshinfer.testing.bad_channels import BadChannels
from meshinfer.testing.bad_lines import BadLines
from meshinfer.testing.chaos import Outcome, Scenario, machine_scenarios, percentile, scenarios
from meshinfer.testing.machines import CabledMachines, OneMachine, SkewedClocks, SmallDisks

LOG = Path("docs/log")
REAL_AGENTS = 5
"""With three seats, as in the simulation, and two agents to spare. On fewer cores than agents pauses measure the cores, too."""

WITH_SKEWED_CLOCKS = frozenset(("kill runner of head at token k", "stop last for 2 s"))
"""Also with wrong clocks; those that are about clocks are played there alone."""


IDLE_SECONDS, IDLE_SHARE, IDLE_WAIT_SECONDS = 10.0, 0.02, 60.0


@dataclass
class Row:
    scenario: Scenario
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    crashed: list[str] = field(default_factory=list[str])
    """Runs that could not be played to their end: bugs of ours or of this harness."""

    def worst(self) -> str:
        """Where the longest pause went; empty where that cannot be told."""
        told = [outcome for outcome in self.outcomes if outcome.phases]
        if not told:
            return ""
        worst = max(told, key=lambda outcome: outcome.answers[0].pause_seconds)
        phases = ", ".join(f"{phase} {at:.2f}" for phase, at in worst.phases)
        return f"- {self.scenario.name}, {worst.answers[0].pause_seconds:.2f} s: {phases}"

    def cells(self) -> str:
        first = [outcome.answers[0] for outcome in self.outcomes]
        pauses = [answer.pause_seconds for answer in first]
        again = [(o.answers[0].pause_seconds, o.recompute_seconds) for o in self.outcomes]
        apart = [pause - (0.0 if math.isnan(reading) else min(pause, reading)) for pause, reading in again]
        everyone = [answer for o in self.outcomes for answer in o.answers if not answer.origin_was_lost]
        good = sum(answer.succeeded for answer in everyone)
        kept = sum(not outcome.violations for outcome in self.outcomes)
        runs = len(self.outcomes) + len(self.crashed)
        tokens = sum(outcome.recomputed_tokens for outcome in self.outcomes) / max(1, len(self.outcomes))
        return (
            f"| {self.scenario.name} | {runs} | {kept}/{runs} | {100 * good / max(1, len(everyone)):.0f} % "
            f"| {percentile(pauses, 0.5):.2f} | {percentile(pauses, 0.95):.2f} | {percentile(pauses, 1.0):.2f} "
            f"| {percentile(apart, 0.5):.2f} | {percentile(apart, 0.95):.2f} | {_figure(tokens, 0)} |"
        )


def _figure(value: float, digits: int) -> str:
    """A dash for what cannot be told."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


HEADER = (
    "| fault | runs | all promises kept | clients answered | pause p50 s | p95 s | worst s | without reading again p50 s "
    "| p95 s | tokens recomputed |\n|---|---|---|---|---|---|---|---|---|---|"
)


class Report:
    """What goes to the screen and to the file, in the same order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str = "") -> None:
        self.lines.append(text)
        print(text, flush=True)

    def write(self, directory: Path, name: str) -> Path:
        """Into a new file, so named, or with a number: an earlier one may be quoted somewhere."""
        directory.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = directory / (f"{name}.md" if number == 1 else f"{name}-{number}.md")
            with contextlib.suppress(FileExistsError), path.open("x") as file:
                file.write("\n".join(self.lines) + "\n")
                return path
        raise AssertionError


@dataclass(frozen=True)
class Setting:
    """What real agents play in."""

    title: str
    machines: type[OneMachine]
    agents: int = REAL_AGENTS
    memory_bytes: int = MEMORY_BYTES
    """Of each."""

    def can_play(self, scenario: Scenario) -> bool:
        return chaos_agents.can_play(scenario, self.machines, self.agents)


SETTINGS = (
    Setting("real small model", OneMachine),
    Setting("too few for the model", OneMachine, 3, LITTLE_MEMORY_BYTES),
    Setting("with a cable each", CabledMachines),
    Setting("with small disks", SmallDisks),
    Setting("with control lines over fault proxies", BadLines),
    Setting("with channels over fault proxies", BadChannels),
)
"""The plainest first."""
WRONG_CLOCKS = Setting("with wrong clocks", SkewedClocks)


def play_all(
    chosen: Iterable[Scenario], seeds: Iterable[int], play: Callable[[Scenario, int], Outcome], report: Report
) -> list[Row]:
    rows: list[Row] = []
    seeds = tuple(seeds)
    report.say(HEADER)
    for scenario in chosen:
        row = Row(scenario)
        for seed in seeds:
            try:
                outcome = play(scenario, seed)
            except Exception as error:  # noqa: BLE001 - one run that cannot be played must not end the others
                row.crashed.append(f"{error!r}")
                print(f"  crashed: {scenario.name!r} --seed {seed}: {error!r}"[:2000], file=sys.stderr, flush=True)
                continue
            row.outcomes.append(outcome)
            for violation in outcome.violations:
                print(f"  {outcome.replay}\n    {violation}", file=sys.stderr, flush=True)
        rows.append(row)
        report.say(row.cells())
    return rows


def poisson(report: Report) -> bool:
    report.say("\n## Goodput under Poisson churn\n")
    report.say(
        "Eight nodes of which the model needs three, four clients that ask again and again; each node is killed after an "
        "exponential time of the given mean and restarted 10 s later. A client whose own origin dies asks another. In the "
        "end the clients go, the dead come back, and every node is read. An error breaks a promise, unless fewer than three "
        "nodes lived or the one that was asked, just back, had met fewer.\n"
    )
    report.say("| mean life of a node | good tokens/s | answers | errors | lost with their origin | deaths |")
    report.say("|---|---|---|---|---|---|")
    fine = True
    for life in (math.inf, 300.0, 60.0):
        found = churn.goodput(life, 1)
        fine = fine and not found.violations
        for violation in found.violations:
            print(f"  Poisson churn, mean life {life:.0f} s: {violation}", file=sys.stderr, flush=True)
        errors = ", ".join(f"{count} {code}" for code, count in sorted(found.errors.items())) or "none"
        report.say(
            f"| {'no churn' if math.isinf(life) else f'{life:.0f} s'} | {found.tokens_per_second:.1f} | {found.answers} "
            f"({found.wrong} wrong) | {errors} | {found.with_their_origin} | {found.deaths} |"
        )
    return fine


def unrelated(report: Report) -> None:
    report.say("\n## A request on other nodes\n")
    without = [gap for seed in range(5) for gap in churn.gaps(seed, failure=False)]
    beside = [gap for seed in range(5) for gap in churn.gaps(seed, failure=True)]
    report.say(
        f"Inter-token p99 of an answer while a node of another model's instance is killed (virtual time): "
        f"{1000 * percentile(beside, 0.99):.1f} ms; without the failure {1000 * percentile(without, 0.99):.1f} ms. "
        "Simulated nodes share no cores and no cables, so this shows that nobody waits for the repair of another model, and "
        "nothing of contention: for that see real agents."
    )


def real(
    report: Report, setting: Setting, chosen: Iterable[Scenario], seeds: Iterable[int], *, logs: bool
) -> list[Row]:
    """All of `chosen`, in one setting."""
    if why := setting.machines.why_not():
        report.say(f"Skipped: {why}.")
        return []
    store = platformdirs.user_cache_path("meshinfer", appauthor=False) / "test-assets" / "models"
    try:
        pull(MODEL, ModelStore(store), lambda _: None)
    except MeshinferError as error:
        report.say(f"Skipped: the small model cannot be had: {error}")
        return []
    report.say(
        f"{setting.agents} agents, {MODEL} over three of them, {psutil.cpu_count()} cores for everything, load "
        f"{os.getloadavg()[0]:.1f} when it began. Clients read server-sent events over HTTP; times are those of their "
        "characters.\n"
    )
    with agent_room(setting.machines, store, setting.agents, setting.memory_bytes) as room:
        rows = play_all(chosen, seeds, chaos_agents.AgentChaos(room).play, report)
        room.keeps_logs = logs or any(row.crashed or any(one.violations for one in row.outcomes) for row in rows)
        if room.keeps_logs:
            print(f"  logs: {room.machines.directory}", file=sys.stderr, flush=True)
        shares, seconds = idle_share(room)
    if worst := [line for row in rows if (line := row.worst())]:
        report.say("\nThe longest pause of each, in seconds after the fault, by the agents' logs:\n")
        report.say("\n".join(worst))
    told = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
    report.say(f"\nIdle, {seconds:.0f} s later, agent and runners together take of one core: {told}.")
    report.say(f"Load {os.getloadavg()[0]:.1f} when it ended.")
    return rows


def real_neighbours(report: Report, rounds: int) -> None:
    """A request on other nodes, on real agents; rounds with and without the failure take turns."""
    report.say("\n## A request on other nodes, real agents\n")
    assets = platformdirs.user_cache_path("meshinfer", appauthor=False) / "test-assets"
    try:
        pull(MODEL, ModelStore(assets / "models"), lambda _: None)
        store = neighbours.two_models(assets / "models" / MODEL, assets / "two-models")
    except MeshinferError as error:
        report.say(f"Skipped: the small model cannot be had: {error}")
        return
    report.say(
        f"{neighbours.AGENTS} agents, two models over two of them each and one to spare, {psutil.cpu_count()} cores for "
        f"everything, load {os.getloadavg()[0]:.1f} when it began. An answer of {neighbours.TOKENS} tokens from one pair, "
        f"beside one from the other, of which an agent is killed (or not); medians of {rounds} rounds, which take turns. "
        "Gaps are between tokens after the moment of the kill. Cores are shared: what loads layers takes time from what "
        "steps.\n"
    )
    with agent_room(OneMachine, store, neighbours.AGENTS) as room:
        found: list[neighbours.Round] = []
        for fails in (False, True) * rounds:
            try:
                found.append(neighbours.play(room, fails=fails))
            except Exception as error:  # noqa: BLE001 - as in play_all
                report.say(f"A round could not be played: {error!r}"[:500])
    report.say(
        "| agent of the other pair | gap p50 ms | p99 ms | longest ms | CPU in use | all cores busy | its own pause s |"
    )
    report.say("|---|---|---|---|---|---|---|")
    for fails, name in ((False, "goes on"), (True, "is killed")):
        if not (ours := [one for one in found if one.fails == fails]):
            continue
        each = neighbours.summary(ours)
        report.say(
            f"| {name} | {1000 * each.p50:.0f} | {1000 * each.p99:.0f} | {1000 * each.longest:.0f} "
            f"| {each.cpu_percent:.0f} % | {100 * each.busy_share:.0f} % of the time | {each.pause_seconds:.2f} |"
        )
    report.say(f"\nLoad {os.getloadavg()[0]:.1f} when it ended.")


def idle_share(room: AgentRoom[OneMachine]) -> tuple[dict[str, float], float]:
    """What each node takes of a core once links and machines are measured anew, and how long that took."""
    room.wait_settled()
    began = time.monotonic()
    while True:
        shares = idle_cpu(room, IDLE_SECONDS)
        if max(shares.values(), default=0.0) < IDLE_SHARE or time.monotonic() - began > IDLE_WAIT_SECONDS:
            return shares, time.monotonic() - began


def real_sections(chosen: Sequence[Scenario]) -> Iterable[tuple[Setting, list[Scenario]]]:
    """Each scenario in the plainest setting that can play it, and some with wrong clocks as well."""
    left = list(chosen)
    for setting in SETTINGS:
        playable = [scenario for scenario in left if setting.can_play(scenario)]
        left = [scenario for scenario in left if scenario not in playable]
        yield setting, playable
    with_clocks = [one for one in chosen if one.name in WITH_SKEWED_CLOCKS or one in left]
    yield WRONG_CLOCKS, [one for one in with_clocks if WRONG_CLOCKS.can_play(one)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Every fault that we claim to survive, many times.")
    parser.add_argument("--sim-runs", type=int, default=30, help="runs of each scenario in simulation")
    parser.add_argument("--real-runs", type=int, default=5, help="runs of each scenario on real agents")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="scenarios whose name contains this, or another --only; no figures",
    )
    parser.add_argument(
        "--machines", default="", metavar="TITLE", help="of the real ones: those whose title contains this"
    )
    parser.add_argument("--seed", type=int, help="this one only, with the log")
    parser.add_argument(
        "--logs", action="store_true", help="keep those of all real agents, not only of broken promises"
    )
    parser.add_argument("--no-figures", action="store_true")
    parser.add_argument("--out", type=Path, help="where the table goes; docs/log, or with --only nowhere, if not given")
    given = parser.parse_args()
    one = given.seed is not None
    logging.basicConfig(level=logging.INFO if one else logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    everything = (*scenarios(), *machine_scenarios())

    def is_chosen(scenario: Scenario) -> bool:
        return not given.only or any(part in scenario.name for part in given.only)

    chosen = [scenario for scenario in scenarios() if is_chosen(scenario)]
    report, began = Report(), time.monotonic()
    now = datetime.now(UTC)
    report.say(f"# Chaos, {now:%Y-%m-%d %H:%M} UTC\n")
    report.say(f"{platform.platform()}, {psutil.cpu_count()} cores, Python {platform.python_version()}. Made by `{' '.join(['./scripts/chaos', *sys.argv[1:]])}`.")  # fmt: skip
    report.say(
        "The promises are those of `meshinfer/testing/chaos.py`. A pause is the longest that the first client waited for "
        "its next token, the first included; a fault that misses it counts as none. 'Clients answered' leaves out those "
        "whose own origin died."
    )
    rows: list[Row] = []
    fine = True
    if given.sim_runs:
        report.say("\n## Simulated agents, exact engine, virtual time\n")
        rows += play_all(chosen, (given.seed,) if one else range(given.sim_runs), chaos_room.play, report)
        if not (given.only or given.no_figures):
            report.say("\n## One answer while stages fail: steps a second\n")
            fine = failing_stages.figure(report.say)
            fine = poisson(report) and fine
            unrelated(report)
    if given.real_runs:
        seeds = (given.seed,) if one else range(given.real_runs)
        for setting, playable in real_sections([s for s in everything if is_chosen(s)]):
            if playable and given.machines in setting.title:
                report.say(f"\n## Real agents, {setting.title}\n")
                rows += real(report, setting, playable, seeds, logs=given.logs)
        if not (given.only or given.no_figures or given.machines):
            real_neighbours(report, rounds=given.real_runs)
    runs = sum(len(row.outcomes) + len(row.crashed) for row in rows)
    broken = sum(bool(outcome.violations) for row in rows for outcome in row.outcomes) + sum(
        len(r.crashed) for r in rows
    )
    report.say(f"\n{runs} runs, {runs - broken} with every promise kept, in {(time.monotonic() - began) / 60:.0f} min.")
    if given.out or not (one or given.only):
        print(f"  the table: {report.write(given.out or LOG, f'{now:%Y-%m-%d}-chaos')}", file=sys.stderr, flush=True)
    print(json.dumps({"runs": runs, "broken": broken}))
    return 0 if fine and not broken else 1


if __name__ == "__main__":
    # Asked to end, it ends its agents and gives back namespaces and mounts, as at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
