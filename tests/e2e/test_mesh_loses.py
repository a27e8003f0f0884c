"""Churn, first step: what is lost is known to all within three seconds, said to whom it concerns, and made anew."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from mesh import FRANCE, MODEL, Room, ask, client, get, instances, room, wait_until

NAMES = ("alpha", "beta", "gamma")
STORY = "Write a long story about a laptop."


@pytest.fixture
def mesh(tmp_path: Path, model_store: Path) -> Iterator[Room]:
    with room(tmp_path, model_store, NAMES, "--memory", "340MiB") as here:
        yield here


def test_a_killed_and_then_a_stopped_node(mesh: Room) -> None:
    for how in (signal.SIGKILL, signal.SIGSTOP):
        group = sorted(mesh.agents)
        assert "Paris" in ask(mesh.url(group[0]), FRANCE)
        holders = [mesh.names_by_id()[seat["node_id"]] for seat in instances(mesh.url(group[0]))[0]["seats"]]
        # Ask through a node that will live; lose another that holds a seat.
        origin = next((name for name in group if name not in holders), holders[0])
        victim = next(name for name in holders if name != origin)
        failed = threading.Event()

        def stream(origin: str = origin, failed: threading.Event = failed) -> None:
            with pytest.raises(openai.APIError):
                for _ in client(mesh.url(origin)).chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": STORY}], temperature=0, stream=True, max_tokens=400
                ):
                    started.set()
            failed.set()

        started = threading.Event()
        asking = threading.Thread(target=stream)
        asking.start()
        assert started.wait(120)
        for runner in mesh.agents[victim].runners():
            runner.send_signal(how)
        mesh.agents[victim].process.send_signal(how)
        struck = time.monotonic()
        survivors = [name for name in group if name != victim]
        wait_until(
            lambda: all(
                victim not in mesh.sees(name) and all(i["state"] == "broken" for i in instances(mesh.url(name)))
                for name in survivors
            ),
            20,
            "the survivors know",
        )
        print(f"{how.name}: known to all after {time.monotonic() - struck:.2f} s")
        assert failed.wait(20), "the request ended in silence"
        asking.join()
        wait_until(
            lambda: all(not mesh.agents[name].runners() for name in survivors), 20, "the other seats are freed"
        )
        if how == signal.SIGKILL:
            assert "Paris" in ask(mesh.url(origin), FRANCE)
            assert all(seat["node_id"] != mesh.node_id(victim) for seat in instances(mesh.url(origin))[0]["seats"])
            _end(mesh, victim)
            mesh.start(victim)  # the same home: the same node, back with a higher incarnation
            mesh.wait_settled()
            mesh.delete_all(origin)
        else:
            # Woken, it finds its seats stale, frees them and is a member again.
            for runner in mesh.agents[victim].runners():
                runner.send_signal(signal.SIGCONT)
            mesh.agents[victim].process.send_signal(signal.SIGCONT)
            mesh.wait_settled()
            wait_until(lambda: not mesh.agents[victim].runners(), 20, "the woken node freed its seat")
            assert "Paris" in ask(mesh.url(victim), FRANCE)


def _end(mesh: Room, name: str) -> None:
    mesh.agents[name].process.wait(10)
    del mesh.agents[name]


def test_a_killed_runner_takes_its_instance_and_nothing_else(mesh: Room) -> None:
    assert "Paris" in ask(mesh.url("alpha"), FRANCE)
    victim = next(running for running in mesh.agents.values() if running.runners())
    runner = victim.runners()[0]
    runner.kill()
    wait_until(
        lambda: all(i["state"] == "broken" for name in NAMES for i in instances(mesh.url(name))), 20, "all know"
    )
    said = [i["error"] for name in NAMES for i in instances(mesh.url(name)) if i["error"]]
    assert all(mesh.sees(name) == set(NAMES) for name in NAMES)
    assert "Paris" in ask(mesh.url("gamma"), FRANCE)
    assert any("SIGKILL" in error or "channel" in error for error in said) or not said


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
