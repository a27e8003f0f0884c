"""Planners on the same phantoms: what each would give, in truth, when all plan from the same noisy measurements.

Seeded throughout: the same arguments, the same table. `meshinfer simulate` prints it, the bench and a test read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from meshinfer.planning.workload import Workload
from meshinfer.testing.phantoms import SMALL_PHANTOMS, Phantom, PhantomModel, dense_model
from meshinfer.testing.rivals import PLANNERS, Outcome, compare

MODELS: Mapping[str, PhantomModel] = {
    "8b": dense_model(32, 4096, 14_336),
    "30b": dense_model(60, 6656, 17_920),
    "70b": dense_model(),
}
"""In 4 bits."""
ROUNDING = 1e-3
"""Measurements are rounded to two digits before they count, so machines that are nearly alike may be mistaken for each
other; less than this is not told apart."""
COLUMNS = (*PLANNERS, "optimum")


@dataclass(frozen=True, slots=True)
class Round:
    """One phantom, one model, one seed."""

    phantom: str
    model: str
    seed: int
    outcomes: tuple[Outcome, ...]

    def seconds(self, planner: str, objective: str) -> float | None:
        """Of the objective, for one planner; None where it found nothing."""
        for outcome in self.outcomes:
            if outcome.planner == planner:
                return outcome.house_seconds if objective == "throughput" else outcome.request_seconds
        return None


def rounds(
    seeds: Sequence[int],
    noise: float,
    workload: Workload,
    phantoms: Mapping[str, Callable[[Random], Phantom]] = SMALL_PHANTOMS,
    models: Mapping[str, PhantomModel] = MODELS,
    *,
    optimum: bool = True,
) -> list[Round]:
    """Every phantom with every model and seed; measurements are off by up to `noise` of themselves.

    The `optimum` takes a second for six nodes, and ten where prompts have several chunks.
    """
    out: list[Round] = []
    for name, make in phantoms.items():
        for seed in seeds:
            phantom = make(Random(seed))  # noqa: S311 - no secret
            measured = phantom.measured(Random(seed + 1), noise)  # noqa: S311
            for model_name, model in models.items():
                outcomes = compare(phantom, measured, model.card, workload, optimum=optimum)
                out.append(Round(name, model_name, seed, tuple(outcomes)))
    return out


def table(results: Sequence[Round], workload: Workload) -> list[tuple[str, str, dict[str, float | None]]]:
    """(phantom, model, tokens per second of each planner): medians over the seeds, prompts included."""
    crowd = workload.concurrency if workload.objective == "throughput" else 1
    tokens = crowd * workload.typical[1]
    rows: list[tuple[str, str, dict[str, float | None]]] = []
    for name, model in dict.fromkeys((each.phantom, each.model) for each in results):
        ours = [each for each in results if (each.phantom, each.model) == (name, model)]
        rates: dict[str, float | None] = {}
        for column in COLUMNS:
            seconds = [s for each in ours if (s := each.seconds(column, workload.objective)) is not None]
            rates[column] = tokens / median(seconds) if len(seconds) == len(ours) else None
        rows.append((name, model, rates))
    return rows


def worse_than(results: Sequence[Round], objective: str) -> list[tuple[Round, str, float]]:
    """Where ours is slower than another planner, the optimum aside: (round, planner, by how much)."""
    out: list[tuple[Round, str, float]] = []
    for each in results:
        ours = each.seconds("ours", objective)
        for planner in PLANNERS:
            other = each.seconds(planner, objective)
            if other is not None and (ours is None or ours > other * (1 + ROUNDING)):
                out.append((each, planner, float("inf") if ours is None else ours / other - 1))
    return out


def against_best(results: Sequence[Round], objective: str) -> dict[str, tuple[float, float]]:
    """Per phantom, ours over the best of the others in each round, which is another one each time: (mean, worst).

    Below 1 ours is quicker. With noise of n a single round may be lost by luck, by (1 + n) / (1 − n) at most: two
    machines whose measurements err in opposite directions cannot be told apart by anyone who trusts them.
    """
    ratios: dict[str, list[float]] = {}
    for each in results:
        ours = each.seconds("ours", objective)
        others = [s for name in PLANNERS if name != "ours" and (s := each.seconds(name, objective)) is not None]
        if ours is not None and others:
            ratios.setdefault(each.phantom, []).append(ours / min(others))
    return {name: (sum(each) / len(each), max(each)) for name, each in ratios.items()}
