"""`join` and `invite`: a home remembers its mesh's join code, and shows it only when asked."""

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshinfer.cli.app import app
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code


@pytest.fixture(autouse=True)
def _no_code_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(JOIN_CODE_VARIABLE, raising=False)


def run(home: Path, *arguments: str):
    return CliRunner().invoke(app, [*arguments, "--home", str(home)])


def test_what_join_was_told_invite_prints(tmp_path: Path):
    code = new_join_code().reveal()

    joined = run(tmp_path, "join", code)
    invited = run(tmp_path, "invite")

    assert joined.exit_code == 0
    assert code not in joined.stdout + joined.stderr
    assert f"meshinfer join {code}" in invited.stdout
    assert json.loads(run(tmp_path, "invite", "--json").stdout) == {"join_code": code}


def test_the_code_is_readable_by_its_owner_alone(tmp_path: Path):
    run(tmp_path, "join", new_join_code().reveal())

    (kept,) = tmp_path.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_code_may_be_typed_as_it_was_heard(tmp_path: Path):
    code = new_join_code().reveal()

    result = run(tmp_path, "join", *code.upper().split("-"))

    assert result.exit_code == 0
    assert code in run(tmp_path, "invite").stdout


def test_a_mistyped_code_is_refused_and_nothing_is_remembered(tmp_path: Path):
    result = run(tmp_path, "join", "correct-horse")

    assert result.exit_code == 1
    assert "join code" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_home_without_a_mesh_says_how_to_get_one(tmp_path: Path):
    result = run(tmp_path, "invite")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "meshinfer up" in result.stderr
