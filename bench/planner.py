"""How long a plan takes, and how that grows with nodes and layers.

    python -m bench.planner [--repeats 5]

Planning is pure arithmetic in one thread: CPU time of this process, so that a busy machine counts little.
Machines and links are phantoms (`meshinfer.testing.phantoms`), another seed for each repeat; the topology is
made anew each time, so nothing is remembered from the last. Everything of a preview is in the time: pipelines,
tensor and hybrid candidates, the nodes that are declined, refusals, reasons, the topology's digest.
What it costs a mesh to know what a plan needs is `bench.gossip`.

Last line: the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from meshinfer.planning.planner import plan
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing.phantoms import FAST, MIDDLING, SLOW, WIFI, WIRE, Phantom, PhantomNode, dense_model, forty_sites
from meshinfer.topology.graph import Topology

GIB = 1024**3
CHAT = Workload(context_tokens=4096, concurrency=1)
HOUSE = Workload(context_tokens=8192, concurrency=4, prompt_tokens=4096, objective="throughput")


def one_room(rng: Random, count: int) -> Phantom:
    """Unlike machines on one network, all links measured."""
    nodes = [
        PhantomNode(
            f"node{index:03}", rng.choice((FAST, MIDDLING, SLOW)), rng.choice((8, 16, 24)) * GIB, "room",
            rng.choice((WIRE, WIFI)),
        )
        for index in range(count)
    ]  # fmt: skip
    return Phantom(f"{count} in a room", tuple(nodes))


def planning_times(make: Callable[[Random], Phantom], layers: int, workload: Workload, repeats: int) -> dict[str, Any]:
    card = dense_model(layers=layers).card
    seconds: list[float] = []
    stages: list[int] = []
    for seed in range(repeats):
        topology = make(Random(seed)).topology
        fresh = Topology.of(topology.nodes, topology.links)
        before = time.process_time()
        preview = plan(fresh, card, workload, Constraints())
        seconds.append(time.process_time() - before)
        stages.append(len(preview.plans[0].memory) if preview.plans else 0)
    return {
        "median_ms": round(median(seconds) * 1e3, 1),
        "least_ms": round(min(seconds) * 1e3, 1),
        "most_ms": round(max(seconds) * 1e3, 1),
        "stages": stages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    print((__doc__ or "").split("\n\n")[0])
    print(f"\nPlanning: CPU ms of one core ({platform.processor() or platform.machine()}, Python "
          f"{platform.python_version()}), median [least to most] of {options.repeats}\n")  # fmt: skip
    print(f"{'nodes':>22} {'layers':>6}  {'a chat':>24}  {'a full house, long prompts':>28}")
    planning: list[dict[str, Any]] = []
    cases: list[tuple[str, Callable[[Random], Phantom], int]] = [
        *((f"{n}", lambda rng, n=n: one_room(rng, n), 80) for n in (2, 4, 8, 16, 32, 40)),
        *((f"{n} in 40 sites", lambda rng, n=n: forty_sites(rng, n), 80) for n in (250, 500, 1000)),
        *(("32", lambda rng: one_room(rng, 32), layers) for layers in (40, 160)),
    ]
    for name, make, layers in cases:
        row: dict[str, Any] = {"nodes": name, "layers": layers}
        cells: list[str] = []
        for label, workload in (("chat", CHAT), ("house", HOUSE)):
            told = planning_times(make, layers, workload, options.repeats)
            row[label] = told
            cells.append(f"{told['median_ms']:8.1f} [{told['least_ms']:.1f} to {told['most_ms']:.1f}]")
        planning.append(row)
        print(f"{name:>22} {layers:>6}  {cells[0]:>24}  {cells[1]:>28}", flush=True)

    print()
    print(json.dumps({"planning": planning}))


if __name__ == "__main__":
    main()
