"""A command that a sentence advises, pasted, addresses the agent that the sentence is about."""

import logging
from pathlib import Path

import pytest
from scripted_agent import ScriptedAgent
from typer.testing import CliRunner

from meshinfer.cli.app import app
from meshinfer.cli.hints import home_option, with_home
from meshinfer.cli.up import _Formatter
from meshinfer.config import default_home
from meshinfer.transport.home_lock import note_api, one_agent

HOME = Path("/a home")
OPTION = " --home '/a home'"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("see `meshinfer status`, and its log", f"see `meshinfer status{OPTION}`, and its log"),
        ("`meshinfer models list` shows the names", f"`meshinfer models list{OPTION}` shows the names"),
        ("`meshinfer models rm x && meshinfer models pull x`",
         f"`meshinfer models rm x{OPTION} && meshinfer models pull x{OPTION}`"),
        ("run `meshinfer join CODE` with the code that `meshinfer invite` prints there",
         f"run `meshinfer join CODE{OPTION}` with the code that `meshinfer invite` prints there"),
        # Elsewhere the home has another name.
        ("run `meshinfer models pull x` on a node", "run `meshinfer models pull x` on a node"),
        ("`meshinfer models pull x` there.", "`meshinfer models pull x` there."),
        # Named already; and no command of ours.
        ("`meshinfer unload x --api http://h:1` first", "`meshinfer unload x --api http://h:1` first"),
        ("`kill -9 7` ends it", "`kill -9 7` ends it"),
    ],
)  # fmt: skip
def test_commands_name_the_home_that_the_user_named(said: str, shown: str):
    assert with_home(said, HOME) == shown
    assert with_home(said, None) == said


def test_what_the_log_of_an_agent_advises_is_for_its_home():
    record = logging.makeLogRecord({"msg": "%s is near; run `meshinfer join CODE`", "args": ("another mesh",)})

    assert _Formatter("%(message)s", HOME).format(record) == f"another mesh is near; run `meshinfer join CODE{OPTION}`"


def test_the_usual_home_needs_no_name():
    assert home_option(default_home()) == home_option(None) == ""


@pytest.mark.parametrize(
    ("arguments", "advised"),
    [
        (["unload", "tiny"], "meshinfer status"),
        (["chat", "tiny", "Hello"], "meshinfer status"),
        (["status"], "meshinfer chat MODEL"),
        (["models", "rm", "tiny"], "meshinfer models list"),
        (["invite"], "meshinfer join CODE"),
    ],
)
def test_whatever_a_command_advises_is_for_the_same_home(
    tmp_path: Path, agent: ScriptedAgent, arguments: list[str], advised: str
):
    agent.says("/instance", {"instances": []})
    agent.says("/topology", {"nodes": {}})
    agent.says("/node_id", "12D3KooWAAAAAAAAanna")
    agent.says("/v1/chat/completions", {"error": {"message": "see `meshinfer status`.", "code": "peer_lost"}}, 503)
    with one_agent(tmp_path):
        note_api(tmp_path, agent.url)
        result = CliRunner().invoke(app, [*arguments, "--home", str(tmp_path)], env={"MESHINFER_API": ""})

    assert f"`{advised} --home {tmp_path}`" in result.output.replace("\n", "")
