"""The command line as a whole: quick, helpful, and silent on standard output when it fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_agent import ScriptedAgent
from typer.testing import CliRunner

from meshinfer.cli.app import app
from meshinfer.transport.home_lock import note_api, one_agent

COMMANDS = [
    "up", "join", "invite", "status", "plan", "chat", "unload", "version", "models", "models list", "models pull", "models rm",
]  # fmt: skip
# Imports that take from 0.2 s to seconds.
HEAVY = ["libp2p", "mlx", "mlx_lm", "transformers", "trio", "httpx", "huggingface_hub", "msgspec", "numpy"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str):
    result = CliRunner().invoke(app, [*command.split(), "--help"])

    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_help_imports_nothing_heavy():
    look = f"import sys, meshinfer.cli; print([name for name in {HEAVY} if name in sys.modules])"

    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)

    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["status"], ["plan", "some-model"], ["chat", "some-model", "Hello"]])
def test_without_an_agent_it_says_how_to_start_one(arguments: list[str], unused_url: str):
    result = CliRunner().invoke(app, [*arguments, "--api", unused_url])

    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"no agent answers at {unused_url}" in result.stderr
    assert "meshinfer up" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["status"], ["plan", "some-model"], ["chat", "some-model", "Hello"], ["unload", "some-model"]]
)
def test_a_home_without_an_agent_is_named(arguments: list[str], tmp_path: Path):
    result = CliRunner().invoke(app, [*arguments, "--home", str(tmp_path)], env={"MESHINFER_API": ""})

    assert result.exit_code == 1
    assert f"no agent answers in {tmp_path}" in result.stderr
    assert f"meshinfer up --home {tmp_path}" in result.stderr


def test_commands_ask_the_agent_of_the_home(tmp_path: Path, agent: ScriptedAgent):
    agent.says("/instance", {"instances": []})

    with one_agent(tmp_path):
        note_api(tmp_path, agent.url)
        result = CliRunner().invoke(app, ["unload", "tiny", "--home", str(tmp_path)], env={"MESHINFER_API": ""})

    assert "no instance" in result.stderr
    assert [path for path, _ in agent.asked] == ["/instance"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "../../etc/passwd", "Hello"],
        ["up", "--memory", "lots"],
        ["up", "--port", "70000"],
        ["models", "rm", "-x"],
        ["nonsense"],
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str]):
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2
    assert result.stdout == ""


def test_an_address_that_is_none_is_named():
    result = CliRunner().invoke(app, ["status", "--api", "not an address"])

    assert result.exit_code == 1
    assert "not an address" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_names_what_we_stand_on():
    result = CliRunner().invoke(app, ["version", "--json"])

    assert result.exit_code == 0
    assert {"meshinfer", "python", "libp2p", "mlx", "mlx-lm"} <= json.loads(result.stdout).keys()


def test_version_may_be_asked_for_as_programs_commonly_are():
    result = CliRunner().invoke(app, ["--version"])

    assert result.exit_code == 0
    assert result.stdout.startswith("meshinfer ")
