"""`plan`: the choice with its numbers, the others, and why the rest cannot be."""

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from scripted_agent import ScriptedAgent
from typer.testing import CliRunner

from meshinfer.cli.app import app
from meshinfer.cli.plan import told_once

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
STAGE = {
    "compute_seconds": 0.02, "link_seconds": 0.0, "overhead_seconds": 0.001, "chunk_seconds": 0.3, "seconds": 0.021,
    "stream_bytes_per_second": 9e10, "flops_per_second": 5e12, "assumed": "",
}  # fmt: skip
HOP = {"seconds": 0.002, "chunk_seconds": 0.1, "latency_seconds": 0.0015, "message_seconds": 0.0001,
       "bandwidth_bytes_per_second": 4e7, "assumed": ""}  # fmt: skip
PREDICTION = {
    "objective": "latency", "objective_seconds": 12.5, "prompt_tokens": 256, "output_tokens": 256, "concurrency": 4,
    "ttft_seconds": 0.8, "tpot_seconds": 0.046, "compute_seconds": 0.04, "link_seconds": 0.004,
    "overhead_seconds": 0.002, "tokens_per_second_alone": 21.7, "tokens_per_second": 61.0,
    "served_tokens_per_second": 55.5, "is_measured": True,
    "stages": [{**STAGE, "nodes": [ANNA]}, {**STAGE, "nodes": [BEN]}],
    "hops": [{**HOP, "source": ANNA, "target": BEN}, {**HOP, "source": BEN, "target": ANNA}],
}  # fmt: skip
DECLINED = {"node_id": BEN, "explanation": "carl adds nothing: with it a request takes 13.0 s instead of 12.5 s"}
REFUSAL = {"error": "anna alone needs 9.0 GiB and has 2.0 GiB", "seats": [], "memory": []}


@pytest.fixture
def planner(agent: ScriptedAgent) -> ScriptedAgent:
    agent.says("/topology", {"nodes": NODES})
    agent.says("/instance", {"instances": []})
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


def test_a_model_that_runs_is_said_to_and_where(planner: ScriptedAgent):
    seats = [{"node_id": BEN, "start": 0, "end": 6}]
    other = {"model_id": "other", "state": "ready", "seats": [{"node_id": ANNA, "start": 0, "end": 9}]}
    planner.says("/instance", {"instances": [{"model_id": "tiny", "state": "ready", "seats": seats}, other]})
    planner.says("/instance/previews", {"previews": [{**CHOICE, "model_id": "tiny"}]})

    lines = run(planner).stdout.splitlines()

    assert lines[0].startswith("Now     ben 0–5 (ready;")
    assert not any("anna 0–8" in line for line in lines)


def test_what_it_would_do_is_told_in_a_line_and_explained_term_by_term(agent: ScriptedAgent):
    agent.says("/topology", {"nodes": NODES})
    agent.says("/instance", {"instances": []})
    agent.says(
        "/instance/previews",
        {"previews": [{**CHOICE, "prediction": PREDICTION, "binds": "compute of anna"}], "declined": [DECLINED]},
    )
    short = run(agent).stdout
    assert "first token after 800.0 ms" in short
    assert "21.7 tokens/s alone, 55.5 with 4 at once" in " ".join(short.split())
    assert "carl adds nothing" in short
    assert "GB/s" not in short
    long = run(agent, "--explain").stdout
    for words in ("Binds: compute of anna", "90 GB/s", "5 TFLOP/s", "anna → ben", "40 MB/s", "first the speed of anna"):
        assert words in long


def test_what_nobody_measured_is_what_to_doubt(agent: ScriptedAgent):
    hop = {**HOP, "source": ANNA, "target": BEN, "assumed": "nobody has measured it yet"}
    told = {**PREDICTION, "is_measured": False, "hops": [hop]}
    agent.says("/topology", {"nodes": NODES})
    agent.says("/instance", {"instances": []})
    agent.says("/instance/previews", {"previews": [{**CHOICE, "prediction": told}], "declined": []})
    result = run(agent, "--explain")
    assert "part of this is assumed" in " ".join(result.stdout.split())
    assert "Doubt  anna → ben: nobody has measured it yet" in result.stdout


def test_wishes_reach_the_planner(planner: ScriptedAgent):
    run(planner, "--objective", "throughput", "--prompt", "4000", "--output", "10", "--layers", "anna=4",
        "--memory-limit", "ben=2GiB")  # fmt: skip
    asked = parse_qs(urlsplit(planner.asked[-1][0]).query)
    assert asked == {
        "model_id": ["tiny"],
        "objective": ["throughput"],
        "prompt_tokens": ["4000"],
        "output_tokens": ["10"],
        "layers": [f"{ANNA}=4"],
        "memory_limits": [f"{BEN}=2GiB"],
    }


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


def test_nodes_that_are_refused_for_the_same_reason_are_told_in_one_line():
    alike = [{"error": f"{name} alone: too small", "nodes": [node]} for node, name in ((ANNA, "anna"), (BEN, "ben"))]
    other = {"error": "nobody may", "nodes": []}

    assert told_once([*alike, other], NODES) == ["anna, ben alone: too small", "nobody may"]
