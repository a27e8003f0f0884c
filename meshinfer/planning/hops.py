"""How long an activation is under way between two nodes: half the measured round trip, in whole nanoseconds.

Integers, and round trips quantised as in the topology's digest: sums are then the same in any order,
and noise in the third digit changes no plan. Bandwidth and the software cost of a message join in
with the whole cost model; a decode step's activation is a few kilobytes, so latency comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshinfer.base.ids import NodeId
from meshinfer.topology.graph import Topology, quantise

UNMEASURED_RTT_SECONDS = 0.15
"""For a pair that nobody has measured yet, as for a node that has just joined: an internet round trip (Petals'
value too), so that any measured LAN or Wi-Fi link wins against it and a plan is possible all the same."""


def is_measured(topology: Topology, source: NodeId, target: NodeId) -> bool:
    """Whether either end has measured this pair."""
    return (source, target) in topology.link_between or (target, source) in topology.link_between


def hop_nanoseconds(topology: Topology, source: NodeId, target: NodeId) -> int:
    """One way, `source` → `target`; by the other end's measurement if `source` has none."""
    link = topology.link_between.get((source, target)) or topology.link_between.get((target, source))
    rtt_seconds = quantise(link.rtt_seconds) if link else UNMEASURED_RTT_SECONDS
    return round(rtt_seconds * 1e9) // 2


def cycle_hops(order: Sequence[NodeId]) -> tuple[tuple[NodeId, NodeId], ...]:
    """The hops of one token: from stage to stage, and from the last back to the head; none within a node."""
    ring = zip(order, (*order[1:], order[0]), strict=True)
    return tuple((source, target) for source, target in ring if source != target)


def cycle_nanoseconds(topology: Topology, order: Sequence[NodeId]) -> int:
    """Link time of one token through `order`."""
    return sum(hop_nanoseconds(topology, source, target) for source, target in cycle_hops(order))
