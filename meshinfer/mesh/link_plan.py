"""Which path to probe when. Pure: the driver says what it knows of an edge, and is told the next probe, if one is due.

Round trips are cheap (45 KiB) and come first: every path of every edge is tried within seconds of its appearing,
so that a planner has numbers. Bursts cost megabytes and disturb what they measure, so they are made

- only while no runner works at either end,
- only where neither a burst nor a real frame has told the bandwidth for ten minutes (real frames are the better
  measurement: they are what is predicted),
- sooner once, if the last sample disagrees with the rest,
- and on the byte budget of both ends.

Of each pair the node with the lower id probes and decides, both directions in one go. If its probes find no way (a
firewall that lets only the other one dial), the other node tries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from meshinfer.mesh.addresses import nearness
from meshinfer.mesh.link_estimate import Path
from meshinfer.topology.card import NodeCard
from meshinfer.transport.addresses import format_address

ROUND_TRIPS_SECONDS = 120.0
"""Between round-trip probes of the path in use. Halving it doubles their 1.4 MB an hour for each link."""
OTHERS_SECONDS = 300.0
"""… of another path that works: how late a better one that nobody announced is noticed."""
LOST_SECONDS = 30.0
"""… of one that does not: a cable that is plugged in again. A probe that finds nothing waits up to 2 s in a thread."""
BURSTS_SECONDS = 600.0
"""Between bursts of the path in use, unless real frames told its bandwidth meanwhile."""
EARLY_BURSTS_SECONDS = {1: 20.0, 2: 60.0}
"""… after the first and the second: they fall into the start of an agent or a whole room, when every machine is busy
(10 Mbit/s were seen where 40 are true), and would stand for ten minutes."""
OTHERS_BURSTS_SECONDS = 3600.0
DOUBT_SECONDS = 10.0
"""After a sample that disagrees with the rest, another is taken; twice as late each time that settles nothing."""
MAX_PATHS = 4
"""Of one edge. A laptop has a cable, a Wi-Fi, and perhaps a Thunderbolt bridge or a virtual network."""

Kind = Literal["round trips", "bursts"]


@dataclass(frozen=True, slots=True)
class Job:
    """One probe to make."""

    host: str
    kind: Kind


def candidate_hosts(addresses: Iterable[str], connected_host: str | None, own_addresses: Iterable[str]) -> list[str]:
    """Where the other end may be reached: the likeliest first, IPv4 only since runners listen on nothing else.

    The host of the live connection is one of them whatever the card says: it is known to work.
    """
    own = tuple(own_addresses)
    hosts = dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in addresses)
    known = [connected_host] if connected_host else []
    near = sorted(hosts, key=lambda host: nearness(format_address(host, 1), own))
    reachable = (host for host in near if nearness(format_address(host, 1), own)[0] < 2)
    return [host for host in dict.fromkeys([*known, *reachable]) if ":" not in host][:MAX_PATHS]


def is_idle(card: NodeCard) -> bool:
    """No runner of the node works: nothing of what it sends or computes would be disturbed, or disturb."""
    return all(seat.sessions == 0 and seat.state != "linking" and not seat.loads for seat in card.seats)


def next_job(paths: Mapping[str, Path], chosen: str | None, now: float, *, may_burst: bool) -> Job | None:
    """The most urgent probe of one edge that is due at `now`.

    Args:
        paths: by host of the other end, candidates only; the likeliest first.
        chosen: the path in use; None before the first.
        now: the clock of their times.
        may_burst: both ends are idle, and the budget is not used up.
    """
    for host, path in paths.items():
        if path.tried_at is None:
            return Job(host, "round trips")
    for host, path in paths.items():
        assert path.tried_at is not None
        if not path.works:
            # Once failed is tried again soon; for good failed, now and then.
            wait = LOST_SECONDS if path.failures > 1 else 1.0
        else:
            wait = ROUND_TRIPS_SECONDS if host == chosen else OTHERS_SECONDS
            if path.rtt.in_doubt:
                wait = min(wait, DOUBT_SECONDS * 2 ** (path.rtt_doubts - 1))
        if now - path.tried_at >= wait:
            return Job(host, "round trips")
    if not may_burst:
        return None
    in_order = sorted(paths.items(), key=lambda item: (item[1].bulk_at is not None, item[0] != chosen))
    for host, path in in_order:
        wait = BURSTS_SECONDS if host == chosen else OTHERS_BURSTS_SECONDS
        if host == chosen:
            samples = max(path.bandwidth_out.samples, path.bandwidth_in.samples)
            wait = EARLY_BURSTS_SECONDS.get(samples, wait)
        if path.in_doubt:
            wait = min(wait, DOUBT_SECONDS * 2**path.doubts)
        if path.works and (path.bulk_at is None or now - path.bulk_at >= wait):
            return Job(host, "bursts")
    return None
