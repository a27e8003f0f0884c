"""The figure that readers can compare with the literature's (Borzunov et al. 2023, table 1): steps a second of one answer
while each stage fails with a given probability at each step; resuming against starting over.

    Deaths (rate, seed) ──► play: one answer, one side ──► Cell: many seeds, one side ──► figure: all cells, as lines

Both sides of a cell have the same seeds, which name the stage steps after which a runner dies (the 212th, the 6450th…), so
both meet the first failure at the same place. How many answers a cell has follows from its rate alone: enough that
FAILURES are to be expected, at least ANSWERS. Two things make that affordable:

- An answer whose seed has its first death after its last step meets no failure, and goes as at rate 0, on both sides, to
  the bit (a test compares them). Rate 0 is played, ten times on each side, and there every time is the same; the others
  are counted with it. At 1e-4 and 128 tokens that spares 96 of 100 answers.
- A client that starts over waits for the repair like ours while no token has come, as it has nothing to give up, and one
  that is refused asks again after ASK_AGAIN_SECONDS. Asking at once, it had the planner look hundreds of times in
  a virtual second, which is what the figure took its real time for, and had its answer no sooner.

A client that starts over may never come to its end (three stages, 1024 tokens, 1e-2: one attempt in 2.6e13 gets through),
so every answer is given up after GIVE_UP_SECONDS, on both sides. Then its time counts and its tokens do not: a cell says
the tokens of finished answers over the time of all. Giving up costs whoever starts over nothing else: it has nothing yet.

Both sides stand on the product's repair, its rests included: a seat that nobody else can take and that fails again
rests for 2, 4, 8, then 16 s (`serving.failures`). At 1e-2 a runner dies after
every second or so of steps, and rests are much of the time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from unittest import mock

import trio
import trio.testing

from meshinfer.base.errors import MeshinferError
from meshinfer.planning.workload import Workload
from meshinfer.serving.requests import Generated, Waiting
from meshinfer.testing.chaos_room import NODE_BYTES, SPEED, at_once, replays
from meshinfer.testing.churn import STAGES
from meshinfer.testing.cluster import Cluster, SimNode
from meshinfer.testing.engine import Step
from meshinfer.testing.exact_answers import exact_answer

RATES = (0.0, 1e-4, 1e-3, 1e-2)
"""Of failure, per hop and step."""
LENGTHS = (128, 1024)
"""Of answers, in tokens."""
FAILURES = 32
"""To be expected in a cell: fewer than LEAST are met in one cell of a hundred then."""
LEAST = 20
"""Failures without which a cell says nothing."""
ANSWERS = 10
"""In a cell at least: spreads of fewer say little."""
GIVE_UP_SECONDS = 300.0
"""Of virtual time for one answer: nine times what 1024 tokens take without failures, twice what they take ours at 1e-2."""
ASK_AGAIN_SECONDS = 0.25
"""After a refusal: half of what a new runner takes to start, so next to nothing of what the client waits for."""
PROMPT, SEED = (1, 2), 7


@dataclass(frozen=True, slots=True)
class Pace:
    """How one answer went."""

    tokens: int
    seconds: float
    failures: int
    """Runners that died meanwhile."""
    attempts: int
    """How often the client asked: more than once where it started over, or had an error."""
    finished: bool
    correct: bool

    @property
    def steps_per_second(self) -> float:
        """0 if it never came to its end."""
        return self.tokens / self.seconds if self.finished else 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """All answers of one rate, length and side."""

    paces: tuple[Pace, ...]

    @property
    def failures(self) -> int:
        return sum(pace.failures for pace in self.paces)

    @property
    def finished(self) -> int:
        return sum(pace.finished for pace in self.paces)

    @property
    def attempts(self) -> int:
        return sum(pace.attempts for pace in self.paces)

    @property
    def useful_steps_per_second(self) -> float:
        """Tokens of finished answers over the time of all."""
        return sum(pace.tokens for pace in self.paces if pace.finished) / sum(pace.seconds for pace in self.paces)

    def cells(self) -> str:
        """As the end of a table's line."""
        each = [pace.steps_per_second for pace in self.paces]
        spread = f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
        few = "" if self.failures >= LEAST or not self.failures else " (few)"
        return (
            f"{self.failures}{few} | {self.finished} of {len(self.paces)} | {self.attempts} | {spread} "
            f"| {self.useful_steps_per_second:.2f} |"
        )


def deaths(rate: float, tokens: int, seed: int) -> Iterator[int]:
    """After which stage steps a runner dies, counted from 1; each does with probability `rate`."""
    rng = random.Random(f"{rate} {tokens} {seed}")  # noqa: S311 - it replays
    step = 0
    while rate:
        step += 1 + int(math.log(1.0 - rng.random()) / math.log1p(-rate))
        yield step


def answers(rate: float, tokens: int) -> int:
    """How many a cell has."""
    return max(ANSWERS, math.ceil(FAILURES / (STAGES * tokens * rate)) if rate else 0)


def figure(say: Callable[[str], None], lengths: tuple[int, ...] = LENGTHS, rates: tuple[float, ...] = RATES) -> bool:
    """Play all cells and say the table, line by line. Whether every token was right and every cell met its failures."""
    say(
        "Three stages; after each step of each stage its runner dies (SIGKILL) with the given probability, and is made "
        f"again where it was, or elsewhere if it dies again. Virtual time, exact engine; stated speeds: {SPEED}. "
        "'Starting over' is a client that asks again from the first token with every failure; both sides have the same "
        f"seeds. Finished: within {GIVE_UP_SECONDS:.0f} s. Median, slowest and quickest are of single answers, an "
        "unfinished one counts as 0; useful steps/s are the tokens of finished answers over the time of all.\n"
    )
    say(
        "| tokens | rate | | failures met | finished | times asked | steps/s of an answer | useful steps/s |\n|---|---|---|---|---|---|---|---|"
    )
    fine = True
    for tokens in lengths:
        quiet = Cell(tuple(play(0.0, tokens, seed, resume=True) for seed in range(ANSWERS)))
        for rate in rates:
            for name, resume in (("meshinfer resumes", True), ("starting over", False)):
                cell = play_cell(rate, tokens, quiet.paces[0], resume=resume) if rate or not resume else quiet
                fine = fine and all(pace.correct for pace in cell.paces) and (not rate or cell.failures >= LEAST)
                say(f"| {tokens} | {rate:g} | {name} | {cell.cells()}")
    return fine


def play_cell(rate: float, tokens: int, quiet: Pace, *, resume: bool) -> Cell:
    """One side of a cell; `quiet` is how an answer goes that meets no failure."""
    paces: list[Pace] = []
    for seed in range(answers(rate, tokens)):
        is_quiet = bool(rate) and next(deaths(rate, tokens, seed)) > STAGES * tokens
        paces.append(quiet if is_quiet else play(rate, tokens, seed, resume=resume))
    return Cell(tuple(paces))


def play(rate: float, tokens: int, seed: int, *, resume: bool) -> Pace:
    """One answer of `tokens` tokens, while runners die.

    Args:
        rate: per hop and step.
        tokens: of the answer.
        seed: of the failures, and of everything else.
        resume: as the product does it; else the client starts over with every failure that it hears of.
    """
    workload = Workload(context_tokens=tokens + 64, concurrency=1)
    dying = deaths(rate, tokens, seed)
    failures = steps = attempts = 0
    dies_at = next(dying, math.inf)

    async def main() -> Pace:
        nonlocal attempts
        cluster = Cluster(random.Random(seed), memory_bytes=NODE_BYTES, speed=SPEED)  # noqa: S311 - it replays
        async with cluster.running(2 * STAGES):
            origin = cluster.nodes[0]
            await cluster.ask(origin, cluster.request(PROMPT, 1, SEED, workload=workload))  # placed and linked

            def fail(step: Step) -> None:
                nonlocal failures, steps, dies_at
                steps += 1
                if steps >= dies_at:
                    failures += 1
                    dies_at = next(dying)
                    for runner in cluster.fabric.runners_of(step.node_id):
                        runner.die("killed by SIGKILL")

            cluster.fabric.witness = fail
            began, got, finished = trio.current_time(), list[int](), False
            with trio.move_on_after(GIVE_UP_SECONDS):
                while not finished:
                    attempts += 1
                    got, finished = await _attempt(cluster, origin, tokens, workload, resume=resume)
            seconds = trio.current_time() - began
            cluster.fabric.witness = lambda _: None
            correct = tuple(got) == exact_answer(PROMPT, SEED, len(got))
            return Pace(tokens, seconds, failures, attempts, finished, correct)
        raise AssertionError

    replays(seed)
    with mock.patch.object(trio.to_thread, "run_sync", at_once):
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def _attempt(
    cluster: Cluster, origin: SimNode, tokens: int, workload: Workload, *, resume: bool
) -> tuple[list[int], bool]:
    """(tokens, whether they are all); without `resume` it ends with the first failure that costs it tokens."""
    request = cluster.request(PROMPT, tokens, SEED, deadline_seconds=GIVE_UP_SECONDS, workload=workload)
    got: list[int] = []
    try:
        async with origin.serving.sessions.generate(request) as events:
            async for event in events:
                if isinstance(event, Generated):
                    got.append(event.token_id)
                elif isinstance(event, Waiting) and event.phase == "repairing" and got and not resume:
                    return got, False
    except MeshinferError:
        await trio.sleep(ASK_AGAIN_SECONDS)
        return got, False
    return got, len(got) == tokens
