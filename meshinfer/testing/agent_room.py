"""Agents of one mesh on this machine, real ones, with what one asks of them over HTTP.

with agent_room(OneMachine, store, 4) as room:
    room.place(room.node_ids()[:2])
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from meshinfer.base.ids import ModelId, NodeId
from meshinfer.testing import agent_process
from meshinfer.testing.agent_process import AgentProcessError, RunningAgent
from meshinfer.testing.machines import OneMachine
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code

MODEL = ModelId("smollm2-135m")
CONTEXT_TOKENS = 512
CONCURRENCY = 3
MEMORY_BYTES = 640 * 1024**2
"""A seat of a third of the model takes some 300 MiB, of which 192 are the runner's own; a spare runner fits beside it,
as on a laptop with gigabytes to offer."""
LITTLE_MEMORY_BYTES = 400 * 1024**2
"""Of agents of which two hold the model and one cannot: half of it takes 383 MiB, all of it 471."""
MOST_AGENTS = 16
"""Each takes 0.5 GB and, at its start, 4 s of a core."""
SETTLE_SECONDS = 60.0
SPARE_SECONDS = 10.0
"""An agent starts one two seconds after it has nothing to do, or four after it gave its last one away."""
PLACE_SECONDS = 180.0
LEAVE_SECONDS = 60.0
"""For agents that all end at once: each may first wait for the others to take over its seats."""
HTTP_SECONDS = 30.0
LOOK_SECONDS = 0.1
LOG_TIME = "%Y-%m-%d %H:%M:%S,%f"
"""As an agent writes it where nobody watches."""

HTTP = httpx.Client(timeout=HTTP_SECONDS, trust_env=False)
"""One for all, which keeps its connections: an agent's files are counted, and each look would be one more for a while."""

M = TypeVar("M", bound=OneMachine)


class RoomError(Exception):
    """The stage itself could not be set."""


class AgentRoom(Generic[M]):
    """The agents, by name; leaving the context ends every one."""

    def __init__(self, machines: M, model_store: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self.machines, self.model_store, self.memory_bytes = machines, model_store, memory_bytes
        self.agents: dict[str, RunningAgent] = {}
        """In the order in which they first started; some may be dead."""
        self.stopped: set[str] = set()
        self.killed: set[str] = set()
        """And not started again."""
        self.left: set[str] = set()
        """Asked to leave, and not started again."""
        self._pool = ThreadPoolExecutor(MOST_AGENTS)
        self._starting: dict[str, Future[RunningAgent]] = {}
        """Who is not in the mesh again, as far as anybody has looked."""
        self.keeps_logs = False
        """What is in its directory stays, for whoever looks into what happened."""
        self._environment = {**os.environ, JOIN_CODE_VARIABLE: new_join_code().reveal()}

    @property
    def gone(self) -> set[str]:
        """Killed or asked to leave, and not started again."""
        return self.killed | self.left

    def start(self, name: str) -> RunningAgent:
        """A new one, or the next life of one that was killed or has left; returns once it serves."""
        home = self.machines.move_in(name)
        if not (home / "models").exists():
            (home / "models").symlink_to(self.model_store)
        reserve = ("--context", str(CONTEXT_TOKENS), "--concurrency", str(CONCURRENCY))
        self.agents[name] = agent_process.start(
            home,
            *("--name", name, "--memory", str(self.memory_bytes), "--verbose", *reserve, *self.machines.options(name)),
            prefix=self.machines.prefix(name),
            environment=self._environment,
            log_file=self.machines.directory / f"{name}.log",
        )
        self.killed.discard(name)
        self.left.discard(name)
        return self.agents[name]

    def restart(self) -> None:
        """Who is gone, all at once, while other things are done; `wait_settled` waits for them.

        Not who is on its way already: a second process would find the first in its home.
        """
        on_their_way = {name for name, starting in self._starting.items() if not starting.done()}
        for name in sorted(self.gone - on_their_way):
            self._starting[name] = self._pool.submit(self.start, name)

    def end(self) -> None:
        """All at once, politely."""
        for name in list(self.stopped):
            self.wake(name)
        wait(self._starting.values())
        with self._pool as pool:
            ends = [pool.submit(agent_process.end, one.process, LEAVE_SECONDS) for one in self.agents.values()]
        for ended in ends:
            ended.result()

    def kill(self, name: str) -> None:
        self.killed.add(name)
        self.agents[name].kill()

    def ended_by_themselves(self) -> list[str]:
        """Agents that are gone though nobody killed them or asked them to leave."""
        return [name for name, agent in self.agents.items() if not agent.is_alive and name not in self.gone]

    def leave(self, name: str) -> None:
        """Ask one to leave (SIGTERM); returns once it has. Raises RoomError if it does not, or not in order."""
        self.left.add(name)
        try:
            agent_process.end(self.agents[name].process, LEAVE_SECONDS)
        except AgentProcessError as error:
            raise RoomError(f"{name}: {error}") from error
        if status := self.agents[name].process.returncode:
            raise RoomError(f"{name} ended with status {status} when it was asked to leave")

    def stop(self, name: str) -> None:
        self.stopped.add(name)
        self.agents[name].signal(signal.SIGSTOP)

    def wake(self, name: str) -> None:
        self.agents[name].signal(signal.SIGCONT)
        self.stopped.discard(name)

    def settled(self) -> dict[str, RunningAgent]:
        """Those that live and are not about to join."""
        return {name: agent for name, agent in self.live().items() if name not in self._starting}

    def live(self) -> dict[str, RunningAgent]:
        return {name: agent for name, agent in self.agents.items() if agent.is_alive}

    def node_ids(self) -> list[NodeId]:
        """Of those that live."""
        return [agent.node_id for agent in self.live().values()]

    def name_of(self, node_id: NodeId) -> str:
        """Raises KeyError for one that does not live."""
        return {agent.node_id: name for name, agent in self.live().items()}[node_id]

    def story(self, since: float) -> list[tuple[float, str]]:
        """What all logs say from `since` on (wall clock), in order: seconds after it, and the line."""
        lines = [line for name, agent in self.agents.items() for line in _dated(name, agent.log())]
        return [(at - since, line) for at, line in sorted(lines) if at >= since]

    # --- what they say --------------------------------------------------------------------------

    def wait_settled(self) -> None:
        """Until all live agents, and those that are about to, see exactly each other, with links both ways."""
        for starting in self._starting.values():
            starting.result()
        ids = set(self.node_ids())

        def settled(agent: RunningAgent) -> bool:
            nodes = get(agent, "/topology")["nodes"]
            return nodes.keys() == ids and all(len(node["links"]) >= len(ids) - 1 for node in nodes.values())

        wait_for("all see each other", SETTLE_SECONDS, lambda: all(settled(one) for one in self.live().values()))
        self._starting = {}

    def wait_for_spares(self) -> None:
        """Until all live agents without a seat keep a spare runner, as they do some seconds after they started.

        Who has no memory for one goes without.
        """
        unseated = [agent for agent in self.live().values() if not get(agent, "/state")["runners"]]
        with contextlib.suppress(RoomError):
            wait_for("all keep a spare runner", SPARE_SECONDS, lambda: all(agent.runners() for agent in unseated))

    def place(self, nodes: Sequence[NodeId], model_id: ModelId = MODEL) -> None:
        """Free what is placed, then an instance with a seat on each of `nodes`, ready everywhere."""
        self.free()
        self.add(nodes, model_id)

    def add(self, nodes: Sequence[NodeId], model_id: ModelId) -> None:
        """One more instance, with a seat on each of `nodes`; all are ready everywhere then."""
        through = next(iter(self.settled().values()))
        query = {"model_id": model_id, "context": CONTEXT_TOKENS, "concurrency": CONCURRENCY}
        previews = get(through, "/instance/previews", **query)["previews"]
        if previews[0]["error"]:
            raise RoomError(previews[0]["error"])
        # The planner takes as few nodes as it can; faults are told apart better with a middle.
        placement = {key: value for key, value in previews[0]["placement"].items() if key != "placement_id"}
        layers = placement["seats"][-1]["end"]
        cuts = [layers * index // len(nodes) for index in range(len(nodes) + 1)]
        seats = zip(nodes, cuts, cuts[1:], strict=False)
        placement["seats"] = [{"node_id": node, "start": start, "end": end} for node, start, end in seats]
        refused = ""

        def taken() -> bool:
            nonlocal refused
            answer = HTTP.post(f"{through.url}/instance", json={"placement": placement}, timeout=PLACE_SECONDS)
            refused = "" if answer.status_code == 201 else answer.json()["error"]["message"]
            return not refused

        try:  # what was freed a moment ago may not be known to be free by the planner
            wait_for("the placement is taken", PLACE_SECONDS, taken)
        except RoomError as error:
            raise RoomError(f"{error}: {refused}") from None

        def ready() -> bool:
            placed = [instances(agent) for agent in self.live().values()]
            return all(
                model_id in {i["model_id"] for i in seen} and {i["state"] for i in seen} == {"ready"} for seen in placed
            )

        wait_for("the instance is ready", PLACE_SECONDS, ready)

    def free(self) -> None:
        """Nothing is placed any more."""
        through = next(iter(self.settled().values()))

        for instance in instances(through):
            HTTP.delete(f"{through.url}/instance/{instance['instance_id']}")

        def is_free() -> bool:
            return all(not instances(agent) for agent in self.live().values())

        wait_for("nothing is placed", SETTLE_SECONDS, is_free)


@contextmanager
def agent_room(
    make_machines: Callable[[Path], M], model_store: Path, count: int, memory_bytes: int = MEMORY_BYTES
) -> Generator[AgentRoom[M]]:
    """`count` agents that see each other, each with so much memory to offer; nothing of them is left, unless something fails: then their logs."""
    directory = Path(tempfile.mkdtemp(prefix="meshinfer-room-"))
    with make_machines(directory) as machines:
        room = AgentRoom(machines, model_store, memory_bytes)
        try:
            for index in range(count):  # one after the other: each measures its machine
                room.start(f"n{index}")
            room.wait_settled()
            yield room
        finally:
            room.end()
    if not room.keeps_logs:
        shutil.rmtree(directory, ignore_errors=True)


def _dated(name: str, text: str) -> Generator[tuple[float, str]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # a traceback's line, say
            date, moment, said = line.split(" ", 2)
            yield datetime.strptime(f"{date} {moment}", LOG_TIME).astimezone().timestamp(), f"{name}: {said}"


def get(agent: RunningAgent, path: str, **query: Any) -> Any:
    try:
        answer = HTTP.get(agent.url + path, params=query)
    except (httpx.RemoteProtocolError, httpx.ReadError):  # an idle connection ended just when it was to be used again
        answer = HTTP.get(agent.url + path, params=query)
    answer.raise_for_status()
    return answer.json()


def instances(agent: RunningAgent) -> list[dict[str, Any]]:
    """As it sees them."""
    return get(agent, "/instance")["instances"]


def wait_for(what: str, seconds: float, is_so: Callable[[], bool]) -> None:
    """Raises RoomError after `seconds`. An agent that does not answer is not so yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if is_so():
                return
        if time.monotonic() > deadline:
            raise RoomError(f"{what}: not within {seconds:.0f} s")
        time.sleep(LOOK_SECONDS)
