"""A model over one, two and three processes gives what it gives whole, to many at once, and lets go of it all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_kit import VOCABULARY, PipelineUnderTest, plain_greedy, session, write_tiny_llama

from meshinfer.wire.records import OpenSession, Prefilled, Sampling
from meshinfer.wire.runner_control import Heartbeat, OriginGone

PROMPTS = ([5, 17, 3], [9] * 40, list(range(1, 60)), [42])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=[(), (3,), (1, 4)], ids=["1 seat", "2 seats", "3 seats"])
def pipeline(request: pytest.FixtureRequest, model: Path) -> Iterator[PipelineUnderTest]:
    pipeline = PipelineUnderTest(model, request.param)
    yield pipeline
    pipeline.close()


def wait_until_free(pipeline: PipelineUnderTest) -> None:
    """Every seat reports that no session holds a byte."""
    for runner in pipeline.runners:
        runner.wait_for(Heartbeat, lambda beat: beat.cache_bytes == 0 and beat.sessions == 0)


def test_greedy_tokens_equal_the_whole_models(pipeline: PipelineUnderTest, model: Path):
    origin = pipeline.origin()
    for prompt in PROMPTS:
        assert origin.ids(origin.open(session(prompt, 12))) == plain_greedy(model, prompt, 12)
    origin.close()
    wait_until_free(pipeline)


def test_company_and_lateness_change_no_token(pipeline: PipelineUnderTest, model: Path):
    rng = random.Random(11)
    wanted = [session([rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 70))], 10) for _ in range(9)]
    origin, other = pipeline.origin(), pipeline.origin()
    for record in wanted[:2]:
        origin.open(record)
    first = origin.next_token(wanted[0])  # the rest come while these are running, five more than fit at once
    for record in wanted[2:7]:
        origin.open(record)
    for record in wanted[7:]:
        other.open(record)
    got = {r.session_id: origin.ids(r) for r in wanted[:7]} | {r.session_id: other.ids(r) for r in wanted[7:]}
    got[wanted[0].session_id].insert(0, first.token_id)
    for record in wanted:
        assert got[record.session_id] == plain_greedy(model, record.token_ids, 10)
    origin.close()
    other.close()
    wait_until_free(pipeline)


def sampled(prompt: list[int], seed: int, **changed: object) -> OpenSession:
    return session(prompt, 16, sampling=Sampling(seed=seed, temperature=0.9, top_p=0.95, **changed))  # type: ignore[arg-type]


def test_a_seed_gives_the_same_text_alone_and_in_company(pipeline: PipelineUnderTest):
    origin = pipeline.origin()
    settings = {"presence_penalty": 0.5, "repetition_penalty": 1.3, "top_logprobs": 2}
    alone = origin.tokens(origin.open(sampled([7, 8, 9], 123, **settings)))
    crowd = [origin.open(sampled([seed, 2], seed)) for seed in (1, 2, 3)]
    again = origin.open(sampled([7, 8, 9], 123, **settings))
    in_company = origin.tokens(again)
    assert [t.token_id for t in in_company] == [t.token_id for t in alone]
    assert [t.index for t in alone] == list(range(16))
    assert all(len(t.top_logprobs) == 2 and t.logprob is not None for t in alone)
    assert len({tuple(origin.ids(record)) for record in crowd}) == 3
    origin.close()


def test_a_resumed_session_goes_on_as_it_would_have(pipeline: PipelineUnderTest):
    origin = pipeline.origin()
    settings = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
    whole = origin.ids(origin.open(sampled([30, 31], 5, **settings)))
    begun = sampled([30, 31], 5, **settings)
    resumed = session([30, 31, *whole[:6]], 10, sampling=begun.sampling, emitted=6)
    tokens = origin.tokens(origin.open(resumed))
    assert [t.token_id for t in tokens] == whole[6:]
    assert [t.index for t in tokens] == list(range(6, 16))
    origin.close()


def test_it_ends_at_a_stop_token_or_at_the_length(pipeline: PipelineUnderTest, model: Path):
    origin = pipeline.origin()
    whole = plain_greedy(model, PROMPTS[0], 12)
    stop = whole[4]
    tokens = origin.tokens(origin.open(session(PROMPTS[0], 12, stop=[stop])))
    assert [t.token_id for t in tokens] == whole[: whole.index(stop) + 1]
    assert tokens[-1].finish == "stop"
    (only,) = origin.tokens(origin.open(session(PROMPTS[0], 1)))
    assert (only.token_id, only.finish) == (whole[0], "length")
    origin.close()
    wait_until_free(pipeline)


def test_a_long_prompt_says_how_far_it_is(pipeline: PipelineUnderTest):
    origin = pipeline.origin()
    record = origin.open(session(list(range(90)), 1))
    done = []
    while isinstance(got := origin.next_record(record), Prefilled):
        assert got.total == 90
        done.append(got.tokens)
    assert done == [16, 32, 48, 64, 80, 89]
    origin.close()


def test_cancelling_frees_every_stage_and_disturbs_nobody(pipeline: PipelineUnderTest, model: Path):
    origin = pipeline.origin()
    running = [origin.open(session([n, n + 1], 400)) for n in range(4)]
    waiting = origin.open(session([50], 400))
    for record in running:
        origin.next_token(record)
    for runner in pipeline.runners:
        runner.wait_for(Heartbeat, lambda beat: beat.cache_bytes > 0)
    origin.cancel(waiting)
    for record in running[:3]:
        origin.cancel(record)
    kept = origin.open(session(PROMPTS[0], 8))
    assert origin.ids(kept) == plain_greedy(model, PROMPTS[0], 8)
    origin.cancel(running[3])
    wait_until_free(pipeline)
    origin.close()


def test_a_lost_origin_ends_its_own_sessions_only(pipeline: PipelineUnderTest, model: Path):
    lost, kept = pipeline.origin(), pipeline.origin()
    for n in range(3):
        lost.next_token(lost.open(session([n], 400)))
    record = kept.open(session(PROMPTS[1], 20))
    kept.next_token(record)
    lost.close()
    assert kept.ids(record) == plain_greedy(model, PROMPTS[1], 20)[1:]
    wait_until_free(pipeline)
    kept.close()


def test_an_origin_that_has_vanished_is_let_go_and_may_come_back(pipeline: PipelineUnderTest, model: Path):
    """Its channels stay open at its own end: it says nothing."""
    lost, kept = pipeline.origin(), pipeline.origin()
    for n in range(3):
        lost.next_token(lost.open(session([n], 400)))
    record = kept.open(session(PROMPTS[1], 20))
    kept.next_token(record)
    for runner in pipeline.runners:
        runner.send(OriginGone(lost.certificate.der))
    assert kept.ids(record) == plain_greedy(model, PROMPTS[1], 20)[1:]
    wait_until_free(pipeline)
    again = pipeline.origin(lost.certificate)
    assert again.ids(again.open(session(PROMPTS[1], 20))) == plain_greedy(model, PROMPTS[1], 20)
    for origin in (lost, kept, again):
        origin.close()


@pytest.mark.parametrize(
    ("record", "code", "what"),
    [
        (session([1] * 500, 13), "bad_input", "500 tokens and 13 new ones are 513; expected at most 512"),
        (session([1, VOCABULARY], 5), "bad_input", f"token id {VOCABULARY}"),
        (session([1], 5, sampling=Sampling(0, logit_bias=((2**31 - 1, 1.0),))), "bad_input", "token id 2147483647"),
        (session([1], 5, emitted=2), "bad_input", "2 emitted tokens"),
        (session([1], 5, epoch=6), "refused", "epoch 6"),
        (session([1], 5, instance_id="f" * 16), "refused", "instance f"),
    ],
    ids=["context", "token id", "bias", "emitted", "epoch", "instance"],
)
def test_what_cannot_be_is_refused_with_the_numbers(
    pipeline: PipelineUnderTest, record: OpenSession, code: str, what: str
):
    origin = pipeline.origin()
    failed = origin.failure(origin.open(record))
    assert failed.code == code
    assert what in failed.what
    origin.close()


def test_the_queue_is_bounded(pipeline: PipelineUnderTest):
    origin = pipeline.origin()
    records = [origin.open(session([n % VOCABULARY], 300)) for n in range(4 + 64 + 6)]
    assert origin.failure(records[-1]).code == "queue_full"
    for record in records:
        origin.cancel(record)
    wait_until_free(pipeline)
    origin.close()
