"""`meshinfer simulate --agents`: what clients get while nodes come and go; a seed replays."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from meshinfer.cli.app import app


def simulate(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["simulate", "--seconds", "8", "--seeds", "1", "--json", *arguments])
    assert result.exit_code == 0, result.stderr
    (run,) = json.loads(result.stdout)["runs"]
    return run


def test_agents_under_churn_answer_right_and_a_seed_replays() -> None:
    one, two = (simulate("--agents", "5", "--churn", "15") for _ in range(2))
    assert one == two
    assert one["deaths"] > 0
    assert one["answers"] > 0
    assert one["wrong"] == 0
    assert one["violations"] == []


def test_where_nobody_dies_nothing_is_lost() -> None:
    run = simulate("--agents", "4")
    assert (run["deaths"], run["errors"], run["with_their_origin"], run["wrong"]) == (0, {}, 0, 0)
    assert run["tokens_per_second"] > 0
    assert run["pause_seconds"]["worst"] >= run["pause_seconds"]["p50"] > 0


def test_too_few_agents_and_churn_without_them_are_refused() -> None:
    for arguments, words in (["--agents", "2"], "3 (which the model needs)"), (["--churn", "5"], "--agents"):
        result = CliRunner().invoke(app, ["simulate", *arguments])
        assert result.exit_code != 0
        assert words in result.stderr
