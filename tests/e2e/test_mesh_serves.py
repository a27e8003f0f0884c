"""Three agents, each allowed less memory than the model needs, are one model server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from mesh import FRANCE, MODEL, Room, ask, client, get, instances, room, wait_until

NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, model_store: Path) -> Iterator[Room]:
    with room(tmp_path_factory.mktemp("room"), model_store, NAMES, "--memory", "340MiB") as here:
        yield here


@pytest.fixture(scope="module")
def whole_answers(tmp_path_factory: pytest.TempPathFactory, model_store: Path) -> dict[str, str]:
    """What one unsplit process says."""
    with room(tmp_path_factory.mktemp("alone"), model_store, ("solo",), "--memory", "2GiB", "--no-discovery") as here:
        return {question: ask(here.url("solo"), question) for question in QUESTIONS}


QUESTIONS = (FRANCE, "Name three colors.", "What is 2 + 2?")


def test_no_node_may_hold_it_alone_and_the_refusals_say_so_in_numbers(mesh: Room) -> None:
    previews = get(mesh.url("alpha"), "/instance/previews", model_id=MODEL, context=512, concurrency=1)["previews"]
    assert all(len(p["placement"]["seats"]) > 1 for p in previews if not p["error"])
    alone = [p for p in previews if p["error"] and len(p["nodes"]) == 1]
    assert len(alone) == 3
    for refused in alone:
        assert "short" in refused["error"]
        assert refused["memory"][0]["shortfall_bytes"] > 0


@pytest.mark.parametrize("layers", [None, dict.fromkeys(NAMES, 10)], ids=["planned over two", "ten layers each"])
def test_split_answers_equal_the_whole_one_through_every_node(
    mesh: Room, whole_answers: dict[str, str], layers: dict[str, int] | None
) -> None:
    stages = len(layers) if layers else 2
    placed = mesh.place("beta", stages, layers=layers)
    try:
        assert [seat["state"] for seat in placed["seats"]] == ["ready"] * stages
        for name, question in zip(NAMES, QUESTIONS, strict=True):
            assert ask(mesh.url(name), question) == whole_answers[question]
        assert "Paris" in whole_answers[FRANCE]
        if layers:
            _middle_runner_holds_its_layers_only(mesh, placed)
    finally:
        mesh.delete_all("gamma")
    # Deleted is freed: no runner is left, all memory is free again, on every node and in every view.
    wait_until(lambda: all(not mesh.runners(name) for name in NAMES), 10, "runners are gone")
    for name in NAMES:
        nodes = get(mesh.url(name), "/topology")["nodes"].values()
        assert all(node["memory_free_bytes"] == node["memory_bytes"] for node in nodes)


def _middle_runner_holds_its_layers_only(mesh: Room, placed: dict[str, Any]) -> None:
    """Counted by the engine; and by the kernel against the other runners: as many layers, and the embedding (29 MiB)."""
    seats = sorted(placed["seats"], key=lambda seat: seat["start"])
    assert [seat["end"] - seat["start"] for seat in seats] == [10, 10, 10]
    # A third of the 111 MiB model, and a cache for 512 tokens.
    assert seats[1]["resident_bytes"] < 111 * 1024**2 / 3 * 1.1 + 12 * 1024**2
    names = mesh.names_by_id()
    head, middle, last = (mesh.runners(names[seat["node_id"]])[0]["resident_bytes"] for seat in seats)
    assert middle < head
    assert middle < last


def test_two_nodes_asked_at_the_same_moment_end_with_one_instance(mesh: Room, whole_answers: dict[str, str]) -> None:
    with ThreadPoolExecutor(6) as pool:
        asked = [(name, question) for name in NAMES for question in QUESTIONS[:2]]
        answers = list(pool.map(lambda pair: ask(mesh.url(pair[0]), pair[1]), asked))
    assert answers == [whole_answers[question] for _, question in asked]
    assert {tuple(i["instance_id"] for i in instances(mesh.url(name))) for name in NAMES} == {
        (instances(mesh.url("alpha"))[0]["instance_id"],)
    }
    assert sum(len(mesh.runners(name)) for name in NAMES) == len(instances(mesh.url("alpha"))[0]["seats"])


def test_a_stream_through_a_node_that_holds_no_head(mesh: Room, whole_answers: dict[str, str]) -> None:
    ask(mesh.url("alpha"), FRANCE)
    head = instances(mesh.url("alpha"))[0]["seats"][0]["node_id"]
    origin = next(name for name in NAMES if mesh.node_id(name) != head)
    stream = client(mesh.url(origin)).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": FRANCE}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole_answers[FRANCE]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_the_same_seed_gives_the_same_text_alone_and_in_company(mesh: Room) -> None:
    def say(seed: int) -> str:
        answer = client(mesh.url("beta")).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Tell me a story."}], seed=seed, max_tokens=16
        )
        return answer.choices[0].message.content or ""

    alone = [say(seed) for seed in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(say, (1, 2, 3)))
    assert together == alone
    assert len(set(alone)) == 3


def test_bad_requests_are_refused_and_leave_nothing_behind(mesh: Room) -> None:
    ask(mesh.url("alpha"), FRANCE, tokens=1)
    before = [instances(mesh.url(name)) for name in NAMES]
    with pytest.raises(openai.NotFoundError, match="meshinfer models pull"):
        client(mesh.url("alpha")).chat.completions.create(model="no/such", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="512"):
        ask(mesh.url("alpha"), "word " * 600)
    nowhere = {"model_id": MODEL, "context": 8192, "concurrency": 64}
    refused = httpx.post(f"{mesh.url('alpha')}/instance", json=nowhere, timeout=30)
    assert refused.status_code in {409, 503}, refused.text
    assert "MiB" in refused.text or "GiB" in refused.text
    placement = before[0][0]["placement"]
    gap = {**placement, "seats": placement["seats"][1:]}
    gap.pop("placement_id")
    assert httpx.post(f"{mesh.url('alpha')}/instance", json=gap, timeout=30).status_code == 422
    assert [[i["instance_id"] for i in instances(mesh.url(name))] for name in NAMES] == [
        [i["instance_id"] for i in found] for found in before
    ]
