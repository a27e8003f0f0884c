"""`chat`: the words as they come, the figures after them, and what is wrong if something is."""

import json

import pytest
from scripted_agent import ScriptedAgent
from typer.testing import CliRunner

from meshinfer.cli.app import app

CHAT = "/v1/chat/completions"


def delta(text: str | None = None, finish: str | None = None):
    return {"choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}


def ask(agent: ScriptedAgent, *arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, ["chat", "tiny", *arguments, "--api", agent.url], input=stdin)


def test_the_answer_is_printed_and_the_figures_stand_apart(agent: ScriptedAgent):
    agent.streams(CHAT, ": still loading\n\n", delta("Par"), delta("is."), delta(finish="stop"), USAGE)

    result = ask(agent, "What is the capital of France?")

    assert result.exit_code == 0
    assert result.stdout == "Paris.\n"
    assert "3 tokens" in result.stderr


def test_a_repair_is_told_once_and_stays_out_of_the_answer(agent: ScriptedAgent):
    pause = ": repairing 0%\n: repairing 0%\n\n"
    agent.streams(CHAT, delta("Par"), pause, delta("is."), delta(finish="stop"), USAGE)

    result = ask(agent, "What is the capital of France?")

    assert result.stdout == "Paris.\n"
    # Whether another node takes it over is not known yet: a runner that crashed is made again where it was.
    assert result.stderr.count("the answer goes on when it does again, there or on another node") == 1


def test_where_one_screen_shows_both_a_notice_has_a_line_of_its_own(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Par"), ": repairing 0%\n\n", delta("is."), delta(finish="stop"), USAGE)

    before, notice, after, *_ = ask(agent, "What is the capital of France?").output.splitlines()

    assert (before, after) == ("Par", "is.")
    assert notice.startswith("a part of the model")


def test_where_one_screen_shows_both_what_is_wrong_has_a_line_of_its_own(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Par"), {"error": {"message": "node ben is lost", "code": "peer_lost"}}, end="")

    result = ask(agent, "What is the capital of France?")

    assert result.output.splitlines() == ["Par", "meshinfer: node ben is lost"]
    assert result.stdout == "Par"


def test_what_the_model_says_is_not_taken_for_markup(agent: ScriptedAgent):
    agent.streams(CHAT, delta("[bold]a[/bold] \\[x]"), delta(finish="stop"), USAGE)

    assert ask(agent, "Hello").stdout == "[bold]a[/bold] \\[x]\n"


def test_dials_travel_with_the_request(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Yes."), delta(finish="stop"), USAGE)

    ask(agent, "Hello", "--system", "Be brief.", "--max-tokens", "5", "--temperature", "0", "--seed", "7")

    (_, body) = agent.asked[-1]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (body["max_completion_tokens"], body["temperature"], body["seed"]) == (5, 0, 7)


def test_a_prompt_may_come_through_a_pipe(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Yes."), delta(finish="stop"), USAGE)

    ask(agent, stdin="A question in a file")

    assert agent.asked[-1][1]["messages"][0]["content"] == "A question in a file"


def test_json_gives_scripts_the_same_facts(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Par"), delta("is."), delta(finish="length"), USAGE)

    facts = json.loads(ask(agent, "Where?", "--json").stdout)

    assert facts["text"] == "Paris."
    assert facts["finish_reason"] == "length"
    assert facts["completion_tokens"] == 3
    assert facts["ttft_seconds"] >= 0


def test_an_unknown_model_is_said_before_anything_else(agent: ScriptedAgent):
    agent.says(CHAT, {"error": {"message": "no model is called tiny", "code": "model_not_found"}}, status=404)

    result = ask(agent, "Hello")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no model is called tiny" in result.stderr


@pytest.mark.parametrize("end", ["", "data: [DONE]\n\n"])
def test_an_error_in_the_stream_is_not_taken_for_an_answer(agent: ScriptedAgent, end: str):
    agent.streams(CHAT, delta("Par"), {"error": {"message": "node ben is lost", "code": "peer_lost"}}, end=end)

    result = ask(agent, "Hello")

    assert result.exit_code == 1
    assert "node ben is lost" in result.stderr


def test_a_stream_that_just_ends_is_an_error(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Par"), end="")

    result = ask(agent, "Hello")

    assert result.exit_code == 1
    assert "broke off" in result.stderr


def test_a_program_that_is_no_agent_is_recognised(agent: ScriptedAgent):
    agent.answers[CHAT] = (404, b"<html>nothing here</html>")

    result = ask(agent, "Hello")

    assert result.exit_code == 1
    assert "not JSON" in result.stderr


def test_a_missing_api_key_names_the_option(agent: ScriptedAgent):
    agent.says(CHAT, {"error": {"message": "an API key is needed"}}, status=401)

    assert "--api-key" in ask(agent, "Hello").stderr


def test_a_short_name_is_the_model_that_the_list_shows_by_it(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Yes."), delta(finish="stop"), USAGE)

    CliRunner().invoke(app, ["chat", "qwen3-0.6b", "Hello", "--api", agent.url])

    assert agent.asked[-1][1]["model"] == "mlx-community/Qwen3-0.6B-4bit"


def test_the_likeliest_words_unless_asked_otherwise(agent: ScriptedAgent):
    agent.streams(CHAT, delta("Yes."), delta(finish="stop"), USAGE)

    ask(agent, "Hello")

    assert agent.asked[-1][1]["temperature"] == 0


def test_what_to_reserve_goes_with_the_placement_that_it_is_for(agent: ScriptedAgent):
    agent.says("/instance", {"instances": []})
    agent.streams(CHAT, delta("Yes."), delta(finish="stop"), USAGE)

    assert ask(agent, "Hello", "--context", "512").exit_code == 0

    assert ("/instance", {"model_id": "tiny", "context": 512, "concurrency": None}) in agent.asked


def test_what_is_placed_already_stays_as_it_is(agent: ScriptedAgent):
    agent.says("/instance", {"instances": [{"model_id": "tiny", "state": "ready"}]})
    agent.streams(CHAT, delta("Yes."), delta(finish="stop"), USAGE)

    ask(agent, "Hello", "--context", "512")

    assert ("/instance", None) in agent.asked
    assert all(path != "/instance" or body is None for path, body in agent.asked)
