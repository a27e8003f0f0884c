"""`meshinfer simulate --agents N`: whole agents in one process, on a simulated network and virtual time.

All of the product but the transport and the engine, which are exact fakes: so every answer can be checked, and a
seed replays. Nodes die (kill -9 of agent and runners) and come back ten seconds later.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from meshinfer.base.errors import BadInput
from meshinfer.cli.terminal import out, print_json
from meshinfer.testing.chaos import percentile
from meshinfer.testing.churn import STAGES, Goodput, goodput

MAX_AGENTS = 64
"""A minute of so many takes some minutes."""
HEADINGS = (
    "SEED",
    "DEATHS",
    "ANSWERS",
    "WRONG",
    "ERRORS",
    "NODE DIED",
    "TOKENS/S",
    "PAUSE P50",
    "P95",
    "WORST",
)


def simulate_agents(
    agents: int, mean_life_seconds: float, clients: int, seconds: float, seeds: Iterable[int], *, as_json: bool
) -> None:
    """Play each seed and print what clients saw; an infinite life is none that ends."""
    if not STAGES <= agents <= MAX_AGENTS:
        raise BadInput(f"--agents {agents}", expected=f"{STAGES} (which the model needs) to {MAX_AGENTS}")
    with _quiet():
        played = [
            (seed, goodput(mean_life_seconds, seed, seconds=seconds, nodes=agents, clients=clients)) for seed in seeds
        ]
    if as_json:
        print_json({"runs": [_told(seed, found) for seed, found in played]})
        return
    shown = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="right")
    for seed, found in played:
        errors = ", ".join(f"{count} {code}" for code, count in sorted(found.errors.items())) or "none"
        counts = (seed, found.deaths, found.answers, found.wrong, errors, found.with_their_origin)
        pauses = (f"{percentile(found.pauses, share):.2f} s" for share in (0.5, 0.95, 1.0))
        shown.add_row(*map(str, counts), f"{found.tokens_per_second:.1f}", *pauses)
    out.print(shown)
    lives = "none dies" if math.isinf(mean_life_seconds) else f"each lives {mean_life_seconds:g} s on average"
    out.print(
        Text(
            f"{agents} agents for {seconds:g} s of virtual time, {lives}; {clients} clients ask for 60 tokens again and "
            f"again of a model that needs {STAGES} of the nodes. NODE DIED: answers that were lost with the node that was "
            "asked. Tokens are those of good answers; a pause is an answer's longest wait for its next token.",
            style="dim",
        )
    )


@contextmanager
def _quiet() -> Generator[None]:
    """What nodes say of those that die is what this is about, and told in the table."""
    log = logging.getLogger("meshinfer")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _told(seed: int, found: Goodput) -> dict[str, object]:
    pauses = found.pauses
    told = {name: value for name, value in asdict(found).items() if name != "pauses"}
    return {
        "seed": seed,
        **told,
        "tokens_per_second": round(found.tokens_per_second, 2),
        "pause_seconds": {
            name: round(percentile(pauses, share), 3) if pauses else None
            for name, share in (("p50", 0.5), ("p95", 0.95), ("worst", 1.0))
        },
    }
