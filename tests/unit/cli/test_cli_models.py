"""`models`: files of this node, with or without an agent."""

import json
from pathlib import Path

from scripted_agent import ScriptedAgent
from typer.testing import CliRunner

from meshinfer.cli.app import app


def run(home: Path, url: str, *arguments: str):
    return CliRunner().invoke(app, ["models", *arguments, "--home", str(home), "--api", url])


def test_without_an_agent_the_list_shows_what_could_be_pulled(tmp_path: Path, unused_url: str):
    result = run(tmp_path, unused_url, "list")

    assert result.exit_code == 0
    assert "smollm2-135m" in result.stdout


def test_the_list_tells_this_node_from_the_others(tmp_path: Path, agent: ScriptedAgent):
    agent.says("/models", {"models": [{"model_id": "their/model", "node_ids": ["a", "b"]}]})

    rows = {row["id"]: row for row in json.loads(run(tmp_path, agent.url, "list", "--json").stdout)}

    assert rows["their/model"]["nodes"] == ["a", "b"]
    assert not rows["their/model"]["held"]
    assert rows["smollm2-135m"]["nodes"] == []


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(tmp_path: Path):
    result = CliRunner().invoke(app, ["models", "pull", "smollm-135m", "--home", str(tmp_path)])

    assert result.exit_code == 1
    assert "smollm2-135m" in result.stderr


def test_what_is_not_here_cannot_be_removed(tmp_path: Path, unused_url: str):
    result = run(tmp_path, unused_url, "rm", "smollm2-135m")

    assert result.exit_code == 1
    assert "no model smollm2-135m" in result.stderr


def test_a_model_that_is_served_is_not_removed(tmp_path: Path, agent: ScriptedAgent):
    (tmp_path / "agent.pid").write_text("1\n")
    agent.says("/instance", {"instances": [{"model_id": "tiny", "state": "ready"}]})

    result = run(tmp_path, agent.url, "rm", "tiny")

    assert result.exit_code == 1
    assert "in use" in result.stderr
