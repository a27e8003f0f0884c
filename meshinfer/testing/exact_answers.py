"""What the exact engine answers: each token a pure function of all before it and a seed.

So an answer can be compared to the letter, whoever computed it and however often it was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

VOCABULARY = 256


def exact_token(token_ids: Sequence[int], seed: int) -> int:
    """The token that follows `token_ids`: what every FakeRunner computes."""
    content = ",".join(str(token) for token in token_ids)
    return hashlib.blake2b(f"{seed}:{content}".encode(), digest_size=1).digest()[0] % VOCABULARY


def exact_answer(prompt_ids: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
    """`count` tokens after `prompt_ids`, as any failure-free run gives them."""
    token_ids = list(prompt_ids)
    for _ in range(count):
        token_ids.append(exact_token(token_ids, seed))
    return tuple(token_ids[len(prompt_ids) :])
