"""From logits to tokens, each row by itself.

The token that a session gets at index i is a function of its logits, its `Sampling`, the tokens before it
and i, and of nothing else: not of who shares the batch, not of how many draws others made. So a session
that is resumed on other nodes goes on as it would have. Randomness is MLX's counter-based generator with a
key made of (seed, i), the same numbers on every device.

Order, as in most servers: logit bias and penalties; greedy if the temperature is 0; else temperature,
top-k, top-p, min-p, draw. Repetition counts prompt and answer, presence and frequency the answer alone.
Log-probabilities are of the distribution after bias and penalties, before the temperature.

MLX checks no index: an id beyond the vocabulary reads or writes foreign memory and kills the process.
Every id that comes in here is checked before it is used, and so is every id that goes out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from meshinfer.base.errors import BadInput, MeshinferError
from meshinfer.wire.records import LOWEST_LOGPROB, Sampling

# Below this top-p keeps the likeliest token only; 0 itself would index past the sorted row.
_TOP_P_GREEDY = 1e-6
_WHOLE_HISTORY = 2**30
"""mlx-lm's penalties look back 20 tokens unless told otherwise."""

Processor = Callable[[Any, mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides one row's token beside its logits."""

    sampling: Sampling
    index: int
    """Of this token among the answer's tokens, from 0; a resumed session goes on counting."""
    seen: Sequence[int] = ()
    """Prompt and answer so far; only penalties look at it (see `remembers`)."""
    prompt_tokens: int = 0
    """How many of `seen` are prompt."""

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0 or self.sampling.top_p < _TOP_P_GREEDY or self.sampling.top_k == 1

    @property
    def is_plain(self) -> bool:
        """The likeliest token of the logits as they are, and nothing else: such rows are taken together."""
        return self.is_greedy and not self.wants_logprobs and _processors_of(self.sampling).are_none

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.top_logprobs >= 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token."""

    token_id: int
    logprob: float | None = None
    """Natural logarithm; None if not asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, descending; ids ascending where they are equal."""


def check_ids(ids: Iterable[int], vocab_size: int, what: str) -> None:
    """See that all ids are in the vocabulary.

    Raises:
        BadInput: naming the first that is not.
    """
    for index in ids:
        if not 0 <= index < vocab_size:
            raise BadInput(f"{what} holds the token id {index}", expected=f"0 to {vocab_size - 1}")


def remembers(sampling: Sampling) -> bool:
    """Whether its penalties look at earlier tokens, so that `Draw.seen` must hold them."""
    processors = _processors_of(sampling)
    return bool(processors.on_all or processors.on_answer)


def draw_tokens(logits: mx.array, draws: Sequence[Draw], vocab_size: int | None = None) -> list[Drawn]:
    """One token for each row of `logits` [rows, vocabulary].

    Args:
        logits: of any float type; columns beyond `vocab_size` (padding of a head) are never drawn.
        draws: one for each row.
        vocab_size: ids that the embedding knows; all columns if None.

    Raises:
        BadInput: not one row for each draw, or an id beyond the vocabulary in a bias or in `seen`.
        MeshinferError: logits that are not numbers, so that there is no token to draw.
    """
    if logits.ndim != 2 or logits.shape[0] != len(draws) or not draws:
        raise BadInput(f"logits of shape {logits.shape}", expected=f"[{len(draws)}, vocabulary], at least one row")
    size = min(vocab_size or logits.shape[1], logits.shape[1])
    for draw in draws:
        check_ids((token for token, _ in draw.sampling.logit_bias), size, "logit_bias")
        if remembers(draw.sampling):
            check_ids(draw.seen, size, "the tokens so far")
    logits = logits[:, :size]
    # A NaN or an infinity (a float16 overflow) would come out as some token or other.
    finite = mx.isfinite(mx.max(logits, axis=-1)) & ~mx.any(mx.isnan(logits), axis=-1)
    if all(draw.is_plain for draw in draws):
        tokens = mx.argmax(logits, axis=-1)
        mx.eval(tokens, finite)
        drawn = [Drawn(token) for token in _integers(tokens)]
    else:
        rows = [_pick(draw, logits[index]) for index, draw in enumerate(draws)]
        mx.eval(rows, finite)
        drawn = [_drawn(draw, *row) for draw, row in zip(draws, rows, strict=True)]
    broken = [index for index, good in enumerate(_integers(finite)) if not good]
    if broken or any(not 0 <= result.token_id < size for result in drawn):
        raise MeshinferError(
            f"the logits of rows {broken} are not numbers",
            expected="finite ones",
            do="report the model: its weights or its float type overflow",
        )
    return drawn


def draw_key(seed: int, index: int) -> mx.array:
    """The random key of one draw. Hashed, so that neighbouring seeds and indices share nothing."""
    content = seed.to_bytes(16, "little") + index.to_bytes(8, "little")
    return mx.random.key(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


# --- one row --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Processors:
    bias: tuple[Processor, ...]
    on_all: tuple[Processor, ...]
    on_answer: tuple[Processor, ...]

    @property
    def are_none(self) -> bool:
        return not (self.bias or self.on_all or self.on_answer)


@lru_cache(maxsize=256)
def _processors_of(sampling: Sampling) -> _Processors:
    """mlx-lm's own; kept, since each token of a session asks for them again."""

    def make(**settings: Any) -> tuple[Processor, ...]:
        for kind in ("repetition", "presence", "frequency"):
            settings[f"{kind}_context_size"] = _WHOLE_HISTORY
        made: Any = make_logits_processors(**settings)
        return tuple(made)

    neutral = sampling.repetition_penalty in (0, 1)
    return _Processors(
        bias=make(logit_bias=dict(sampling.logit_bias)),
        on_all=make(repetition_penalty=None if neutral else sampling.repetition_penalty),
        on_answer=make(presence_penalty=sampling.presence_penalty, frequency_penalty=sampling.frequency_penalty),
    )


def _pick(draw: Draw, logits: mx.array) -> tuple[mx.array, mx.array]:
    """Lazily: (token id, log-probabilities [vocabulary] after bias and penalties) from logits [vocabulary]."""
    processors = _processors_of(draw.sampling)
    row = _processed(processors.bias, (), logits[None].astype(mx.float32))
    row = _processed(processors.on_all, draw.seen, row)
    row = _processed(processors.on_answer, draw.seen[draw.prompt_tokens :], row)
    logprobs = row - mx.logsumexp(row, axis=-1, keepdims=True)
    token = mx.argmax(row, axis=-1) if draw.is_greedy else _categorical(draw, logprobs)
    return token[0], logprobs[0]


def _processed(processors: Sequence[Processor], history: Sequence[int], row: mx.array) -> mx.array:
    tokens = mx.array(list(history), mx.int32) if history and processors else ()
    for processor in processors:
        row = processor(tokens, row)
    return row


def _categorical(draw: Draw, logprobs: mx.array) -> mx.array:
    settings = draw.sampling
    scaled = logprobs * (1 / settings.temperature)
    scaled = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    if 0 < settings.top_k < scaled.shape[-1]:
        scaled = apply_top_k(scaled, settings.top_k)
    if settings.top_p < 1:
        scaled = apply_top_p(scaled, settings.top_p)
    if settings.min_p > 0:
        scaled = apply_min_p(scaled, settings.min_p)
    return mx.random.categorical(scaled, key=draw_key(settings.seed, draw.index))


def _drawn(draw: Draw, token: mx.array, logprobs: mx.array) -> Drawn:
    (token_id,) = _integers(token[None])
    if not draw.wants_logprobs or not 0 <= token_id < logprobs.shape[0]:
        return Drawn(token_id)
    count = min(draw.sampling.top_logprobs, logprobs.shape[0])
    likeliest = mx.argpartition(-logprobs, kth=count - 1)[:count] if count else mx.array([], mx.int32)
    shown = logprobs[mx.concatenate([token[None].astype(mx.int32), likeliest.astype(mx.int32)])]
    values: Any = mx.maximum(shown, LOWEST_LOGPROB).tolist()
    top = sorted(zip(_integers(likeliest), values[1:], strict=True), key=lambda entry: (-entry[1], entry[0]))
    return Drawn(token_id, float(values[0]), tuple(top))


def _integers(array: mx.array) -> list[int]:
    values: Any = array.tolist()
    return values
