"""What an origin and the runners of an instance say to each other over a channel.

Control records are msgpack maps inside a frame (`wire.frames`): an origin opens and cancels
sessions at the head; the last stage answers with tokens, straight to the origin. Activations are
frames of another kind and have no records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshinfer.base.bounds import at_least, between, sized
from meshinfer.base.wire_ids import WireInstanceId, WireSessionId
from meshinfer.topology.card import Epoch
from meshinfer.wire.codec import Registry

TokenId = Annotated[int, between(0, 2**31 - 1)]
Position = Annotated[int, between(0, 2**31 - 1)]

LOWEST_LOGPROB = -9999.0
"""The OpenAI API's own word for impossible (−∞): JSON has none, and no token that is possible comes near it."""
Logprob = Annotated[float, between(LOWEST_LOGPROB, 1)]
"""At most 0 but for rounding; never infinite and never NaN."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last stage picks a token. Defaults are greedy-free OpenAI ones: temperature 1, nothing cut."""

    seed: Annotated[int, at_least(0)]
    """64 bits. The token at position p is a function of the logits and (seed, p), and of nothing else."""
    temperature: Annotated[float, between(0, 10)] = 1.0
    """0: greedy."""
    top_p: Annotated[float, between(0, 1)] = 1.0
    top_k: Annotated[int, between(0, 2**31 - 1)] = 0
    """0: all."""
    min_p: Annotated[float, between(0, 1)] = 0.0
    presence_penalty: Annotated[float, between(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, between(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, between(0, 10)] = 1.0
    logit_bias: Annotated[tuple[tuple[TokenId, Annotated[float, between(-100, 100)]], ...], sized(0, 1024)] = ()
    top_logprobs: Annotated[int, between(-1, 20)] = -1
    """−1: no log-probabilities at all; 0: of the sampled token; n: and of the n likeliest."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Origin → head (which passes what it must to the last stage): run this."""

    session_id: WireSessionId
    instance_id: WireInstanceId
    epoch: Epoch
    token_ids: Annotated[tuple[TokenId, ...], sized(1, 2**22)]
    """Prompt, and on a resume the tokens emitted so far."""
    emitted: Annotated[int, at_least(0)]
    """How many of `token_ids` are emitted ones: the next token's index."""
    max_new_tokens: Annotated[int, between(1, 2**31 - 1)]
    """From here on (a resume asks for what is left)."""
    stop_token_ids: Annotated[tuple[TokenId, ...], sized(0, 64)]
    sampling: Sampling
    resumed: bool = False
    """This origin had it open before, perhaps on an older epoch: ask the stages what they kept of it."""


@dataclass(frozen=True, slots=True)
class CancelSession:
    """Origin → head: nobody waits for it any more; every stage frees it."""

    session_id: WireSessionId


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Head → origin: prompt tokens done so far; a sign of life during a long prefill."""

    session_id: WireSessionId
    tokens: Position
    total: Position


@dataclass(frozen=True, slots=True)
class Token:
    """Last stage → origin: one sampled token."""

    session_id: WireSessionId
    index: Position
    """Of the emitted tokens, from 0; the origin drops what it has and notices what is missing."""
    token_id: TokenId
    finish: Literal["", "stop", "length"]
    """stop: it is one of `stop_token_ids`. length: `max_new_tokens` are out."""
    logprob: Logprob | None = None
    top_logprobs: Annotated[tuple[tuple[TokenId, Logprob], ...], sized(0, 20)] = ()


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """Head or last stage → origin: it ends here."""

    session_id: WireSessionId
    code: Annotated[str, sized(1, 32)]
    what: Annotated[str, sized(0, 2048)]


OriginRecord = OpenSession | CancelSession
RunnerRecord = Prefilled | Token | SessionFailed

ORIGIN_RECORDS = Registry(OpenSession, CancelSession)
RUNNER_RECORDS = Registry(Prefilled, Token, SessionFailed)
MAX_RECORD_BYTES = 24 * 1024 * 1024
"""An OpenSession of 2²² token ids, the longest prompt that we accept, takes at most 5 bytes a token."""
