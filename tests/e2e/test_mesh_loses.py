"""Churn, first step: what is lost is known to all within three seconds, said to whom it concerns, and made anew."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from mesh import FRANCE, MODEL, Room, ask, client, get, instances, room, wait_until

NAMES = ("alpha", "beta", "gamma")
STORY = "Write a long story about a laptop."


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_store: Path) -> Iterator[Room]:
    with room(tmp_path_factory.mktemp("room"), model_store, NAMES, "--memory", "340MiB") as here:
        yield here


def lose(mesh: Room, how: signal.Signals) -> tuple[str, str]:
    """Lose a node that holds a seat in mid-answer; (who was asked, who was lost), once the others know and are free."""
    assert "Paris" in ask(mesh.url("alpha"), FRANCE)
    holders = [mesh.names_by_id()[seat["node_id"]] for seat in instances(mesh.url("alpha"))[0]["seats"]]
    origin = next((name for name in NAMES if name not in holders), holders[0])
    victim = next(name for name in holders if name != origin)
    survivors = [name for name in NAMES if name != victim]
    started, failed = threading.Event(), threading.Event()

    def stream() -> None:
        answer = client(mesh.url(origin)).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": STORY}], temperature=0, stream=True, max_tokens=400
        )
        try:
            for _ in answer:
                started.set()
        except openai.APIError:
            failed.set()

    asking = threading.Thread(target=stream)
    asking.start()
    assert started.wait(120), "no first token"
    signal_node(mesh, victim, how)
    wait_until(
        lambda: all(
            victim not in mesh.sees(name) and all(i["state"] == "broken" for i in instances(mesh.url(name)))
            for name in survivors
        ),
        20,
        "the survivors know",
    )
    assert failed.wait(20), "the request ended in silence"
    asking.join()
    wait_until(lambda: all(not mesh.agents[name].runners() for name in survivors), 20, "the other seats are freed")
    return origin, victim


def signal_node(mesh: Room, name: str, how: signal.Signals) -> None:
    """To the agent and its runners, as a lid or a power cut has it."""
    for process in [*mesh.agents[name].runners(), mesh.agents[name].process]:
        process.send_signal(how)


def test_a_stopped_node_is_lost_and_comes_back_when_it_wakes(mesh: Room) -> None:
    origin, victim = lose(mesh, signal.SIGSTOP)
    assert "Paris" in ask(mesh.url(origin), FRANCE)
    signal_node(mesh, victim, signal.SIGCONT)
    mesh.wait_settled()
    # It finds its seats stale, frees them, and serves like any other.
    wait_until(lambda: not mesh.agents[victim].runners(), 20, "the woken node freed its seat")
    assert "Paris" in ask(mesh.url(victim), FRANCE)
    mesh.delete_all(origin)


def test_a_killed_node_is_lost_and_comes_back_as_itself(mesh: Room) -> None:
    origin, victim = lose(mesh, signal.SIGKILL)
    assert "Paris" in ask(mesh.url(origin), FRANCE)
    seats = instances(mesh.url(origin))[0]["seats"]
    assert all(seat["node_id"] != mesh.node_id(victim) for seat in seats)
    before = mesh.node_id(victim)
    mesh.agents[victim].process.wait(10)
    assert mesh.start(victim).started["node_id"] == before
    mesh.wait_settled()
    mesh.delete_all(origin)


def test_a_killed_runner_takes_its_instance_and_nothing_else(mesh: Room) -> None:
    assert "Paris" in ask(mesh.url("alpha"), FRANCE)
    victim = next(running for running in mesh.agents.values() if running.runners())
    runner = victim.runners()[0]
    runner.kill()
    wait_until(lambda: all(i["state"] == "broken" for name in NAMES for i in instances(mesh.url(name))), 20, "all know")
    assert all(mesh.sees(name) == set(NAMES) for name in NAMES)
    assert "Paris" in ask(mesh.url("gamma"), FRANCE)


def test_a_node_that_leaves_politely_is_gone_at_once(mesh: Room) -> None:
    assert "Paris" in ask(mesh.url("alpha"), FRANCE)
    leaving = next(name for name, running in mesh.agents.items() if running.runners())
    runners = mesh.agents[leaving].runners()
    mesh.agents[leaving].process.send_signal(signal.SIGTERM)
    assert mesh.agents[leaving].process.wait(20) == 0
    assert not any(runner.is_running() for runner in runners)
    rest = [name for name in NAMES if name != leaving]
    wait_until(lambda: all(mesh.sees(name) == set(rest) for name in rest), 10, "the others know")
    assert "Paris" in ask(mesh.url(rest[0]), FRANCE)
    assert get(mesh.url(rest[0]), "/readyz")
