"""What one step of a pipeline says: which rows run on which cache, what was done to the caches before, what came out.

The head batches sessions; the stages after it only follow. Each session has a small number at its head,
and each cache (on every stage, for that stage's own layers) another. Before a step runs, every stage
applies the same operations to its own caches in the same order: the *cache log*. The last stage answers
every step, so the head knows how far the pipeline is; a step that samples is answered with its tokens.

A stage believes none of it before it has been checked against what it holds (`engine.cache_table`).

A session that is opened again, after a repair, may be known to some stages still. A step that *recalls* it
goes through all of them with all its tokens, and each adds what it kept. From the answer the head knows what is missing
where, and sends just that: steps in which each stage has its own *part* (`pipeline.resuming`). Then all
stages stand at the same position, and the session joins the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshinfer.base.bounds import at_least, between, sized
from meshinfer.base.wire_ids import WireSessionId
from meshinfer.wire.records import Position, Sampling, TokenId

CacheNumber = Annotated[int, between(0, 2**53)]
SessionNumber = Annotated[int, between(1, 2**53)]
MAX_ROWS = 4096
"""A placement's greatest concurrency."""
MAX_STAGES = 256
MAX_STARTED = 256
"""Sessions that one step may bring; a head that admits more brings them with the next ones."""
Rows = Annotated[tuple[Annotated[int, between(0, 2**31 - 1)], ...], sized(0, MAX_ROWS)]


@dataclass(frozen=True, slots=True)
class CacheOperation:
    """One thing to do to the caches. The words are mlx-lm's own (`mlx_lm.models.cache`).

    new: an empty cache of one sequence.
    merge: batch the sequences of `sources` into a new cache.
    copy: of `sources[0]`, into a new cache.
    extend: add the rows of `sources[0]`.
    filter: keep `rows`, in this order.
    prepare: the next tokens are padded on the right: `rows` are true lengths, `padding` what is added.
    finalize: the padding is over.
    cut: of one sequence, which must hold `rows[0]` tokens at least: forget what is beyond.
    free: forget it.
    """

    kind: Literal["new", "merge", "copy", "extend", "filter", "prepare", "finalize", "cut", "free"]
    cache: CacheNumber
    sources: Annotated[tuple[CacheNumber, ...], sized(0, MAX_ROWS)] = ()
    rows: Rows = ()
    padding: Rows = ()


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What the last stage must know of a session to sample for it and to say when it ends."""

    number: SessionNumber
    session_id: WireSessionId
    origin: Annotated[str, sized(1, 128)]
    """Fingerprint of the certificate of the origin's channel, on the head as on the last stage."""
    prompt_tokens: Annotated[int, at_least(1)]
    """Given ones: the prompt, and on a resume what had been emitted."""
    emitted: Annotated[int, at_least(0)]
    """How many of them had been emitted: the next token's index."""
    max_new_tokens: Annotated[int, between(1, 2**31 - 1)]
    stop_token_ids: Annotated[tuple[TokenId, ...], sized(0, 64)]
    sampling: Sampling
    resumed: bool = False
    """Its origin had it open before: stages may have kept something of it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What one stage has of a session that is opened again."""

    position: Position
    """Its caches are good for so many of the session's tokens; 0: it kept nothing."""
    lowest: Position = 0
    """They can be cut back to so many; `position` where they cannot (a sliding window that has wrapped)."""
    replays: bool = False
    """It can send on what it computed for all of them, without computing it again."""


Part = Literal["compute", "replay", "skip"]
"""What a stage does with the tokens of a session that is brought back.

compute: run its layers on them. replay: send on what it kept. skip: nothing, it has them.
"""


@dataclass(frozen=True, slots=True)
class StepControl:
    """The control part of a `STEP` frame. Its first tensor are the token ids, [rows, length] of int32."""

    operations: Annotated[tuple[CacheOperation, ...], sized(0, 8 * MAX_ROWS)] = ()
    """Before the step, in this order."""
    cache: CacheNumber = 0
    """What the step runs on; 0: nothing runs, the frame only brings operations."""
    rows: Annotated[tuple[tuple[SessionNumber, Position, Position], ...], sized(0, MAX_ROWS)] = ()
    """(session, tokens in its cache before this step, tokens of it in this step: the rest of the row is padding)."""
    samples: bool = False
    """Take a token for each row; else the rows are a chunk of prompts and only fill the caches."""
    started: Annotated[tuple[SessionStart, ...], sized(0, MAX_STARTED)] = ()
    ended: Annotated[tuple[SessionNumber, ...], sized(0, MAX_ROWS)] = ()
    """Sessions that have ended, the last stage's own decisions among them: forget them."""
    recalls: bool = False
    """`rows` is one session with all its tokens, which do not run: `cache` becomes what the stage kept of it."""
    kept: Annotated[tuple[Kept, ...], sized(0, MAX_STAGES)] = ()
    """In a step that recalls, of the stages before."""
    parts: Annotated[tuple[Part, ...], sized(0, MAX_STAGES)] = ()
    """Of each stage, in a step that brings one session back, on its own cache; empty: all compute, in a batch.
    Activations come only to a stage that computes."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's token, as the head needs to know it."""

    session: SessionNumber
    token_id: TokenId
    finish: Literal["", "stop", "length", "failed", "origin_lost"] = ""
    """failed: there was no token to take, and the origin knows. origin_lost: nobody listens for it any more."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The control part of an `ANSWER` frame: the step has gone through every stage."""

    tokens: Annotated[tuple[SampledToken, ...], sized(0, MAX_ROWS)] = ()
    """In the order of the step's rows; empty if it did not sample."""
    kept: Annotated[tuple[Kept, ...], sized(0, MAX_STAGES)] = ()
    """Of each stage, if the step recalled."""
