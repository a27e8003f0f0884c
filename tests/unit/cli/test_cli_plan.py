"""`plan`: the choice with its numbers, the others, and why the rest cannot be."""

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from scripted_agent import ScriptedAgent
from typer.testing import CliRunner

from meshinfer.cli.app import app

NODES = {"12D3KooWAAAAAAAAanna": {"name": "anna"}, "12D3KooWBBBBBBBBBben": {"name": "ben"}}
ANNA, BEN = NODES


def memory(node_id: str) -> dict[str, Any]:
    parts = {"weight_bytes": 3, "kv_bytes": 2, "activation_bytes": 1, "overhead_bytes": 1, "need_bytes": 7 * 2**20}
    return {"node_id": node_id, "free_bytes": 9 * 2**20, **parts}


def plan_of(*seats: tuple[str, int, int], reason: str) -> dict[str, Any]:
    return {
        "error": None,
        "seats": [{"node_id": node, "start": start, "end": end} for node, start, end in seats],
        "memory": [memory(node) for node, _, _ in seats],
        "predicted_hop_seconds": 0.001,
        "reason": reason,
    }


CHOICE = plan_of((ANNA, 0, 4), (BEN, 4, 6), reason="the fewest nodes that hold it")
OTHER = plan_of((BEN, 0, 3), (ANNA, 3, 6), reason="1 ms more on the way")
REFUSAL = {"error": "anna alone needs 9.0 GiB and has 2.0 GiB", "seats": [], "memory": []}


@pytest.fixture
def planner(agent: ScriptedAgent) -> ScriptedAgent:
    agent.says("/topology", {"nodes": NODES})
    agent.says("/instance/previews", {"previews": [CHOICE, OTHER, REFUSAL]})
    return agent


def run(agent: ScriptedAgent, *arguments: str):
    return CliRunner().invoke(app, ["plan", "tiny", *arguments, "--api", agent.url], env={"COLUMNS": "120"})


def test_the_choice_comes_first_and_nothing_is_hidden(planner: ScriptedAgent):
    result = run(planner)

    assert result.exit_code == 0
    assert "anna 0–3 → ben 4–5" in result.stdout
    assert "the fewest nodes that hold it" in result.stdout
    assert "ben 0–2 → anna 3–5" in result.stdout
    assert "anna alone needs 9.0 GiB and has 2.0 GiB" in result.stdout


def test_json_is_the_agents_answer_as_it_is(planner: ScriptedAgent):
    assert json.loads(run(planner, "--json").stdout)["previews"] == [CHOICE, OTHER, REFUSAL]


def test_nodes_may_be_named_or_meant_by_the_end_of_their_ids(planner: ScriptedAgent):
    run(planner, "--nodes", "anna", "--nodes", "Bben", "--exclude", BEN, "--context", "100", "--concurrency", "2")

    asked = parse_qs(urlsplit(planner.asked[-1][0]).query)
    assert asked == {
        "model_id": ["tiny"],
        "nodes": [ANNA, BEN],
        "exclude": [BEN],
        "context": ["100"],
        "concurrency": ["2"],
    }


def test_a_node_that_is_not_here_is_answered_with_those_that_are(planner: ScriptedAgent):
    result = run(planner, "--nodes", "carol")

    assert result.exit_code == 1
    assert "carol" in result.stderr
    assert "anna" in result.stderr


def test_a_model_that_cannot_be_placed_is_a_failure_with_its_numbers(planner: ScriptedAgent):
    planner.says("/instance/previews", {"previews": [REFUSAL]})

    result = run(planner)

    assert result.exit_code == 1
    assert "needs 9.0 GiB and has 2.0 GiB" in result.stdout
