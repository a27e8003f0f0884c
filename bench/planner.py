"""How long a plan takes, and what it costs a mesh to know what a plan needs.

    python -m bench.planner [--repeats 5] [--meshes 10 30 100] [--minutes 2]

Two parts.

**Planning** is pure arithmetic in one thread: CPU time of this process, so that a busy machine does not count.
What limits it: the rows of the cut programme (one per stage and move, as long as the model has layers), and
where prompts have several chunks, the caps under which the search is repeated. Machines and links are
phantoms (`meshinfer.testing.phantoms`), another seed for each repeat; the topology is made anew each time, so
nothing is remembered from the last. Everything of a preview is in the time: pipelines, tensor and hybrid
candidates, the nodes that are declined, refusals, reasons, the topology's digest.

**Measuring**: whole meshes of real agents' code (membership, gossip, link probes) on virtual time and a
simulated network. Bytes are counted where they are sent or received. A thousand agents do not run in one
process in reasonable time: their figures are what the line through the smaller meshes gives (per node published:
flat; received: one announcement per node and period, which grows with the mesh), and are marked so.

Last line: the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import trio
from trio.testing import MockClock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "sim"))

from mesh_room import Room

from meshinfer.planning.planner import plan
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.testing.network import SimNetwork
from meshinfer.testing.phantoms import FAST, MIDDLING, SLOW, WIFI, WIRE, Phantom, PhantomNode, dense_model, forty_sites
from meshinfer.testing.probes import SimProbes
from meshinfer.topology.graph import Topology
from meshinfer.topology.speed import LinkSpeed

GIB = 1024**3
CHAT = Workload(context_tokens=4096, concurrency=1)
HOUSE = Workload(context_tokens=8192, concurrency=4, prompt_tokens=4096, objective="throughput")
CONVERGE_SECONDS = 60.0


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


def measuring(count: int, minutes: float) -> dict[str, Any]:
    """What `count` agents send while they settle, and in each minute afterwards."""

    async def run() -> dict[str, Any]:
        rng = Random(count)
        network = SimNetwork(rng)
        wire = LinkSpeed(2e-4, 100e6, 5e-5)
        probes = SimProbes(lambda _source, _target, _host: wire, rng)
        with tempfile.TemporaryDirectory() as home:
            async with trio.open_nursery() as nursery:
                room = Room(network, nursery, Path(home), probes)
                begun = trio.current_time()
                for index in range(count):
                    await room.start(f"n{index:04}", addresses=(f"10.0.{index // 250}.{index % 250 + 1}:4001",))
                everyone = set(room.meshes)
                converged = await room.wait(lambda: room.all_see(everyone), CONVERGE_SECONDS)
                begun, counted = trio.current_time(), _counted(room, probes)
                await trio.sleep(60 * minutes)
                elapsed, after = trio.current_time() - begun, _counted(room, probes)
                nursery.cancel_scope.cancel()
        per_second = {name: (after[name] - counted[name]) / elapsed / count for name in after}
        return {"nodes": count, "converged_seconds": round(converged, 2)} | {
            f"{name}_per_node_and_second": round(value, 1) for name, value in per_second.items()
        }

    before = time.monotonic()
    result: dict[str, Any] = trio.run(run, clock=MockClock(autojump_threshold=0))
    return result | {"took_seconds": round(time.monotonic() - before, 1)}


def _counted(room: Room, probes: SimProbes) -> dict[str, float]:
    told = [transport.statistics() for transport in room.transports.values()]
    sent = sum(each.gossip_bytes_sent for each in told)
    messages = sum(each.gossip_sent for each in told)
    return {
        "published_bytes": sent,
        "received_bytes": sum(each.gossip_received for each in told) * sent / max(1, messages),
        "calls": sum(each.calls_sent for each in told),
        "probe_bytes": sum(door.spent_bytes for door in probes.doors.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--meshes", type=int, nargs="*", default=[10, 30, 100])
    parser.add_argument("--minutes", type=float, default=2.0, help="of virtual time, after all agents see each other")
    options = parser.parse_args()

    print(__doc__.split("\n\n")[0])
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

    print("\nMeasuring: per node and second, in the steady state\n")
    print(f"{'nodes':>6} {'converged':>10} {'published':>10} {'received':>10} {'probes':>9} {'calls':>6}")
    meshes = [measuring(count, options.minutes) for count in options.meshes]
    for each in meshes:
        _print_mesh(each, "")
    if len(meshes) >= 2:
        meshes.append(_extrapolated(meshes, 1000))
        _print_mesh(meshes[-1], "  (from the line through the others)")
    print()
    print(json.dumps({"planning": planning, "measuring": meshes}))


def _extrapolated(meshes: list[dict[str, Any]], count: int) -> dict[str, Any]:
    one, other = meshes[-2], meshes[-1]
    told: dict[str, Any] = {"nodes": count, "extrapolated": True}
    for name in one:
        if name.endswith("_per_node_and_second"):
            slope = (other[name] - one[name]) / (other["nodes"] - one["nodes"])
            told[name] = round(other[name] + slope * (count - other["nodes"]), 1)
    return told


def _print_mesh(told: dict[str, Any], note: str) -> None:
    converged = f"{told['converged_seconds']:.2f} s" if "converged_seconds" in told else "–"
    parts = [
        told[f"{name}_per_node_and_second"] for name in ("published_bytes", "received_bytes", "probe_bytes", "calls")
    ]
    print(f"{told['nodes']:>6} {converged:>10} {parts[0]:>8.0f} B {parts[1]:>8.0f} B {parts[2]:>7.0f} B {parts[3]:>6.1f}"
          f"{note}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
