"""Several agents on this machine, of one mesh, that have found each other; and what one asks of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from meshinfer.testing.agent_process import RunningAgent, agent
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code

MODEL = "smollm2-135m"
FRANCE = "What is the capital of France?"
SETTLE_SECONDS = 60.0
PLACE_SECONDS = 180.0
"""For three runners to start, load and warm up on two cores that a whole test run shares."""


@dataclass
class Room:
    """The agents, in the order in which they were started."""

    directory: Path
    model_store: Path
    options: tuple[str, ...]
    agents: dict[str, RunningAgent] = field(default_factory=dict[str, RunningAgent])
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self, name: str, *options: str) -> RunningAgent:
        home = self.directory / name
        home.mkdir(exist_ok=True)
        if not (home / "models").exists():
            (home / "models").symlink_to(self.model_store)
        started = self.stack.enter_context(agent(home, "--name", name, *self.options, *options))
        self.agents[name] = started
        return started

    def url(self, name: str) -> str:
        return self.agents[name].url

    def node_id(self, name: str) -> str:
        return self.agents[name].started["node_id"]

    def names_by_id(self) -> dict[str, str]:
        return {running.started["node_id"]: name for name, running in self.agents.items()}

    def runners(self, name: str) -> list[dict[str, Any]]:
        """Its runner processes that are seats (it may keep a spare one besides)."""
        return get(self.url(name), "/state")["runners"]

    def sees(self, name: str) -> set[str]:
        """Names of the nodes in its topology."""
        return {node["name"] for node in get(self.url(name), "/topology")["nodes"].values()}

    def wait_settled(self, *names: str) -> None:
        """Until these (all, if none are named) see exactly each other, with links both ways."""
        group = set(names or self.agents)

        def settled() -> bool:
            for name in group:
                nodes = get(self.url(name), "/topology")["nodes"].values()
                if {node["name"] for node in nodes} != group:
                    return False
                if any(len(node["links"]) < len(group) - 1 for node in nodes):
                    return False
            return True

        wait_until(settled, SETTLE_SECONDS, f"{group} see each other")

    def place(
        self, through: str, nodes: int, context: int = 512, layers: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """An instance over exactly so many nodes, ready; with so many `layers` on each of these, if given."""
        wanted = [f"{self.node_id(name)}={count}" for name, count in (layers or {}).items()]
        query = {"model_id": MODEL, "context": context, "concurrency": 1, "layers": wanted}
        previews = get(self.url(through), "/instance/previews", **query)["previews"]
        chosen = next(p for p in previews if not p["error"] and len(p["placement"]["seats"]) == nodes)
        answer = httpx.post(f"{self.url(through)}/instance", json=chosen, timeout=PLACE_SECONDS)
        assert answer.status_code == 201, answer.text
        instance_id = answer.json()["instance_id"]

        def ready() -> bool:
            state = get(self.url(through), f"/instance/{instance_id}")
            assert state["state"] != "broken", state
            return state["state"] == "ready"

        wait_until(ready, PLACE_SECONDS, "the instance is ready")
        return get(self.url(through), f"/instance/{instance_id}")

    def delete_all(self, through: str) -> None:
        for instance in get(self.url(through), "/instance")["instances"]:
            answer = httpx.delete(f"{self.url(through)}/instance/{instance['instance_id']}", timeout=30)
            assert answer.status_code == 200, answer.text
            assert answer.json()["unconfirmed"] == []
        wait_until(lambda: all(not instances(r.url) for r in self.agents.values()), 10, "nothing is placed")

    def free(self) -> None:
        """Nothing is placed, if that can be had: else who ends first has its seats loaded by those that end next."""
        for through in [name for name, running in self.agents.items() if running.is_alive][:1]:
            with suppress(AssertionError, httpx.HTTPError):
                self.delete_all(through)


@contextmanager
def room(directory: Path, model_store: Path, names: tuple[str, ...], *options: str) -> Iterator[Room]:
    """Agents `names` on loopback, settled. One mesh key of their own, so that rooms beside each other do not meet."""
    before = os.environ.get(JOIN_CODE_VARIABLE)
    os.environ[JOIN_CODE_VARIABLE] = new_join_code().reveal()
    here = Room(directory, model_store, ("--loopback", "--context", "512", "--concurrency", "1", *options))
    try:
        with here.stack:
            for name in names:
                here.start(name)
            here.wait_settled()
            try:
                yield here
            finally:
                here.free()
    finally:
        del os.environ[JOIN_CODE_VARIABLE]
        if before is not None:
            os.environ[JOIN_CODE_VARIABLE] = before


def get(url: str, path: str, **query: object) -> Any:
    answer = httpx.get(url + path, params=query, timeout=30)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return answer.json()


def instances(url: str) -> list[dict[str, Any]]:
    return get(url, "/instance")["instances"]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PLACE_SECONDS)


def ask(url: str, question: str, tokens: int = 24) -> str:
    """The greedy answer."""
    answer = client(url).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=tokens
    )
    return answer.choices[0].message.content or ""


def wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until `is_so()`; fails after `seconds`."""
    start = time.monotonic()
    while not is_so():
        assert time.monotonic() - start < seconds, f"not after {seconds} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - start
