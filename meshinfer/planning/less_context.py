"""With how much less context a model would fit that does not fit: what a refusal can advise.

One order of nodes is tried, filled one after the other to the brim, so what is found does fit; another order may fit
with a little more. The need rises with the context, so the longest is found by halving: 12 looks for 4096 tokens, 23
for 2³¹.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from meshinfer.planning.memory import RangeNeeds, Room
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.partition import boundaries, furthest
from meshinfer.planning.workload import Workload
from meshinfer.topology.card import NodeCard

CONTEXT_STEP = 256
"""Tokens. Free memory moves by more than these take until a person has typed the number."""


def context_that_fits(card: ModelCard, workload: Workload, nodes: Sequence[NodeCard], prefill_chunk_tokens: int) -> int:
    """The longest context below `workload`'s, in whole steps, with which `nodes` in this order hold the model; 0 if none."""
    bounds = boundaries(card)

    def is_too_long(steps: int) -> bool:
        terms = steps * CONTEXT_STEP, workload.concurrency
        needs = {
            wide: RangeNeeds.of(card, *terms, wide, prefill_chunk_tokens)
            for wide in {node.computes_float32 for node in nodes}
        }
        reached = 0
        for node in nodes:
            room = Room(needs[node.computes_float32], node.runner_overhead_bytes, node.memory_free_bytes)
            reached = furthest(room, bounds)[reached]
        return reached < len(bounds) - 1

    below = range(1, -(-workload.context_tokens // CONTEXT_STEP))
    return CONTEXT_STEP * bisect_left(below, True, key=is_too_long)
