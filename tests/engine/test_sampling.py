"""A token is a function of its logits, its settings, the tokens before it and its index; of nothing else."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.base.errors import BadInput, MeshinferError
from meshinfer.engine.sampling import Draw, draw_tokens, remembers
from meshinfer.wire.records import LOWEST_LOGPROB, Sampling

SIZE = 50
GREEDY = Sampling(seed=0, temperature=0.0)
HISTORY = (3, 1, 4, 1, 5, 9, 2, 6)


def logits_for(row: int) -> mx.array:
    return mx.random.normal((SIZE,), key=mx.random.key(row)) * 3


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, SIZE - 1, SIZE, 10**9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([0.0, 0.5, 1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((7, 5.0),), ((0, -100.0), (SIZE - 1, 2.5))]),
    top_logprobs=st.sampled_from([-1, 0, 3, 20]),
)
draws = st.builds(Draw, samplings, st.integers(0, 10_000), st.just(HISTORY), st.integers(0, len(HISTORY)))


@given(rows=st.lists(st.tuples(st.integers(0, 1000), draws), min_size=1, max_size=5), data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_row_alone_gives_what_it_gives_in_company(rows: list[tuple[int, Draw]], data: st.DataObject) -> None:
    together = draw_tokens(mx.stack([logits_for(seed) for seed, _ in rows]), [draw for _, draw in rows])
    order = data.draw(st.permutations(range(len(rows))))
    mx.random.seed(data.draw(st.integers(0, 100)))  # MLX's own stream of numbers is nobody's business
    shuffled = draw_tokens(mx.stack([logits_for(rows[i][0]) for i in order]), [rows[i][1] for i in order])
    assert [together[i] for i in order] == shuffled
    for (seed, draw), expected in zip(rows, together, strict=True):
        assert draw_tokens(logits_for(seed)[None], [draw]) == [expected]
        assert 0 <= expected.token_id < SIZE


def test_index_and_seed_decide_and_all_indices_differ() -> None:
    flat = mx.zeros((1, SIZE))

    def sequence(seed: int, start: int = 0) -> list[int]:
        return [draw_tokens(flat, [Draw(Sampling(seed=seed), i)])[0].token_id for i in range(start, 40)]

    assert sequence(5) == sequence(5)
    assert sequence(5, 17) == sequence(5)[17:], "a resumed session goes on as it would have"
    assert sequence(5) != sequence(6)
    assert len(set(sequence(5))) > 10


def test_draws_follow_the_distribution() -> None:
    logits = mx.log(mx.array([[0.5, 0.25, 0.125, 0.125]]))
    counts = Counter(draw_tokens(logits, [Draw(Sampling(seed=11), i)])[0].token_id for i in range(2000))
    # Four standard deviations of a binomial; the seed is fixed, so this is no gamble.
    for token, share in enumerate((0.5, 0.25, 0.125, 0.125)):
        assert abs(counts[token] / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)


@pytest.mark.parametrize(
    ("change", "allowed"),
    [({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0, 1}), ({"min_p": 0.7}, {0}), ({"top_p": 0.0}, {0}), ({"top_k": 1}, {0}),
     ({"temperature": 0.0}, {0}), ({"top_k": 3, "min_p": 0.4}, {0, 1})],
)  # fmt: skip
def test_only_allowed_tokens_are_drawn(change: dict[str, Any], allowed: set[int]) -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    sampling = replace(Sampling(seed=3), **change)
    assert {draw_tokens(logits, [Draw(sampling, i)])[0].token_id for i in range(60)} == allowed


def test_the_temperature_comes_before_top_p() -> None:
    """At temperature 10 four tokens are nearly equal, so top-p 0.9 keeps all; at 0.1 it keeps one."""
    logits = mx.log(mx.array([[0.9, 0.05, 0.03, 0.02]]))
    for temperature, kept in ((10.0, 4), (0.1, 1)):
        sampling = Sampling(seed=1, temperature=temperature, top_p=0.9)
        assert len({draw_tokens(logits, [Draw(sampling, i)])[0].token_id for i in range(80)}) == kept


# --- penalties, bias, log-probabilities: against the formulas -------------------------------------


def logprobs_under(
    sampling: Sampling, logits: mx.array, seen: tuple[int, ...] = (), prompt: int = 0
) -> dict[int, float]:
    everything = replace(sampling, top_logprobs=20)
    size = logits.shape[0]
    assert size <= 20
    return dict(draw_tokens(logits[None], [Draw(everything, 0, seen, prompt)])[0].top_logprobs)


def test_penalties_are_the_published_formulas() -> None:
    logits = [2.0, -1.0, 0.5, 1.0]
    seen, prompt = (1, 2, 2, 3, 3), 2  # the prompt is 1, 2; the answer 2, 3, 3
    sampling = replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    expected = list(logits)
    for token in set(seen):
        expected[token] = expected[token] * 2 if expected[token] < 0 else expected[token] / 2
    for token, count in Counter(seen[prompt:]).items():
        expected[token] -= 0.5 + 0.25 * count
    total = math.log(sum(map(math.exp, expected)))
    found = logprobs_under(sampling, mx.array(logits), seen, prompt)
    assert found == pytest.approx({token: value - total for token, value in enumerate(expected)}, abs=1e-5)


def test_penalties_see_the_whole_history() -> None:
    """mlx-lm looks back 20 tokens unless told otherwise."""
    seen = (1, *[2] * 300)
    plain, penalised = (logprobs_under(replace(GREEDY, presence_penalty=p), mx.zeros((4,)), seen) for p in (0.0, 2.0))
    assert penalised[1] - penalised[0] == pytest.approx(-2.0, abs=1e-5)
    assert plain[1] == pytest.approx(plain[0])


def test_a_bias_is_added_and_can_forbid() -> None:
    logits = mx.array([5.0, 4.0, 3.0])
    assert draw_tokens(logits[None], [Draw(replace(GREEDY, logit_bias=((0, -100.0),)), 0)])[0].token_id == 1
    found = logprobs_under(replace(GREEDY, logit_bias=((2, 2.0),)), logits)
    assert found[2] == pytest.approx(found[0], abs=1e-6)


def test_what_is_impossible_has_the_least_logprob_that_can_be_told() -> None:
    logits = mx.array([[0.0, -math.inf, -1.0]])
    (drawn,) = draw_tokens(logits, [Draw(replace(GREEDY, top_logprobs=3), 0)])
    assert drawn.top_logprobs[-1] == (1, LOWEST_LOGPROB)


def test_logprobs_are_sorted_and_of_the_row_before_the_temperature() -> None:
    logits = mx.array([1.0, 3.0, 2.0, 3.0])
    (drawn,) = draw_tokens(logits[None], [Draw(Sampling(seed=1, temperature=5.0, top_logprobs=3), 0)])
    total = math.log(sum(map(math.exp, logits.tolist())))
    assert [token for token, _ in drawn.top_logprobs] == [1, 3, 2]
    assert drawn.logprob == pytest.approx(logits.tolist()[drawn.token_id] - total, abs=1e-5)
    (bare,) = draw_tokens(logits[None], [Draw(replace(GREEDY, top_logprobs=0), 0)])
    assert bare.top_logprobs == ()
    assert bare.logprob == pytest.approx(3.0 - total, abs=1e-5)
    assert draw_tokens(logits[None], [Draw(GREEDY, 0)])[0].logprob is None


def test_only_penalties_need_the_history() -> None:
    assert not remembers(replace(GREEDY, logit_bias=((1, 1.0),)))
    for settings_ in ({"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}):
        assert remembers(replace(GREEDY, **settings_))


# --- what MLX must never see ----------------------------------------------------------------------


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    logits = mx.zeros((1, SIZE))
    with pytest.raises(BadInput, match="logit_bias holds the token id 50"):
        draw_tokens(logits, [Draw(replace(GREEDY, logit_bias=((SIZE, 1.0),)), 0)])
    with pytest.raises(BadInput, match="tokens so far holds the token id -1"):
        draw_tokens(logits, [Draw(replace(GREEDY, presence_penalty=1.0), 0, (3, -1))])
    with pytest.raises(BadInput, match="token id 45"):
        draw_tokens(logits, [Draw(replace(GREEDY, logit_bias=((45, 1.0),)), 0)], vocab_size=40)


def test_padding_of_a_head_is_never_drawn() -> None:
    logits = mx.concatenate([mx.zeros((2, 40)), mx.full((2, 10), 9.0)], axis=1)
    draws_ = [Draw(GREEDY, 0), Draw(Sampling(seed=1, temperature=2.0, top_logprobs=20), 0)]
    for drawn in (*draw_tokens(logits, draws_, vocab_size=40), *draw_tokens(logits, draws_[:1] * 2, vocab_size=40)):
        assert drawn.token_id < 40
        assert all(token < 40 for token, _ in drawn.top_logprobs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=1)], ids=["greedy", "drawn"])
def test_logits_that_are_not_numbers_are_an_error(bad: float, sampling: Sampling) -> None:
    logits = mx.zeros((2, SIZE))
    logits[1, 7] = bad
    with pytest.raises(MeshinferError, match=r"rows \[1\] are not numbers"):
        draw_tokens(logits, [Draw(sampling, 0)] * 2)


@pytest.mark.parametrize("shape", [(2, SIZE), (SIZE,), (1, 1, SIZE), (0, SIZE)])
def test_one_row_for_each_draw(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="logits of shape"):
        draw_tokens(mx.zeros(shape), [Draw(GREEDY, 0)])


def test_half_precision_logits_are_taken_as_they_are() -> None:
    for dtype in (mx.bfloat16, mx.float16):
        (drawn,) = draw_tokens(mx.array([[1.0, 2.0, 0.5]]).astype(dtype), [Draw(Sampling(seed=1, top_logprobs=1), 0)])
        assert drawn.top_logprobs[0] == pytest.approx((1, 2 - math.log(math.e + math.e**2 + math.e**0.5)), abs=1e-5)
