"""A node or a runner is lost in mid-answer: the answer goes on, word for word, and everyone knows within seconds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from command import meshinfer
from mesh import FRANCE, MODEL, Room, ask, client, get, instances, room, wait_until

from meshinfer.testing.machine_faults import kill_for_memory, kills_for_memory_work

NAMES = ("alpha", "beta", "gamma")
STORY = "Write a story about a laptop."
TOKENS = 48


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_store: Path) -> Iterator[Room]:
    with room(tmp_path_factory.mktemp("room"), model_store, NAMES, "--memory", "340MiB") as here:
        yield here


@pytest.fixture(scope="module")
def story(mesh: Room) -> str:
    """What comes when nothing is lost."""
    return ask(mesh.url("alpha"), STORY, TOKENS)


class Asking:
    """A stream that is being read in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.started, self.text, self.ids, self.error = threading.Event(), "", set[str](), ""
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            for chunk in client(url).chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": STORY}],
                temperature=0,
                stream=True,
                max_tokens=TOKENS,
            ):
                self.ids.add(chunk.id)
                self.text += chunk.choices[0].delta.content or ""
                if len(self.text) > 20:
                    self.started.set()
        except Exception as error:  # noqa: BLE001 - told to the test, which fails on it
            self.error = repr(error)

    def answer(self) -> str:
        self._thread.join(180)
        assert not self._thread.is_alive(), "silence"
        assert not self.error, self.error
        assert len(self.ids) == 1, "the response keeps its id"
        return self.text


def lose(mesh: Room, how: signal.Signals) -> tuple[str, str, Asking]:
    """Lose a node that holds a seat in mid-answer; (who was asked, who was lost, the answer under way)."""
    ask(mesh.url("alpha"), FRANCE, 1)
    holders = [mesh.names_by_id()[seat["node_id"]] for seat in instances(mesh.url("alpha"))[0]["seats"]]
    origin = next((name for name in NAMES if name not in holders), holders[0])
    victim = next(name for name in holders if name != origin)
    asking = Asking(mesh.url(origin))
    assert asking.started.wait(120), "no first tokens"
    signal_node(mesh, victim, how)
    rest = [name for name in NAMES if name != victim]
    wait_until(lambda: all(victim not in mesh.sees(name) for name in rest), 20, "the survivors know")
    return origin, victim, asking


def signal_node(mesh: Room, name: str, how: signal.Signals) -> None:
    """To the agent and its runners, as a lid or a power cut has it."""
    for process in [*mesh.agents[name].runners(), mesh.agents[name].process]:
        process.send_signal(how)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_stopped_node_is_lost_and_comes_back_when_it_wakes(mesh: Room, story: str) -> None:
    origin, victim, asking = lose(mesh, signal.SIGSTOP)
    assert asking.answer() == story
    placed = instances(mesh.url(origin))[0]
    assert all(seat["node_id"] != mesh.node_id(victim) for seat in placed["seats"])
    signal_node(mesh, victim, signal.SIGCONT)
    mesh.wait_settled()
    # It finds its seats stale, frees them, and serves like any other.
    wait_until(lambda: not mesh.runners(victim), 20, "the woken node freed its seat")
    assert ask(mesh.url(victim), STORY, TOKENS) == story
    mesh.delete_all(origin)


def test_a_killed_node_is_lost_and_comes_back_as_itself(mesh: Room, story: str) -> None:
    origin, victim, asking = lose(mesh, signal.SIGKILL)
    assert asking.answer() == story
    placed = instances(mesh.url(origin))[0]
    assert all(seat["node_id"] != mesh.node_id(victim) for seat in placed["seats"])
    before = mesh.node_id(victim)
    mesh.agents[victim].process.wait(10)
    assert mesh.start(victim).started["node_id"] == before
    mesh.wait_settled()
    mesh.delete_all(origin)


def killed_by_hand(pid: int) -> None:
    psutil.Process(pid).kill()


def killed_for_memory(pid: int) -> None:
    """By the kernel, as when the laptop's other programs want it all."""
    if not kills_for_memory_work():
        pytest.skip("no control group for memory can be made here")
    assert kill_for_memory(pid) >= 1


@pytest.mark.parametrize("kill", [killed_by_hand, killed_for_memory])
def test_a_killed_runner_is_made_again_and_nothing_else_is_touched(
    mesh: Room, story: str, kill: Callable[[int], None]
) -> None:
    ask(mesh.url("alpha"), FRANCE, 1)
    asking = Asking(mesh.url("gamma"))
    assert asking.started.wait(120)
    before = instances(mesh.url("alpha"))[0]
    victim = mesh.names_by_id()[before["seats"][-1]["node_id"]]
    kill(mesh.runners(victim)[0]["pid"])
    assert asking.answer() == story
    assert all(mesh.sees(name) == set(NAMES) for name in NAMES)
    after = instances(mesh.url("alpha"))[0]
    assert after["epoch"] > before["epoch"]
    assert after["instance_id"] == before["instance_id"]
    # The seat that did not crash kept its layers, and its process.
    assert after["seats"][0]["node_id"] == before["seats"][0]["node_id"]


def test_a_node_that_leaves_politely_ends_its_answers_and_hands_its_seats_over(mesh: Room, story: str) -> None:
    ask(mesh.url("alpha"), FRANCE, 1)
    before = instances(mesh.url("alpha"))[0]
    leaving = mesh.names_by_id()[before["seats"][-1]["node_id"]]
    rest = [name for name in NAMES if name != leaving]
    own = Asking(mesh.url(leaving))
    assert own.started.wait(120)
    asking = Asking(mesh.url(rest[0]))
    agent, runners = mesh.agents[leaving], mesh.agents[leaving].runners()
    # What its neighbours see while it still is there.
    epochs: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        leave = pool.submit(meshinfer, "leave", home=agent.home)
        while agent.is_alive and not leave.done():
            epochs += [instance["epoch"] for instance in instances(mesh.url(rest[0]))]
    left = leave.result()
    assert left.returncode == 0, left.stderr
    assert agent.process.wait(60) == 0
    assert own.answer() == story
    assert asking.answer() == story
    assert max(epochs) > before["epoch"], "others had its seats before it went"
    wait_until(lambda: not any(lives(runner) for runner in runners), 10, "its runners are gone")
    wait_until(lambda: all(mesh.sees(name) == set(rest) for name in rest), 10, "the others know")
    for name in rest:
        news = [line for line in mesh.agents[name].log().splitlines() if f" {leaving} " in line]
        assert any("has left" in line for line in news), news
        assert not any(f"{leaving} is lost" in line for line in news[-3:]), news
    assert get(mesh.url(rest[0]), "/readyz")
