"""Chaos on real agents: processes of this machine, real runners, a small real model, signals and cut cables.

    with agent_room(store, 4) as room:
        outcome = play(room, scenario, seed)

The same scenarios and the same checks as in the simulation (`testing.chaos`); what is read comes from each
agent's `/state` and `/metrics` and from the kernel. With `namespaces`, every agent has a network namespace of
its own on a bridge, and a partition is a cable that is pulled: `ip link set down`. That needs root.

Who expects what: each client's answer is compared, character by character, to the one that the same room gave
to the same question before anything was done to it; one asks greedily, one samples with a seed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self

import httpx
import psutil

from meshinfer.base.ids import ModelId, NodeId
from meshinfer.serving.election import elect
from meshinfer.testing.chaos import Answer, Fault, Outcome, Part, Reading, Scenario, answer_violations, rest_violations
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code

MODEL = ModelId("smollm2-135m")
CONTEXT_TOKENS = 512
CONCURRENCY = 3
MEMORY = "430MiB"
"""Two such nodes can hold the model, one cannot (it needs 471 MiB, of which 192 are the runner's own)."""
TOKENS = 48
DEADLINE_SECONDS = 120.0
START_SECONDS = 90.0
SETTLE_SECONDS = 60.0
PLACE_SECONDS = 180.0
STOP_SECONDS = 60.0
REST_SECONDS = 5.0
LOOK_SECONDS = 0.1
UNDO_DEEDS = frozenset(("cut off", "split"))
"""What takes namespaces."""
DEEDS = frozenset(("kill", "stop", "kill runner", "freeze runner"))


class ChaosFailedError(Exception):
    """The stage itself could not be set."""


@dataclass
class Question:
    """What a client asks; the body of its request."""

    text: str
    temperature: float = 0.0
    seed: int | None = None
    tokens: int = TOKENS

    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.text}],
            "temperature": self.temperature,
            "max_tokens": self.tokens,
            "stream": True,
            **({} if self.seed is None else {"seed": self.seed}),
        }


QUESTIONS = {
    "first": Question("Write a story about a laptop."),
    "second": Question("What is a bicycle?", temperature=0.8, seed=11),
    "third": Question("What is the capital of France?", tokens=8),
}


@dataclass
class AgentProcess:
    name: str
    home: Path
    prefix: tuple[str, ...]
    """Of its command line: how to get into its namespace."""
    process: subprocess.Popen[str]
    url: str = ""
    node_id: NodeId = field(default=NodeId(""))
    stopped: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """It and all its children."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal(self, what: signal.Signals) -> None:
        """To it and its runners; runners first, so that none of them sees its agent die."""
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(what)


class AgentRoom:
    """Agents of one mesh on this machine."""

    def __init__(self, directory: Path, model_store: Path, *, namespaces: bool = False) -> None:
        self.directory, self.model_store = directory, model_store
        self.agents: dict[str, AgentProcess] = {}
        self.namespaces = namespaces
        self._tag = uuid.uuid4().hex[:5]
        self._stack = ExitStack()
        self._environment = {**os.environ, JOIN_CODE_VARIABLE: new_join_code().reveal()}
        self._expected: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self.namespaces:
            self._make_bridge()
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.signal(signal.SIGCONT)
            agent.process.terminate()
        for agent in self.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(STOP_SECONDS)
            self._end(agent)
        self._stack.close()

    # --- agents ---------------------------------------------------------------------------------

    def start(self, name: str) -> AgentProcess:
        """A new one, or the next life of one that was killed; returns once it serves."""
        home = self.directory / name
        home.mkdir(exist_ok=True)
        if not (home / "models").exists():
            (home / "models").symlink_to(self.model_store)
        index = sorted({*self.agents, name}).index(name) if name not in self.agents else list(self.agents).index(name)
        prefix: tuple[str, ...] = ()
        options = ["--loopback"]
        if self.namespaces:
            namespace, host = f"mi-{self._tag}-{name}", f"10.78.0.{index + 1}"
            if name not in self.agents:
                self._make_cable(name, namespace, host)
            prefix = ("ip", "netns", "exec", namespace)
            options = ["--api-host", host, "--api-without-key"]
        command = [*prefix, sys.executable, "-m", "meshinfer.cli", "up", "--json", "--home", str(home)]
        command += ["--name", name, "--api-port", "0", "--memory", MEMORY]
        command += ["--context", str(CONTEXT_TOKENS), "--concurrency", str(CONCURRENCY), *options]
        with (home / "agent.log").open("a") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        agent = self.agents[name] = AgentProcess(name, home, prefix, process)
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=_first_line, args=(process.stdout, lines), daemon=True)
        reader.start()
        reader.join(START_SECONDS)
        if not lines:
            raise ChaosFailedError(f"agent {name} did not start:\n{(home / 'agent.log').read_text()[-2000:]}")
        started = json.loads(lines[0])
        agent.url, agent.node_id = started["api_url"], NodeId(started["node_id"])
        return agent

    def kill(self, agent: AgentProcess) -> None:
        agent.signal(signal.SIGKILL)
        agent.process.wait(STOP_SECONDS)
        self._end(agent)

    def stop(self, agent: AgentProcess) -> None:
        agent.stopped = True
        agent.signal(signal.SIGSTOP)

    def wake(self, agent: AgentProcess) -> None:
        agent.signal(signal.SIGCONT)
        agent.stopped = False

    def live(self) -> list[AgentProcess]:
        return [agent for agent in self.agents.values() if agent.is_alive]

    def by_id(self, node_id: str) -> AgentProcess | None:
        return next((agent for agent in self.live() if agent.node_id == node_id), None)

    # --- what they say --------------------------------------------------------------------------

    def wait_settled(self) -> None:
        """Until all live agents see exactly each other, with links both ways, and what each can hold."""
        ids = {agent.node_id for agent in self.live()}

        def settled(agent: AgentProcess) -> bool:
            nodes = get(agent, "/topology")["nodes"]
            return nodes.keys() == ids and all(len(node["links"]) >= len(ids) - 1 for node in nodes.values())

        wait_for("all see each other", SETTLE_SECONDS, lambda: all(settled(agent) for agent in self.live()))

    def place(self, nodes: list[NodeId]) -> None:
        """Free what is placed, then an instance with a seat on each of `nodes`, ready everywhere."""
        through = self.live()[0]

        def is_free() -> bool:
            # Again and again: a repair that is under way may bring one back.
            for instance in get(through, "/instance")["instances"]:
                httpx.delete(f"{through.url}/instance/{instance['instance_id']}", timeout=30)
            return all(not get(agent, "/instance")["instances"] for agent in self.live())

        wait_for("nothing is placed", SETTLE_SECONDS, is_free)
        query = {"model_id": MODEL, "context": CONTEXT_TOKENS, "concurrency": CONCURRENCY}
        previews = get(through, "/instance/previews", **query)["previews"]
        if previews[0]["error"]:
            raise ChaosFailedError(previews[0]["error"])
        # The planner takes as few nodes as it can; faults are told apart better with a middle.
        placement = {key: value for key, value in previews[0]["placement"].items() if key != "placement_id"}
        layers = placement["seats"][-1]["end"]
        cuts = [layers * index // len(nodes) for index in range(len(nodes) + 1)]
        seats = zip(nodes, cuts, cuts[1:], strict=False)
        placement["seats"] = [{"node_id": node, "start": start, "end": end} for node, start, end in seats]
        answer = httpx.post(f"{through.url}/instance", json={"placement": placement}, timeout=PLACE_SECONDS)
        if answer.status_code != 201:
            raise ChaosFailedError(answer.text)

        def ready() -> bool:
            return all([i["state"] for i in get(agent, "/instance")["instances"]] == ["ready"] for agent in self.live())

        wait_for("the instance is ready", PLACE_SECONDS, ready)

    def expected(self, client: str) -> str:
        """What the room says to that client's question when nothing is done to it; asked once."""
        if client not in self._expected:
            answer = Answer(client, "", DEADLINE_SECONDS, time.monotonic())
            ask(self.live()[0].url, QUESTIONS[client], answer, lambda _: None)
            if not answer.succeeded:
                raise ChaosFailedError(f"without any fault: {answer.error}: {answer.said}")
            self._expected[client] = "".join(str(piece) for piece in answer.got)
        return self._expected[client]

    # --- cables ---------------------------------------------------------------------------------

    def pull(self, agent: AgentProcess) -> None:
        _ip("link", "set", self._cable(agent.name), "down")

    def plug(self, agent: AgentProcess) -> None:
        _ip("link", "set", self._cable(agent.name), "up")

    def _cable(self, name: str) -> str:
        return f"mi{self._tag}{name[:5]}"

    def _make_bridge(self) -> None:
        bridge = f"mi-{self._tag}"
        _ip("link", "add", "name", bridge, "type", "bridge")
        self._stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", "10.78.0.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")

    def _make_cable(self, name: str, namespace: str, host: str) -> None:
        ours, theirs = self._cable(name), f"{self._cable(name)}p"
        _ip("netns", "add", namespace)
        self._stack.callback(_ip, "netns", "delete", namespace)  # the cable goes with it
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
        _ip("link", "set", ours, "master", f"mi-{self._tag}", "up")
        _ip("link", "set", theirs, "netns", namespace)
        _ip("-n", namespace, "address", "add", f"{host}/24", "dev", theirs)
        _ip("-n", namespace, "link", "set", theirs, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _end(self, agent: AgentProcess) -> None:
        agent.process.kill()
        agent.process.wait(STOP_SECONDS)
        if agent.process.stdout is not None:
            agent.process.stdout.close()


@contextmanager
def agent_room(model_store: Path, count: int, *, namespaces: bool = False) -> Generator[AgentRoom]:
    """`count` agents that see each other; nothing of them is left afterwards, unless something failed: then the logs."""
    directory = Path(tempfile.mkdtemp(prefix="meshinfer-chaos-"))
    with AgentRoom(directory, model_store, namespaces=namespaces) as room:
        for index in range(count):
            room.start(f"n{index}")
        room.wait_settled()
        yield room
    shutil.rmtree(directory, ignore_errors=True)


def namespaces_work() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


def can_play(scenario: Scenario, *, namespaces: bool) -> bool:
    """Whether its faults can be made on real processes: a cable has two directions, and none are between two agents."""
    return all(f.deed in DEEDS or (namespaces and f.deed in UNDO_DEEDS) for f in scenario.faults)


# --- one run -----------------------------------------------------------------------------------


def play(room: AgentRoom, scenario: Scenario, seed: int) -> Outcome:
    """One run; afterwards the room is whole again."""
    run = _Run(room, scenario, seed)
    try:
        return run.play()
    finally:
        run.restore()


@dataclass
class _Run:
    room: AgentRoom
    scenario: Scenario
    seed: int
    faulted: threading.Event = field(default_factory=threading.Event)
    timers: list[threading.Thread] = field(default_factory=list[threading.Thread])
    killed: set[str] = field(default_factory=set[str])
    pulled: list[AgentProcess] = field(default_factory=list[AgentProcess])

    def play(self) -> Outcome:
        room = self.room
        self.rng = random.Random(f"{self.scenario.name} {self.seed}")  # noqa: S311 - it replays
        everyone = [agent.node_id for agent in room.live()]
        self.seats = self.rng.sample(everyone, min(self.scenario.stages, max(2, len(everyone) - 1)))
        room.place(self.seats)
        expected = {client: room.expected(client) for client in QUESTIONS}
        self.k = self.rng.randrange(2, TOKENS * 3 // 4)
        self._cast()
        for agent in room.live():  # links and caches that stay belong to the state before
            ask(
                agent.url, QUESTIONS["third"], Answer("warm-up", "", DEADLINE_SECONDS, time.monotonic()), lambda _: None
            )
        before = [read_agent(agent) for agent in room.live()]
        answers = [Answer(client, expected[client], DEADLINE_SECONDS, 0.0) for client in QUESTIONS]
        clients = [threading.Thread(target=self._client, args=(answer,), daemon=True) for answer in answers]
        for client in clients:
            client.start()
        self._later(self._prelude)
        for client in clients:
            client.join(DEADLINE_SECONDS + 10)
        while self.timers:
            self.timers.pop().join(DEADLINE_SECONDS)
        settled, rest = self._come_to_rest(before)
        violations = [v for answer in answers for v in answer_violations(answer, self._ends(answer))] + rest
        return Outcome(self.scenario.name, self.seed, tuple(answers), tuple(violations), settled_seconds=settled)

    def restore(self) -> None:
        for agent in self.room.live():
            if agent.stopped:
                self.room.wake(agent)
        for agent in self.pulled:
            self.room.plug(agent)
        self.pulled.clear()
        for name in sorted(self.killed):
            self.room.start(name)
        self.killed.clear()
        self.room.wait_settled()

    def _cast(self) -> None:
        hit = {node for fault in self.scenario.faults for node in self._players(fault.part)}
        free = [agent for agent in self.room.live() if agent.node_id not in hit]
        self.origin = self.rng.choice(free or self.room.live())
        self.other = self.rng.choice([agent for agent in free if agent is not self.origin] or [self.origin])
        if any(fault.part == "origin" for fault in self.scenario.faults):
            self.other = self.rng.choice([agent for agent in self.room.live() if agent is not self.origin])

    def _players(self, part: Part) -> list[NodeId]:
        live = [agent.node_id for agent in self.room.live()]
        match part:
            case "origin":
                return [self.origin.node_id] if hasattr(self, "origin") else []
            case "head":
                return self.seats[:1]
            case "middle":
                return self.seats[1:-1] or self.seats[-1:]
            case "last":
                return self.seats[-1:]
            case "planner":
                return list(elect(MODEL, live)[:1])
            case "holder":
                return self.seats
            case "bystander":
                asking = {self.origin.node_id} if hasattr(self, "origin") else set[NodeId]()
                return [node for node in live if node not in self.seats and node not in asking]
            case "replacement":
                if not hasattr(self, "origin"):
                    return []
                now = {NodeId(s["node_id"]) for i in get(self.origin, "/instance")["instances"] for s in i["seats"]}
                fresh = sorted(node for node in now - set(self.seats) if node != self.origin.node_id)
                return fresh or [node for node in self.seats if node in live and node != self.origin.node_id]

    def _ends(self, answer: Answer) -> str:
        return "either" if answer.client != "first" and self.scenario.ends == "error" else self.scenario.ends

    # --- clients and faults ---------------------------------------------------------------------

    def _client(self, answer: Answer) -> None:
        origin = self.origin if answer.client == "first" else self.other
        if answer.client != "first":
            time.sleep(random.Random(f"{self.seed} {answer.client}").uniform(0, 0.5))  # noqa: S311 - it replays
        answer.asked_at = time.monotonic()
        ask(origin.url, QUESTIONS[answer.client], answer, self._reached if answer.client == "first" else lambda _: None)
        answer.origin_was_lost = origin.name in self.killed

    def _reached(self, chunks: int) -> None:
        for fault in self.scenario.faults:
            if (fault.moment, chunks) in {("first token", 1), ("token k", self.k)}:
                self._later(lambda fault=fault: self._do(fault))

    def _prelude(self) -> None:
        for fault in self.scenario.faults:
            if fault.moment == "prefill":
                time.sleep(self.rng.uniform(0.02, 0.2))
                self._do(fault)
            elif fault.moment == "repair":
                self.faulted.wait(DEADLINE_SECONDS)
                time.sleep(self.rng.uniform(0, 1.5))
                self._do(fault)

    def _do(self, fault: Fault) -> None:
        room = self.room
        agents = [agent for node in self._players(fault.part) if (agent := room.by_id(node)) is not None]
        if not agents:
            return
        agent = self.rng.choice(agents)
        match fault.deed:
            case "kill":
                self.killed.add(agent.name)
                room.kill(agent)
            case "stop":
                room.stop(agent)
            case "kill runner" | "freeze runner":
                what = signal.SIGKILL if fault.deed == "kill runner" else signal.SIGSTOP
                for runner in get(agent, "/state")["runners"]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(runner["pid"], what)
            case "cut off":
                room.pull(agent)
                self.pulled.append(agent)
            case "split":
                others = [other for other in room.live() if other is not agent]
                for other in self.rng.sample(others, len(others) + 1 - self.scenario.stages):
                    room.pull(other)
                    self.pulled.append(other)
            case _:
                raise ChaosFailedError(f"{fault.deed} cannot be done to processes")
        self.faulted.set()
        if math.isinf(fault.seconds):
            return
        time.sleep(fault.seconds)
        if fault.deed == "kill":
            room.start(agent.name)
            self.killed.discard(agent.name)
        elif fault.deed == "stop":
            room.wake(agent)
        else:
            while self.pulled:
                room.plug(self.pulled.pop())

    def _later(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self.timers.append(thread)
        thread.start()

    def _come_to_rest(self, before: list[Reading]) -> tuple[float, list[str]]:
        began = time.monotonic()
        with contextlib.suppress(ChaosFailedError):
            self.room.wait_settled()
        since = time.monotonic()
        found: list[str] = []
        while True:
            try:
                found = rest_violations(before, [read_agent(agent) for agent in self.room.live()])
            except httpx.HTTPError as error:
                found = [f"4: an agent does not answer: {error!r}"]
            # One more period of the counters on cards (2 s) than the promise has.
            if not found or time.monotonic() - since > REST_SECONDS + 2.0:
                return time.monotonic() - began, found
            time.sleep(LOOK_SECONDS)


def ask(url: str, question: Question, answer: Answer, on_chunk: Callable[[int], None]) -> None:
    """Ask and write down what comes, character by character."""
    timeout = httpx.Timeout(DEADLINE_SECONDS, connect=5)
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=question.body()) as response,
        ):
            if response.status_code != 200:
                response.read()
                _fail(answer, response.json())
            else:
                _read(response.iter_lines(), answer, on_chunk)
    except (httpx.HTTPError, ValueError) as error:
        answer.error, answer.said = "connection", repr(error)
    if not answer.error and math.isnan(answer.ended_at):
        answer.error, answer.said = "connection", "the stream ended without an end"
    answer.ended_at = time.monotonic()


def _read(lines: Iterator[str], answer: Answer, on_chunk: Callable[[int], None]) -> None:
    chunks = 0
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            _fail(answer, event)
            return
        answer.ids.add(event["id"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                chunks += 1
                answer.got.extend(text)
                answer.times.append(time.monotonic())
                on_chunk(chunks)
            if choice["finish_reason"]:
                answer.ended_at = time.monotonic()


def _fail(answer: Answer, body: dict[str, Any]) -> None:
    error = body.get("error", {})
    answer.error, answer.said = str(error.get("code") or "no code"), str(error.get("message"))


def read_agent(agent: AgentProcess) -> Reading:
    """What it says of itself, and what the kernel says of it."""
    state = get(agent, "/state")
    instances = tuple(
        sorted(
            (i["instance_id"], i["epoch"], json.dumps(i["placement"]["seats"]), i["state"]) for i in state["instances"]
        )
    )
    seats = [seat for i in state["instances"] for seat in i["seats"] if seat["node_id"] == agent.node_id]
    try:
        files = sum(process.num_fds() for process in agent.processes()[:1])
    except psutil.Error:
        files = 0
    return Reading(
        node=agent.node_id,
        members=frozenset(state["topology"]["nodes"]),
        instances=instances,
        requests=_gauge(agent, "meshinfer_sessions"),
        sessions=sum(runner["sessions"] for runner in state["runners"]),
        runners=len(state["runners"]),
        seats=sum(seat["state"] in {"loading", "linking", "ready", "cut"} for seat in seats),
        files=files,
    )


def get(agent: AgentProcess, path: str, **query: Any) -> Any:
    answer = httpx.get(agent.url + path, params=query, timeout=30, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def _gauge(agent: AgentProcess, name: str) -> int:
    text = httpx.get(f"{agent.url}/metrics", timeout=30, trust_env=False).text
    return int(float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1]))


def wait_for(what: str, seconds: float, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if is_so():
                return
        if time.monotonic() > deadline:
            raise ChaosFailedError(f"{what}: not within {seconds:.0f} s")
        time.sleep(LOOK_SECONDS)


def _first_line(output: IO[str], lines: list[str]) -> None:
    lines.extend(islice(output, 1))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
