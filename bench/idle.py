"""What an idle agent costs: CPU, memory, file descriptors, threads and bytes on the wire, over some minutes.

    python bench/idle.py [--seconds 60] [--nodes 3] [--seats 3]

An agent that serves nobody still pings (one small call crosses each pair of neighbours every half second, so that a
closed lid is in doubt within one), says every four seconds that it is there, and looks whether its own loop runs. What
limits it is Python: each small message through call, Yamux, Noise and trio takes 0.15 to 0.3 ms at each end.

Predicted, per agent with n neighbours and second: 2n ping messages out or in and as many answers, n/4 announcements in,
each from up to four neighbours (3 ms, the library's part is most of it), a dozen timers. For n = 4: 4 + 3 + 3 ms, 1 % of
a core. A runner that has nothing to do beats four times a second.
Memory is read after a warm-up and again at the end; its slope is told per hour, and means little under ten minutes.

Last line: the result as JSON. Nothing here is a gate: see docs/log for what was measured when.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

from mesh import MODEL, room

from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore

LAYERS = 30
"""Of the small model; a multiple of each --seats."""
WARM_UP_SECONDS = 60.0
"""Imports, first gossip, the first bursts over each link (their buffers stay in the heap): not what idling costs."""
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


@dataclass(frozen=True)
class Sample:
    """One agent at one moment."""

    at: float
    cpu_seconds: float
    runner_cpu_seconds: float
    """Of its runners, the spare one among them."""
    rss_bytes: int
    file_descriptors: int
    threads: int
    wire_bytes: int | None
    """Sent over TCP by its connections that are open now; None where that cannot be asked (no `ss`)."""


@dataclass(frozen=True)
class Idle:
    """One agent over the whole time."""

    name: str
    cpu_percent_of_core: float
    runner_percent_of_core: float
    rss_mib: float
    rss_mib_per_hour: float
    file_descriptors: int
    file_descriptors_grown: int
    threads: int
    threads_grown: int
    wire_bytes_per_second: float | None


def sample(pid: int) -> Sample:
    process = psutil.Process(pid)
    runners = [child.cpu_times() for child in process.children()]
    with process.oneshot():
        cpu = process.cpu_times()
        return Sample(
            time.monotonic(),
            cpu.user + cpu.system,
            sum(used.user + used.system for used in runners),
            process.memory_info().rss,
            process.num_fds(),
            process.num_threads(),
            wire_bytes(pid),
        )


def wire_bytes(pid: int) -> int | None:
    if shutil.which("ss") is None:
        return None
    listing = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=False).stdout
    total = 0
    for line in listing.splitlines():
        if f"pid={pid}," in line:
            total += sum(int(word[11:]) for word in line.split() if word.startswith("bytes_sent:"))
    return total


def compare(name: str, first: Sample, last: Sample) -> Idle:
    seconds = last.at - first.at
    wire = None
    if first.wire_bytes is not None and last.wire_bytes is not None:
        wire = round((last.wire_bytes - first.wire_bytes) / seconds, 1)
    return Idle(
        name,
        cpu_percent_of_core=round(100 * (last.cpu_seconds - first.cpu_seconds) / seconds, 2),
        runner_percent_of_core=round(100 * (last.runner_cpu_seconds - first.runner_cpu_seconds) / seconds, 2),
        rss_mib=round(last.rss_bytes / 2**20, 1),
        rss_mib_per_hour=round((last.rss_bytes - first.rss_bytes) / 2**20 * 3600 / seconds, 2),
        file_descriptors=last.file_descriptors,
        file_descriptors_grown=last.file_descriptors - first.file_descriptors,
        threads=last.threads,
        threads_grown=last.threads - first.threads,
        wire_bytes_per_second=wire,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=3, choices=range(1, len(NAMES) + 1))
    parser.add_argument("--warm-up", type=float, default=WARM_UP_SECONDS)
    parser.add_argument(
        "--seats",
        type=int,
        default=0,
        choices=(0, 1, 2, 3, 5),
        help="so many of them hold one of the small model; 0: none",
    )
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        store.mkdir()
        if chosen.seats:
            pull(MODEL, ModelStore(store), lambda _: None)
        names = NAMES[: chosen.nodes]
        with room(Path(directory), store, names) as here:
            pids = {name: here.agents[name].process.pid for name in names}
            print(f"{chosen.nodes} agents: {pids}; warm-up {chosen.warm_up:g} s, then {chosen.seconds:g} s", flush=True)
            if chosen.seats:
                here.place(names[0], chosen.seats, layers=dict.fromkeys(names[: chosen.seats], LAYERS // chosen.seats))
            time.sleep(chosen.warm_up)
            first = {name: sample(pid) for name, pid in pids.items()}
            psutil.cpu_percent(interval=None)
            time.sleep(chosen.seconds)
            load = psutil.cpu_percent(interval=None)
            for name, agent in here.agents.items():
                if agent.process.poll() is not None:
                    raise SystemExit(f"{name} has ended:\n{agent.log()[-3000:]}")
            results = [compare(name, first[name], sample(pid)) for name, pid in pids.items()]
    for result in results:
        wire = "?" if result.wire_bytes_per_second is None else f"{result.wire_bytes_per_second:.0f}"
        print(
            f"{result.name:8} {result.cpu_percent_of_core:5.2f} % of a core, runners {result.runner_percent_of_core:.2f} %, {result.rss_mib:.0f} MiB "
            f"({result.rss_mib_per_hour:+.1f} an hour), {result.file_descriptors} descriptors "
            f"({result.file_descriptors_grown:+d}), {result.threads} threads ({result.threads_grown:+d}), "
            f"{wire} bytes/s out"
        )
    print(
        json.dumps(
            {
                "bench": "idle",
                "seconds": chosen.seconds,
                "nodes": chosen.nodes,
                "machine_busy_percent": load,
                "agents": [asdict(result) for result in results],
            }
        )
    )


if __name__ == "__main__":
    main()
