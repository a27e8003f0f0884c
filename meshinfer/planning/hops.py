"""How long an empty message is under way between two nodes, in whole nanoseconds: latency and software.

Integers, of quantised measurements: sums are then the same in any order. The objective `fit` and repairs
order nodes by them; the objectives in time add what the bytes cost (`terms`).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshinfer.base.ids import NodeId
from meshinfer.planning.measured import link_rates
from meshinfer.topology.graph import Topology


def hop_nanoseconds(topology: Topology, source: NodeId, target: NodeId) -> int:
    """One way, `source` → `target`."""
    speed = link_rates(topology, source, target).speed
    return round((speed.latency_seconds + speed.message_seconds) * 1e9)


def cycle_hops(order: Sequence[NodeId]) -> tuple[tuple[NodeId, NodeId], ...]:
    """The hops of one token: from stage to stage, and from the last back to the head; none within a node."""
    ring = zip(order, (*order[1:], order[0]), strict=True)
    return tuple((source, target) for source, target in ring if source != target)
