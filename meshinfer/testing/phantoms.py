"""Made-up true networks for planners and simulations: who is there, how fast, how far away.

A phantom is the truth that measurements only approach: `speeds` and `link` are exact, `topology` is
what the nodes would have published of it (without noise, unless `measured` is asked for some). All
phantoms are one model: each node is attached to a site by a link with a latency and two rates, up
and down; sites are joined by trunks; a cable between two nodes beats the way through their sites.

    node ── attachment ── site ══ trunk ══ site ── attachment ── node
      └───────────────────── cable ─────────────────────┘

Chance comes in by the door: the same seed, the same phantom. After serf's `phantom.go`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from random import Random

from meshinfer.base.ids import NodeId
from meshinfer.base.units import GIB
from meshinfer.planning.cost import ModelWork
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes
from meshinfer.planning.work import model_work
from meshinfer.testing.cards import model_card, node_card
from meshinfer.topology.card import KindSpeed
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import CHANNEL_PROBE_BYTES, Link, off_the_wire
from meshinfer.topology.speed import LinkSpeed, NodeSpeed

SOFTWARE_SECONDS = 50e-6
"""Of a message over our TLS channel on loopback, both ends: 0.05 ms p50 for a 4 KB frame and its acknowledgement."""
WEIGHT_KIND = "q4g64"
FULL_MESH_NODES = 16
"""Up to here every pair is measured; beyond, each node measures its own site and a few others."""
FAR_LINKS = 8


@dataclass(frozen=True, slots=True)
class Attachment:
    """How a node hangs on its site's network."""

    latency_seconds: float
    up_bytes_per_second: float
    down_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class PhantomNode:
    name: str
    speed: NodeSpeed
    free_bytes: int
    site: str
    attachment: Attachment


@dataclass(frozen=True)
class Phantom:
    """A true network."""

    title: str
    nodes: tuple[PhantomNode, ...]
    trunks: Mapping[frozenset[str], LinkSpeed] = field(default_factory=dict[frozenset[str], LinkSpeed])
    """Between two sites, either way."""
    far: LinkSpeed = field(default_factory=lambda: LinkSpeed(0.02, 2e6))
    """Between sites without a trunk of their own: the internet."""
    cables: Mapping[frozenset[NodeId], LinkSpeed] = field(default_factory=dict[frozenset[NodeId], LinkSpeed])
    """Between two nodes, either way."""

    @cached_property
    def by_id(self) -> dict[NodeId, PhantomNode]:
        return {NodeId(node.name): node for node in self.nodes}

    @property
    def speeds(self) -> dict[NodeId, NodeSpeed]:
        return {node_id: node.speed for node_id, node in self.by_id.items()}

    def link(self, source: NodeId, target: NodeId) -> LinkSpeed:
        """The truth about one direction of one pair; symmetric but for up and down rates."""
        cable = self.cables.get(frozenset((source, target)))
        if cable:
            return cable
        here, there = self.by_id[source], self.by_id[target]
        latency = here.attachment.latency_seconds + there.attachment.latency_seconds
        rate = min(here.attachment.up_bytes_per_second, there.attachment.down_bytes_per_second)
        if here.site != there.site:
            trunk = self.trunks.get(frozenset((here.site, there.site)), self.far)
            latency += trunk.latency_seconds
            rate = min(rate, trunk.bandwidth_bytes_per_second)
        return LinkSpeed(latency, rate, SOFTWARE_SECONDS)

    @cached_property
    def topology(self) -> Topology:
        """What perfect measurements would publish."""
        return self.measured(Random(0), spread=0.0)  # noqa: S311 - no secret

    def measured(self, rng: Random, spread: float = 0.1) -> Topology:
        """What nodes publish: every number off by up to `spread` of itself, in either direction."""

        def off(value: float) -> float:
            return value and value * (1 + rng.uniform(-spread, spread))

        cards = [
            node_card(
                node.name,
                node.free_bytes,
                runner_overhead_bytes=192 * 1024**2,
                speeds=(KindSpeed(WEIGHT_KIND, NodeSpeed(*(off(number) for number in astuple(node.speed)))),),
            )
            for node in self.nodes
        ]
        return Topology.of(cards, [self._link_card(source, target, off) for source, target in self._measured_pairs()])

    def _link_card(self, source: NodeId, target: NodeId, off: Callable[[float], float]) -> Link:
        there, back = self.link(source, target), self.link(target, source)
        rtt = there.latency_seconds + back.latency_seconds + there.message_seconds + back.message_seconds
        rtt_seconds, bandwidth = off(rtt), off(there.bandwidth_bytes_per_second)
        return Link(
            source,
            target,
            rtt_seconds=rtt_seconds,
            bandwidth_bytes_per_second=bandwidth,
            channel_rtt_seconds=off_the_wire(
                off(rtt + CHANNEL_PROBE_BYTES / there.bandwidth_bytes_per_second), bandwidth
            ),
            message_seconds=off(there.message_seconds),
        )

    def _measured_pairs(self) -> list[tuple[NodeId, NodeId]]:
        ids = sorted(self.by_id)
        if len(ids) <= FULL_MESH_NODES:
            return [(source, target) for source in ids for target in ids if source != target]
        by_site: dict[str, list[NodeId]] = {}
        for node_id in ids:
            by_site.setdefault(self.by_id[node_id].site, []).append(node_id)
        pairs: list[tuple[NodeId, NodeId]] = []
        for index, source in enumerate(ids):
            near = by_site[self.by_id[source].site]
            # A stride that is prime to most counts spreads the far ones over the sites.
            far = [ids[(index + 1 + 37 * step) % len(ids)] for step in range(FAR_LINKS)]
            pairs += [(source, target) for target in dict.fromkeys([*near, *far]) if target != source]
        return pairs


# --- machines and attachments -------------------------------------------------------------------

# Orders of magnitude of laptops as published: memory bandwidth × 0.8 for what a quantised product reaches.
FAST = NodeSpeed(300e9, 25e12, 1e-3, 2e-4)
MIDDLING = NodeSpeed(95e9, 6e12, 1e-3, 2e-4)
SLOW = NodeSpeed(35e9, 1.5e12, 2e-3, 4e-4)

WIRE = Attachment(100e-6, 117e6, 117e6)
WIFI = Attachment(1e-3, 40e6, 60e6)
BUSY_WIFI = Attachment(4e-3, 6e6, 12e6)
THUNDERBOLT = LinkSpeed(60e-6, 2.5e9, SOFTWARE_SECONDS)


def fast_and_slow(rng: Random) -> Phantom:
    """One fast laptop and three slow ones on one switch: the slow ones should be left out where they can be."""
    nodes = [_node(rng, "fast", FAST, 48, "room", WIRE)]
    nodes += [_node(rng, f"slow{i}", SLOW, 12, "room", WIRE) for i in range(3)]
    return Phantom("one fast and three slow laptops", tuple(nodes))


def two_rooms(rng: Random) -> Phantom:
    """Two wired rooms joined by Wi-Fi: a pipeline should cross the wall twice at most."""
    nodes = [_node(rng, f"{room}{i}", MIDDLING, 16, room, WIRE) for room in ("hall", "loft") for i in range(3)]
    trunk = LinkSpeed(_vary(rng, 3e-3), _vary(rng, 20e6))
    return Phantom("two rooms joined by Wi-Fi", tuple(nodes), {frozenset(("hall", "loft")): trunk})


def thunderbolt_pair(rng: Random) -> Phantom:
    """Two good machines with a cable between them, and stragglers on Wi-Fi."""
    nodes = [_node(rng, f"pair{i}", FAST, 32, "desk", WIFI) for i in range(2)]
    nodes += [_node(rng, f"straggler{i}", SLOW, 12, "desk", BUSY_WIFI) for i in range(3)]
    cable = {frozenset((NodeId("pair0"), NodeId("pair1"))): THUNDERBOLT}
    return Phantom("a Thunderbolt pair and stragglers", tuple(nodes), cables=cable)


def star(rng: Random) -> Phantom:
    """One wired machine amid laptops on Wi-Fi: the middle is near to all, the others are far from each other."""
    nodes = [_node(rng, "hub", MIDDLING, 24, "room", WIRE)]
    nodes += [_node(rng, f"leaf{i}", MIDDLING, 16, "room", WIFI) for i in range(5)]
    return Phantom("a star", tuple(nodes))


def asymmetric_uplinks(rng: Random) -> Phantom:
    """Homes on lines that take ten times what they give: the direction of a hop matters."""
    nodes = [
        _node(
            rng,
            f"home{i}",
            rng.choice((FAST, MIDDLING, SLOW)),
            rng.choice((12, 24)),
            f"home{i}",
            Attachment(2e-3, _vary(rng, rng.choice((1.25e6, 5e6, 50e6))), _vary(rng, 50e6)),
        )
        for i in range(6)
    ]
    return Phantom("asymmetric uplinks", tuple(nodes), far=LinkSpeed(8e-3, 100e6))


def forty_sites(rng: Random, count: int = 1000) -> Phantom:
    """A thousand nodes in forty sites: what must not grow with the mesh."""
    nodes = [
        _node(
            rng,
            f"node{i:04}",
            rng.choice((FAST, MIDDLING, SLOW)),
            rng.choice((8, 16, 32)),
            f"site{i % 40:02}",
            rng.choice((WIRE, WIFI)),
        )
        for i in range(count)
    ]
    trunks = {
        frozenset((f"site{a:02}", f"site{b:02}")): LinkSpeed(_vary(rng, 5e-3 + 1e-3 * abs(a - b)), _vary(rng, 10e6))
        for a in range(40)
        for b in range(a)
    }
    return Phantom("a thousand nodes in forty sites", tuple(nodes), trunks)


SMALL_PHANTOMS: dict[str, Callable[[Random], Phantom]] = {
    "fast-and-slow": fast_and_slow,
    "two-rooms": two_rooms,
    "thunderbolt-pair": thunderbolt_pair,
    "star": star,
    "asymmetric-uplinks": asymmetric_uplinks,
}
PHANTOMS: dict[str, Callable[[Random], Phantom]] = {**SMALL_PHANTOMS, "forty-sites": forty_sites}


def _node(rng: Random, name: str, speed: NodeSpeed, gib: int, site: str, attachment: Attachment) -> PhantomNode:
    """No two machines of one make are quite alike."""
    speed = replace(
        speed,
        stream_bytes_per_second=_vary(rng, speed.stream_bytes_per_second),
        flops_per_second=_vary(rng, speed.flops_per_second),
    )
    return PhantomNode(name, speed, int(_vary(rng, gib * GIB)), site, attachment)


def _vary(rng: Random, value: float) -> float:
    return value * rng.uniform(0.85, 1.15)


# --- models -------------------------------------------------------------------------------------

BYTES_PER_WEIGHT = 0.5625
"""4 bits and, per 64 weights, a scale and a bias of 2 bytes each."""


@dataclass(frozen=True, slots=True)
class PhantomModel:
    """A dense model, as a planner's card and as work."""

    card: ModelCard
    work: ModelWork


def dense_model(layers: int = 80, hidden: int = 8192, inner: int = 28_672, kv_heads: int = 8) -> PhantomModel:
    """A Llama of that shape in 4 bits, heads of 128; the default is a 70B."""
    vocab, heads = 128_256, hidden // 128
    kv_elements = 2 * kv_heads * 128
    parameters = 2 * hidden * hidden + hidden * kv_elements + 3 * hidden * inner
    table = vocab * hidden
    card = model_card(
        [0] * layers,
        embedding_bytes=int(table * BYTES_PER_WEIGHT),
        head_bytes=int(table * BYTES_PER_WEIGHT),
        hidden_size=hidden,
        intermediate_size=inner,
        attention_heads=heads,
        vocab_size=vocab,
        activation_elements_per_token=hidden,
        weight_kind=WEIGHT_KIND,
        head_kind=WEIGHT_KIND,
        head_flops_per_token=2 * table,
        embedding_row=TensorBytes(int(hidden * BYTES_PER_WEIGHT)),
        tensor_degrees=tuple(ranks for ranks in (2, 4, 8) if kv_heads % ranks == 0),
    )
    layer = LayerCard(
        TensorBytes(int(parameters * BYTES_PER_WEIGHT)),
        kv_elements,
        flops_per_token=2 * parameters,
        attention_flops_per_pair=4 * hidden,
    )
    card = replace(card, layers=(layer,) * layers)
    return PhantomModel(card, model_work(card, computes_float32=False))
