"""`models`: files of this node, with or without an agent."""

import json
import stat
from pathlib import Path

from scripted_agent import ScriptedAgent
from typer.testing import CliRunner

from meshinfer.cli.app import app
from meshinfer.transport.home_lock import note_api, one_agent


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


def listed(*options: str) -> set[str]:
    result = CliRunner().invoke(app, ["models", "list", "--json", *options], env={"MESHINFER_API": ""})
    assert result.exit_code == 0, result.stderr
    return {row["id"] for row in json.loads(result.stdout)}


def test_the_list_asks_the_agent_of_its_home(tmp_path: Path, agent: ScriptedAgent, unused_url: str):
    agent.says("/models", {"models": [{"model_id": "their/model", "node_ids": ["a"]}]})

    with one_agent(tmp_path):
        note_api(tmp_path, agent.url)
        assert "their/model" in listed("--home", str(tmp_path))
        assert "their/model" not in listed("--home", str(tmp_path), "--api", unused_url)
    assert "their/model" not in listed("--home", str(tmp_path)), "and no other agent where that one has gone"


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(tmp_path: Path):
    result = CliRunner().invoke(app, ["models", "pull", "smollm-135m", "--home", str(tmp_path)])

    assert result.exit_code == 1
    assert "smollm2-135m" in result.stderr


def test_a_home_that_a_pull_makes_is_its_owners_alone(tmp_path: Path):
    home = tmp_path / "home"

    CliRunner().invoke(app, ["models", "pull", str(tmp_path / "nothing"), "--home", str(home)])

    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def remove(home: Path, model: str):
    return CliRunner().invoke(app, ["models", "rm", model, "--home", str(home)])


def test_what_is_not_here_cannot_be_removed(tmp_path: Path):
    result = remove(tmp_path, "smollm2-135m")

    assert result.exit_code == 1
    assert "no model smollm2-135m" in result.stderr
    assert "models list" in result.stderr
    assert "pull" not in result.stderr


INSTANCE = {"instance_id": "abc", "model_id": "tiny", "state": "ready", "seats": [{"node_id": "idA"}]}


def test_a_model_that_is_served_here_is_not_removed(tmp_path: Path, agent: ScriptedAgent):
    agent.says("/node_id", "idA")
    agent.says("/instance", {"instances": [INSTANCE]})

    with one_agent(tmp_path):
        note_api(tmp_path, agent.url)
        result = remove(tmp_path, "tiny")

    assert result.exit_code == 1
    assert "in use" in result.stderr
    assert "meshinfer unload tiny" in result.stderr


def test_what_others_serve_does_not_keep_a_model_here(tmp_path: Path, agent: ScriptedAgent):
    agent.says("/node_id", "idB")
    agent.says("/instance", {"instances": [INSTANCE]})

    with one_agent(tmp_path):
        note_api(tmp_path, agent.url)
        result = remove(tmp_path, "tiny")

    assert "no model tiny" in result.stderr


def test_what_a_killed_agent_left_behind_is_no_agent(tmp_path: Path, agent: ScriptedAgent):
    for note, text in (("agent.lock", ""), ("agent.pid", "1\n"), ("agent.api", f"{agent.url}\n")):
        (tmp_path / note).write_text(text)

    assert "no model tiny" in remove(tmp_path, "tiny").stderr
    assert agent.asked == []


def test_unloading_deletes_the_instances_of_that_model_alone(agent: ScriptedAgent):
    agent.says("/instance", {"instances": [INSTANCE, {**INSTANCE, "instance_id": "other", "model_id": "large"}]})
    agent.says("/instance/abc", {"instance_id": "abc", "freed_bytes": {"a": 2**19, "b": 2**19}, "unconfirmed": []})

    result = CliRunner().invoke(app, ["unload", "tiny", "--api", agent.url])

    assert result.exit_code == 0, result.stderr
    assert [path for path, _ in agent.asked] == ["/instance", "/instance/abc"]
    assert "1.0 MiB" in result.stderr


def test_what_is_not_loaded_cannot_be_unloaded(agent: ScriptedAgent):
    agent.says("/instance", {"instances": []})

    result = CliRunner().invoke(app, ["unload", "tiny", "--api", agent.url])

    assert result.exit_code == 1
    assert "no instance" in result.stderr
