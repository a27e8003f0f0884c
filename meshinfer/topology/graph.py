"""The topology: an immutable snapshot of live cards and their links, with a digest.

Equal inputs give equal digests on every node, so a plan can name exactly what it was computed
from. Nodes are sorted by id; measurements are quantised before they count (two significant
digits), so that noise in the fifth digit does not make another topology.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from meshinfer.base.ids import NodeId, digest_hex
from meshinfer.topology.card import NodeCard
from meshinfer.topology.coordinate import Coordinate, distance_seconds
from meshinfer.topology.link import Link


def quantise(value: float) -> float:
    """`value` to two significant digits."""
    return float(f"{value:.1e}")


def _to_milliseconds(seconds: float) -> int:
    """Coordinates move with every probe; what a far pair's estimate is good to is milliseconds at best."""
    return round(seconds * 1e3)


def _ends(place: Coordinate) -> tuple[float, float]:
    return place.height_seconds, place.adjustment_seconds


@dataclass(frozen=True)
class Topology:
    """Live nodes and the links among them."""

    nodes: tuple[NodeCard, ...]
    """Sorted by node id, one card a node."""
    links: tuple[Link, ...]
    """Sorted by (source, target); both ends are in `nodes`."""

    @classmethod
    def of(cls, cards: Iterable[NodeCard], links: Iterable[Link]) -> Topology:
        """Of several cards of one node the latest counts, of several links of one pair the freshest: input order never."""
        latest = {card.node_id: card for card in sorted(cards, key=lambda card: card.order)}
        nodes = tuple(sorted(latest.values(), key=lambda card: card.node_id))
        stalest_first = sorted(links, key=lambda link: (-link.age_seconds, link.rtt_seconds))
        freshest = {(link.source, link.target): link for link in stalest_first}
        kept = (link for (source, target), link in sorted(freshest.items()) if {source, target} <= latest.keys())
        return cls(nodes, tuple(link for link in kept if link.source != link.target))

    @cached_property
    def by_id(self) -> dict[NodeId, NodeCard]:
        return {card.node_id: card for card in self.nodes}

    def called(self, node: NodeId) -> str:
        """As people know it: by its name while it is in the mesh, else by the end of its id, which differs."""
        card = self.by_id.get(node)
        return card.name if card else f"…{node[-8:]}"

    @cached_property
    def link_between(self) -> dict[tuple[NodeId, NodeId], Link]:
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def blocked(self) -> frozenset[tuple[NodeId, NodeId]]:
        """Which node dialled which one's runners in vain. The other way round a channel may well open."""
        return frozenset((card.node_id, node) for card in self.nodes for node in card.blocked if node in self.by_id)

    @cached_property
    def _access(self) -> dict[NodeId, tuple[float, float]]:
        """Per node the best bandwidth measured from it and to it: what its own attachment is at least good for."""
        best: dict[NodeId, tuple[float, float]] = {}
        for link in self.links:
            rate = link.bandwidth_bytes_per_second
            out, into = best.get(link.source, (0.0, 0.0))
            best[link.source] = (max(out, rate), into)
            out, into = best.get(link.target, (0.0, 0.0))
            best[link.target] = (out, max(into, rate))
        return best

    def link_or_estimate(self, source: NodeId, target: NodeId) -> Link | None:
        """The measured link, or one estimated from the nodes' coordinates (it says so); None where neither is known.

        Estimated on demand: a thousand nodes have a million pairs, and a plan looks at a few of them.
        """
        link = self.link_between.get((source, target))
        if link is not None or source == target:
            return link
        places = [card.coordinate for node in (source, target) if (card := self.by_id.get(node)) and card.coordinate]
        if len(places) < 2:
            return None
        nothing = (0.0, 0.0)
        out, into = self._access.get(source, nothing)[0], self._access.get(target, nothing)[1]
        rtt_seconds = quantise(min(3600.0, distance_seconds(*places)))
        bandwidth = quantise(min(out, into))
        return Link(source, target, rtt_seconds, bandwidth_bytes_per_second=bandwidth, estimated=True)

    @cached_property
    def digest(self) -> str:
        """32 hex digits over what a plan depends on; not over names, progress or ages."""
        parts = [
            repr(
                (
                    card.node_id,
                    card.incarnation,
                    card.memory_usable_bytes,
                    card.memory_promised_bytes,
                    card.runner_overhead_bytes,
                    card.computes_float32,
                    card.takes_nothing,
                    card.blocked,
                    tuple((model.model_id, model.digest) for model in card.models),
                    tuple((seat.instance_id, seat.epoch, seat.seat_index, seat.state) for seat in card.seats),
                    tuple((each.kind, *map(quantise, astuple(each.speed))) for each in card.speeds),
                    card.slowdown,
                    card.coordinate
                    and tuple(map(_to_milliseconds, (*card.coordinate.position, *_ends(card.coordinate)))),
                )
            ).encode()
            for card in self.nodes
        ]
        # Two digits, as `quantise` has them; a mesh of a thousand has some thirty thousand links.
        parts += [
            f"{link.source} {link.target} {link.latency_seconds:.1e} {link.message_seconds:.1e} "
            f"{link.bandwidth_bytes_per_second:.1e} {link.loss:.1e}".encode()
            for link in self.links
        ]
        return digest_hex(*parts)

    def to_json(self) -> dict[str, Any]:
        """The shape of `GET /topology`: per node its memory, accelerator and outgoing links."""
        out: dict[str, Any] = {}
        for card in self.nodes:
            out[card.node_id] = {
                "name": card.name,
                "memory_bytes": card.memory_usable_bytes,
                "memory_total_bytes": card.memory_total_bytes,
                "memory_free_bytes": card.memory_free_bytes,
                "accelerator": card.accelerator,
                "addresses": list(card.addresses),
                "load": card.load,
                "leaving": card.takes_nothing,
                "warning": card.warning,
                "speeds": {told.kind: told.speed.to_json() for told in card.speeds},
                "links": {
                    link.target: {
                        "latency_us": round(link.rtt_seconds / 2 * 1e6, 1),
                        "bandwidth_gbps": round(link.bandwidth_bytes_per_second * 8 / 1e9, 9)
                        if link.bandwidth_bytes_per_second
                        else None,
                        "jitter_us": round(link.jitter_seconds * 1e6, 1),
                        "loss": link.loss,
                        "age_seconds": round(link.age_seconds, 1),
                        "channel_rtt_us": round(link.channel_rtt_seconds * 1e6, 1) or None,
                        "message_us": round(link.message_seconds * 1e6, 1) or None,
                        "estimated": link.estimated,
                        "degraded": link.degraded,
                        "blocked": link.target in card.blocked,
                    }
                    for link in self.links
                    if link.source == card.node_id
                },
            }
        return {"digest": self.digest, "nodes": out}
