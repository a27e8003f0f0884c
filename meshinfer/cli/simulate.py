"""`meshinfer simulate`: planners compared on made-up networks, or whole made-up agents. Needs no agent, touches none."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from meshinfer.base.errors import BadInput
from meshinfer.cli.options import JsonOption
from meshinfer.cli.terminal import out, print_json

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast


def simulate(
    phantom: Annotated[
        list[str] | None, typer.Option("--phantom", help="Only this made-up network; may be repeated.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="Only this model size; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Networks of each kind.")] = 3,
    noise: Annotated[
        float, typer.Option("--noise", min=0, max=0.9, help="Measurements are off by up to this share of themselves.")
    ] = 0.0,
    objective: Annotated[str, typer.Option("--objective", metavar="latency|throughput")] = "latency",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of a typical prompt.")] = 256,
    output: Annotated[int, typer.Option("--output", min=1, help="Tokens of a typical answer.")] = 256,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens to reserve per conversation.")] = 4096,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Conversations to reserve for.")] = 1,
    agents: Annotated[
        int, typer.Option("--agents", min=0, help="Instead: run so many whole agents, on virtual time.")
    ] = 0,
    churn: Annotated[
        float, typer.Option("--churn", min=0, help="With --agents: how long a node lives on average; 0: none dies.")
    ] = 0.0,
    clients: Annotated[int, typer.Option("--clients", min=1, max=64, help="With --agents: who ask at once.")] = 4,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=3600, help="With --agents: of virtual time.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Compare planners on the same made-up networks: ours, the true optimum, and the rules of others.

    With --agents: see what clients of a mesh get whose nodes come and go.
    """
    if agents:
        from meshinfer.cli.simulate_agents import simulate_agents

        simulate_agents(agents, churn or math.inf, clients, seconds, range(seeds), as_json=as_json)
        return
    if churn:
        raise BadInput("--churn without --agents", expected="both: planners alone do not die")

    from meshinfer.planning.workload import Workload
    from meshinfer.testing.phantoms import SMALL_PHANTOMS
    from meshinfer.testing.simulate import COLUMNS, MODELS, against_best, rounds, table, worse_than

    if objective not in ("latency", "throughput"):
        raise BadInput(f"{objective!r} is no --objective", expected="latency or throughput")
    workload = Workload(context, concurrency, prompt, output, objective)
    phantoms = {name: SMALL_PHANTOMS[_known(name, SMALL_PHANTOMS, "network")] for name in phantom or SMALL_PHANTOMS}
    models = {name: MODELS[_known(name, MODELS, "model")] for name in model or MODELS}
    results = rounds(range(seeds), noise, workload, phantoms, models)
    rows = table(results, workload)
    worse = worse_than(results, objective)
    if as_json:
        print_json(
            {
                "rows": [{"phantom": name, "model": size, "tokens_per_second": rates} for name, size, rates in rows],
                "worse": [{"phantom": r.phantom, "seed": r.seed, "than": p, "by": by} for r, p, by in worse],
            }
        )
        return
    shown = Table(box=None, pad_edge=False)
    for heading in ("NETWORK", "MODEL", *(column.upper() for column in COLUMNS)):
        shown.add_column(heading, justify="left" if heading in {"NETWORK", "MODEL"} else "right")
    for name, size, rates in rows:
        best = max((rate for column, rate in rates.items() if rate and column != "optimum"), default=0.0)
        cells = (_cell(rate, best, column) for column, rate in rates.items())
        shown.add_row(name, size, *cells)
    out.print(shown)
    what = f"{concurrency} conversations at once" if objective == "throughput" else "one conversation"
    out.print(
        Text(
            f"Tokens per second of {what}, reading a prompt of {prompt} tokens included; medians of {seeds} networks "
            f"of each kind, true speeds, measurements off by up to {noise:.0%}. –: no placement.",
            style="dim",
        )
    )
    most = max((by for _, _, by in worse), default=0.0)
    verdict = f"in {len(worse)} cases, by {most:.1%} at most" if worse else "never"
    out.print(Text(f"Ours is worse than memory, even or flops: {verdict}, of {len(results)} networks and models."))
    for name, (mean, worst) in against_best(results, objective).items():
        out.print(Text(f"{name}: {mean:.3f} times the seconds of the best of them each time, {worst:.3f} at worst."))


def _cell(rate: float | None, best: float, column: str) -> Text:
    style = "bold" if rate and column != "optimum" and rate >= best * (1 - 1e-9) else ""
    return Text("–" if rate is None else f"{rate:.3g}", style=style)


def _known(name: str, among: object, what: str) -> str:
    assert isinstance(among, dict)
    if name not in among:
        raise BadInput(f"no made-up {what} is called {name!r}", expected=f"one of {', '.join(among)}")
    return name
