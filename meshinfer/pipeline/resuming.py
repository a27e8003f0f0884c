"""What is computed again when a session comes back: only what is missing. Pure.

Each stage has said up to which position its caches are good, and whether it can replay what it sent on. A
stage that misses positions needs the outputs of the stage before for them; that one replays them, or, if it
did not keep them, cuts its caches back and computes them again, and so on towards the head, where token ids
are enough. Seat 1 of three was lost after 900 tokens, in the middle of a step:

    position      0 ······························· 899   900
    seat 0        replay                            replay      (its caches were good for 901)
    seat 1, new   compute                           compute
    seat 2        skip                              skip

Once every stage stands at the same position, nothing is special any more: the rest of the tokens is a
prompt like any other, and is read in the batch. Some stages may hold the last token too, as seat 0 does here,
and not be able to cut it off (a window that has wrapped, a recurrent state). Then the stages meet behind it: the
last piece is that token, and its step samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshinfer.base.errors import ProtocolError
from meshinfer.wire.steps import Kept, Part


@dataclass(frozen=True, slots=True)
class Piece:
    """One step that brings a session back: its tokens `[start, end)`, and each stage's part."""

    start: int
    end: int
    parts: tuple[Part, ...]
    samples: bool = False
    """Its token is the session's last one: take the next."""


@dataclass(frozen=True, slots=True)
class Return:
    """How a session comes back."""

    pieces: tuple[Piece, ...]
    position: int
    """Where every stage stands after them."""


def plan_return(kept: Sequence[Kept], stages: int, tokens: int, chunk_tokens: int) -> Return:
    """The least work after which all stages stand at one position.

    Args:
        kept: of each stage.
        stages: how many there must be.
        tokens: of the session; the last one gives the next, so the last stage computes it in any case.
        chunk_tokens: of one step.

    Raises:
        ProtocolError: the stages cannot have said that.
    """
    if len(kept) != stages or any(not stage.lowest <= stage.position <= tokens for stage in kept):
        raise ProtocolError(f"{kept} of a session", expected=f"{stages} stages with positions up to {tokens}")
    starts = _starts([_without_last(stage, tokens) for stage in kept[:-1]], _for_logits(kept[-1], tokens))
    position = max(starts)
    edges = {*starts, *range(min(starts), position, chunk_tokens)}
    if position == tokens:
        edges.add(tokens - 1)
    pieces = (Piece(a, b, _parts(starts, a), samples=b == tokens) for a, b in pairwise(sorted(edges)))
    return Return(tuple(pieces), position)


def _without_last(stage: Kept, tokens: int) -> Kept:
    """Cut back to where sessions join the batch, if it can be."""
    return replace(stage, position=min(stage.position, tokens - 1)) if stage.lowest < tokens else stage


def _for_logits(last: Kept, tokens: int) -> int:
    """From where the last stage computes: it must give the logits of the last token."""
    if last.position < tokens:
        return last.position
    return tokens - 1 if last.lowest < tokens else 0


def _starts(before: Sequence[Kept], last: int) -> list[int]:
    """From where each stage computes."""
    starts = [last]
    for stage in reversed(before):
        wanted = starts[0]  # the first position whose activations the next stage has to get
        if wanted >= stage.position or stage.replays:
            starts.insert(0, stage.position)
        else:
            starts.insert(0, wanted if wanted >= stage.lowest else 0)
    return starts


def _parts(starts: Sequence[int], position: int) -> tuple[Part, ...]:
    computes = [position >= start for start in starts]
    return tuple(
        "compute" if own else "replay" if after else "skip"
        for own, after in zip(computes, (*computes[1:], False), strict=True)
    )
