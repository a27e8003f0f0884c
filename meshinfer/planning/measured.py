"""The measurements that a plan is made of, quantised; and what is taken where there is none.

No chip is looked up. A node or a link that nobody has measured yet gets a stated default, so slow that
anything measured is preferred to it, and the preview says which numbers are assumed. All numbers are
rounded to two significant digits before they count, as in the topology's digest: noise in the third
digit changes no plan, and every node plans with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from meshinfer.base.ids import NodeId
from meshinfer.planning.model_card import ModelCard
from meshinfer.topology.card import NodeCard
from meshinfer.topology.graph import Topology, quantise
from meshinfer.topology.link import Link
from meshinfer.topology.speed import LEAST_RATE, LinkSpeed, NodeSpeed, engine_kind

UNMEASURED_NODE = NodeSpeed(
    stream_bytes_per_second=2e9,
    flops_per_second=2e10,
    step_overhead_seconds=5e-3,
    sampling_seconds=1e-3,
    layer_overhead_seconds=2e-4,
)
"""One core of an old laptop: what a single thread streams of 4-bit weights, and a tenth of what it multiplies."""
UNMEASURED_RTT_SECONDS = 0.15
"""For a pair that nobody has measured yet, as for a node that has just joined: an internet round trip (Petals'
value too), so that any measured LAN or Wi-Fi link wins against it and a plan is possible all the same."""
UNMEASURED_BANDWIDTH = 5e6
"""Bytes per second: a crowded Wi-Fi."""
UNMEASURED_DISK = 3e8
"""Bytes per second that a node's disk takes and gives: a SATA SSD, or a laptop's NVMe that others use as well. No node
measures its own: a file just written is read back from memory, and one that is not would cost gigabytes of writing."""
RETRANSMIT_SECONDS = 0.2
"""What a lost packet costs at least: the shortest wait of TCP on Linux."""
WITHIN_A_NODE = LinkSpeed(25e-6, 1e9, 25e-6)
"""Two seats of one node: measured on loopback, half the 0.05 ms of a 4 KB frame and its acknowledgement each."""


@dataclass(frozen=True, slots=True)
class NodeRates:
    """How fast a node is with one model."""

    layers: NodeSpeed
    head: NodeSpeed
    """With the output weights, which may be of another kind."""
    assumed: str = ""
    """What of it nobody has measured; empty if all of it was."""


def node_rates(node: NodeCard, card: ModelCard) -> NodeRates:
    """Of `node` with the kinds of weights of `card`."""
    measured = {each.kind: each.speed for each in node.speeds}
    if not measured:
        return NodeRates(UNMEASURED_NODE, UNMEASURED_NODE, "its speed: nobody has measured it yet")
    kinds = [
        engine_kind(kind, node.computes_float32) for kind in (card.weight_kind, card.head_kind or card.weight_kind)
    ]
    slowest = _slowest(measured.values())
    missing = [kind or "unknown weights" for kind in dict.fromkeys(kinds) if kind not in measured]
    # A probe measures the machine for itself.
    layers, head = (_rounded(measured.get(kind, slowest), node.slowdown) for kind in kinds)
    assumed = f"its speed with {' and '.join(missing)}: that of its slowest measured kind" if missing else ""
    return NodeRates(layers, head, assumed)


def _slowest(speeds: Iterable[NodeSpeed]) -> NodeSpeed:
    columns = list(zip(*(astuple(speed) for speed in speeds), strict=True))
    stream, flops, step, sampling, layer, cache, row, whole = columns
    # Of the last two, none at all is quickest.
    row, whole = (min((rate for rate in column if rate), default=0.0) for column in (row, whole))
    return NodeSpeed(min(stream), min(flops), max(step), max(sampling), max(layer), min(cache), row, whole)


def _rounded(speed: NodeSpeed, slowdown: float) -> NodeSpeed:
    return NodeSpeed(
        quantise(speed.stream_bytes_per_second) / slowdown,
        quantise(speed.flops_per_second) / slowdown,
        quantise(speed.step_overhead_seconds) * slowdown,
        quantise(speed.sampling_seconds) * slowdown,
        quantise(speed.layer_overhead_seconds) * slowdown,
        _quantised_if_any(speed.cache_bytes_per_second) / slowdown,
        _quantised_if_any(speed.row_bytes_per_second) / slowdown,
        _quantised_if_any(speed.pass_bytes_per_second) / slowdown,
    )


def _quantised_if_any(rate: float) -> float:
    """Of a rate that may be 0 for none. What no other rate may be is none, too: dividing by it overflows."""
    return quantise(rate) if rate >= LEAST_RATE else 0.0


@dataclass(frozen=True, slots=True)
class LinkRates:
    """How fast a link is."""

    speed: LinkSpeed
    assumed: str = ""
    """What of it nobody has measured; empty if all of it was."""


def link_rates(topology: Topology, source: NodeId, target: NodeId) -> LinkRates:
    """Of the link `source` → `target`; by the other end's measurement if `source` has none."""
    if source == target:
        return LinkRates(WITHIN_A_NODE)
    link, assumed = topology.link_between.get((source, target)), ""
    if link is None and (link := topology.link_between.get((target, source))):
        assumed = "measured in the other direction only"
    if link is None and (link := topology.link_or_estimate(source, target)):
        assumed = "estimated from where both nodes are, not measured"
    if link is None:
        latency = UNMEASURED_RTT_SECONDS / 2
        return LinkRates(LinkSpeed(latency, UNMEASURED_BANDWIDTH), "nobody has measured it yet")
    speed = link.speed
    if speed is None:
        speed = LinkSpeed(link.latency_seconds, UNMEASURED_BANDWIDTH, link.message_seconds)
        assumed = assumed or "its bandwidth: nobody has measured it yet"
    return LinkRates(_with_loss(link, speed), assumed)


def _with_loss(link: Link, speed: LinkSpeed) -> LinkSpeed:
    loss = quantise(link.loss)
    return LinkSpeed(
        quantise(speed.latency_seconds) + loss * RETRANSMIT_SECONDS,
        max(1e-3, quantise(speed.bandwidth_bytes_per_second) * (1 - loss)),
        quantise(speed.message_seconds),
    )
