"""What it costs a node that the mesh is large, and how soon all know of what one has done.

    python -m bench.gossip [--sizes 10 30] [--crowds 100 1000 --whole 10] [--settle 40] [--seconds 60]

Whole meshes of agents' own code (membership, gossip, link probes, coordinates, connections) on virtual time and a
simulated network: nodes of forty sites that start at once, each knowing one that started earlier.
Told per size:

    known      from the last start until each node has each other's card
    per node   bytes and messages received in each second of the steady state (as much is sent, on average), by kind
    changed    from one node's changed card until all hold it
    dead       from one node's kill -9 until nobody's topology has it

A thousand whole agents do not run in one process in reasonable time (a hundred did not in seven minutes of a busy
machine). So beyond `--sizes`, a few whole agents are put into a crowd that plays its part (`gossip_crowd`): they cost what
they would among a thousand of their kind, but nobody of the crowd reacts, so changes and deaths are timed in `--sizes`.

What limits it: every node holds every card, so a *change* must reach everyone, whatever is done: a mesh ten times as
large tells each node of ten times as many. Everything else should not grow: links (16 in a full mesh, 8 wanted beyond),
pings (one over each link and half second), announcements that only say "I am still here", repairs of what was lost.

Bytes are payloads: a real ping has some 150 bytes more around it (Yamux, Noise, TCP; bench/idle.py measures those), and
gossip comes 2 to 3 times (the overlay's degree is 3). Simulated agents share what checking an announcement gives, which
is a frozen value: a thousand agents would else decode a million.

Last line: the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import trio
from trio.testing import MockClock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "sim"))

from mesh_room import Room

from bench.gossip_crowd import Crowd, CrowdNetwork
from meshinfer.base.ids import NodeId
from meshinfer.mesh import announcement, gossip
from meshinfer.testing.network import GOSSIP, SimNetwork
from meshinfer.testing.phantoms import forty_sites
from meshinfer.testing.probes import SimProbes
from meshinfer.wire.messages import PING, PING_FOR_ME, PULL_VIEW, VIEW_DIGESTS

LOOK_SECONDS = 0.25
"""How finely convergence is told."""
HOMES = "/dev/shm" if Path("/dev/shm").is_dir() else None
PATIENCE_SECONDS = 120.0
LATENCY_SECONDS = 0.01
"""Of control messages, each way; what link probes measure is the phantom's truth."""


@dataclass(frozen=True)
class Counted:
    """What has arrived at all nodes together, so far."""

    gossip_bytes: int
    gossip_messages: int
    pull_bytes: int
    ping_bytes: int
    pings: int
    probe_bytes: int
    """Link probes: the calls that arrange them, and what crossed their channels."""

    @classmethod
    def now(cls, network: SimNetwork, probes: SimProbes, nodes: Collection[NodeId]) -> Counted:
        """At `nodes`."""

        def total(counts: dict[tuple[NodeId, str], int], *kinds: str) -> int:
            return sum(n for (node, kind), n in counts.items() if kind in kinds and node in nodes)

        calls = {kind for _, kind in network.received_bytes if kind.startswith("link")}
        # Each byte of a probe counts at both ends, one way or the other.
        spent = sum(door.spent_bytes for node, door in probes.doors.items() if node in nodes) // 2
        return cls(
            total(network.received_bytes, GOSSIP),
            total(network.received_messages, GOSSIP),
            total(network.received_bytes, PULL_VIEW, VIEW_DIGESTS),
            total(network.received_bytes, PING, PING_FOR_ME),
            total(network.received_messages, PING, PING_FOR_ME),
            total(network.received_bytes, *calls) + spent,
        )

    def rates(self, later: Counted, seconds: float, nodes: int) -> dict[str, float]:
        """Per node and second until `later`."""
        return {
            name: round((getattr(later, name) - getattr(self, name)) / seconds / nodes, 2)
            for name in self.__dataclass_fields__
        }


async def _steady_cost(
    network: SimNetwork, probes: SimProbes, nodes: Collection[NodeId], settle_seconds: float, seconds: float
) -> dict[str, Any]:
    """Of each of `nodes`, who know all by now: what that took, and what `seconds` cost after `settle_seconds`."""
    joined = Counted.now(network, probes, nodes)
    await trio.sleep(settle_seconds)
    begun, before = trio.current_time(), Counted.now(network, probes, nodes)
    await trio.sleep(seconds)
    elapsed, after = trio.current_time() - begun, Counted.now(network, probes, nodes)
    links = sorted(len(network.neighbours(node)) for node in nodes)
    return {
        "links_median": links[len(links) // 2],
        "links_most": links[-1],
        "joining_bytes": (joined.gossip_bytes + joined.pull_bytes) // len(nodes),
        "per_node_and_second": before.rates(after, elapsed, len(nodes)),
    }


def simulate(count: int, settle_seconds: float, seconds: float) -> dict[str, Any]:
    rng = Random(count)
    phantom = forty_sites(rng, count)
    network = SimNetwork(rng, LATENCY_SECONDS)
    probes = SimProbes(lambda source, target, _host: phantom.link(source, target), rng)
    names = sorted(phantom.by_id)

    async def run(home: Path) -> dict[str, Any]:
        async with trio.open_nursery() as nursery:
            room = Room(network, nursery, home, probes)
            for name in names:
                earlier = [room.transports[rng.choice(sorted(room.transports))]] if room.transports else []
                await room.start(name, seeds=tuple(address for each in earlier for address in each.addresses()))
            known = await _until(room, lambda node: len(room.meshes[node].topology().nodes) == count)
            cost = await _steady_cost(network, probes, names, settle_seconds, seconds)

            changing, dying = rng.sample(names, 2)
            room.cards[NodeId(changing)].update(memory_usable_bytes=1)
            changed = await _until(
                room, lambda node: room.meshes[node].topology().by_id[NodeId(changing)].memory_usable_bytes == 1
            )
            network.kill(NodeId(dying))
            dead = await _until(room, lambda node: NodeId(dying) not in room.meshes[node].topology().by_id)
            nursery.cancel_scope.cancel()
        assert network.failures == []
        return {
            "nodes": count,
            "known_seconds": round(known, 2),
            "changed_seconds": round(changed, 2),
            "dead_seconds": round(dead, 2),
            **cost,
        }

    return _timed(run, seconds)


def in_a_crowd(count: int, whole: int, settle_seconds: float, seconds: float) -> dict[str, Any]:
    """`whole` agents among `count` nodes, of which the others only play their part."""
    rng = Random(count)
    phantom = forty_sites(rng, count)
    network = CrowdNetwork(rng, LATENCY_SECONDS)
    probes = SimProbes(lambda source, target, _host: phantom.link(source, target), rng)
    names = sorted(phantom.by_id)
    chosen = sorted(rng.sample(names, whole))
    network.whole = set(chosen)

    async def run(home: Path) -> dict[str, Any]:
        async with trio.open_nursery() as nursery:
            crowd = Crowd(network, phantom, [name for name in names if name not in network.whole], probes)
            await nursery.start(crowd.run)
            room = Room(network, nursery, home, probes)
            for name in chosen:
                contact = crowd.transports[rng.choice(sorted(crowd.transports))]
                await room.start(name, seeds=contact.addresses())
            known = await _until(room, lambda node: len(room.meshes[node].topology().nodes) == count)
            cost = await _steady_cost(network, probes, chosen, settle_seconds, seconds)
            assert all(len(mesh.topology().nodes) == count for mesh in room.meshes.values())
            nursery.cancel_scope.cancel()
        assert network.failures == []
        return {
            "nodes": count,
            "whole": whole,
            "known_seconds": round(known, 2),
            **cost,
        }

    return _timed(run, seconds)


def _timed(run: Callable[[Path], Awaitable[dict[str, Any]]], seconds: float) -> dict[str, Any]:
    before = time.process_time()
    with tempfile.TemporaryDirectory(dir=HOMES) as home:
        result: dict[str, Any] = trio.run(run, Path(home), clock=MockClock(autojump_threshold=0))
    return result | {"virtual_seconds": seconds, "cpu_seconds": round(time.process_time() - before, 1)}


async def _until(room: Room, is_so: Callable[[NodeId], bool]) -> float:
    """Until it is so at every node that runs; how long that took."""
    begun, waiting = trio.current_time(), set(room.meshes)
    while waiting := {node for node in waiting & room.meshes.keys() if not is_so(node)}:
        if trio.current_time() - begun > PATIENCE_SECONDS:
            raise SystemExit(f"{len(waiting)} of {len(room.meshes)} nodes do not know after {PATIENCE_SECONDS:g} s")
        await trio.sleep(LOOK_SECONDS)
    return trio.current_time() - begun


def share_what_is_checked() -> None:
    """What checking an announcement gives, a frozen value, is remembered for all simulated agents together."""
    checked: dict[bytes, announcement.Heard] = {}

    def check(signed: announcement.SignedAnnouncement, verify: announcement.Verify) -> announcement.Heard:
        known = checked.get(signed.signature)
        if known is None or known.signed != signed:
            if len(checked) > 20_000:
                checked.clear()
            known = checked[signed.signature] = announcement.check(signed, verify)
        return known

    gossip.check = check


def _print_row(told: dict[str, Any]) -> None:
    per = told["per_node_and_second"]
    seconds = [
        f"{told[name]:.2f} s" if name in told else "–" for name in ("known_seconds", "changed_seconds", "dead_seconds")
    ]
    links = f"{told['links_median']} to {told['links_most']}"
    print(
        f"{told['nodes']:>6} {seconds[0]:>8} {seconds[1]:>8} {seconds[2]:>8} {links:>9} "
        f"{per['gossip_bytes']:>9.0f} B ({per['gossip_messages']:>6.1f}) {per['pull_bytes']:>7.0f} B "
        f"{per['ping_bytes']:>6.0f} B ({per['pings']:>5.1f}) {per['probe_bytes']:>7.0f} B {told['joining_bytes']:>8} B "
        f"{told['cpu_seconds']:>6.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10, 30])
    parser.add_argument("--crowds", type=int, nargs="*", default=[100, 300, 1000], help="nodes, few of them whole")
    parser.add_argument("--whole", type=int, default=10, help="of a crowd: whole agents")
    parser.add_argument("--settle", type=float, default=40.0, help="virtual seconds between joining and counting")
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual seconds of counting")
    options = parser.parse_args()
    share_what_is_checked()
    print((__doc__ or "").split("\n\n")[0])
    print("\nBytes and messages are those that one node receives in one second.\n")
    print(
        f"{'nodes':>6} {'known':>8} {'changed':>8} {'dead':>8} {'links':>9} {'gossip':>20} {'repair':>9} "
        f"{'pings':>16} {'probes':>9} {'joining':>10} {'CPU':>8}"
    )
    results: list[dict[str, Any]] = []
    for count in options.sizes:
        results.append(simulate(count, options.settle, options.seconds))
        _print_row(results[-1])
    if options.crowds:
        print(f"\nOf so many nodes {options.whole} are whole agents and are counted; the others play their part:")
    for count in options.crowds:
        results.append(in_a_crowd(count, options.whole, options.settle, options.seconds))
        _print_row(results[-1])
    print()
    print(json.dumps({"bench": "gossip", "meshes": results}))


if __name__ == "__main__":
    main()
