"""Who could hold a stage: a node, or a tensor group; what each range of blocks would cost there, and whether it fits.

The searches ask this thousands of times for each plan, so it is tables of integers: sums over the blocks
before each position, one row for each kind of machine, shared by all machines of that kind. Positions
are indices into the model's boundaries, as in `partition`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations

from meshinfer.planning.cost import (
    ModelWork,
    Stage,
    all_reduce_seconds,
    embedding_seconds,
    head_seconds,
    hop_seconds,
    layer_decode_seconds,
    layer_prefill_seconds,
)
from meshinfer.planning.measured import NodeRates
from meshinfer.planning.memory import RangeNeeds, Room
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.partition import furthest
from meshinfer.planning.terms import Terms, picoseconds
from meshinfer.planning.work import model_work
from meshinfer.planning.workload import Workload
from meshinfer.topology.speed import LinkSpeed, NodeSpeed

REQUESTS_PER_MOVE = 100
"""Over so many requests the bytes that a placement has to fetch first are spread: an evening's chat. Raising it
lets quicker nodes win sooner against those that have the files already."""
_EXHAUSTIVE_RING = 6
"""Ranks of a tensor group up to which every order of its ring is tried: 120 of them."""


@dataclass(frozen=True, eq=False)
class Holder:
    """One of them; equal to itself only."""

    nodes: tuple[int, ...]
    """Indices of its nodes; a group's in the order of its ring."""
    members: int
    """The same as a bit set."""
    run: tuple[int, ...]
    """J of the blocks before each position."""
    chunk: tuple[int, ...]
    """A prefill chunk of them."""
    once: int
    """J of a stage, whatever it holds."""
    first_once: int
    """More, for the embedding."""
    last_once: int
    """More, for head and sampling."""
    chunk_once: int
    first_chunk_once: int
    """More, for the embedding."""
    latest: tuple[int, ...]
    """For each position, the furthest that a stage starting there can end at; itself if none. Ascending."""
    soonest: tuple[int, ...]
    """For each position, the nearest that a stage starting there may end at. Ascending."""

    def allows(self, start: int, end: int) -> bool:
        return self.soonest[start] <= end <= self.latest[start]

    def cost(self, start: int, end: int) -> int:
        """J of a stage `[start, end)` of blocks."""
        total = self.run[end] - self.run[start] + self.once
        if start == 0:
            total += self.first_once
        if end == len(self.run) - 1:
            total += self.last_once
        return total

    def chunk_cost(self, start: int, end: int) -> int:
        """A prefill chunk of that stage."""
        return self.chunk[end] - self.chunk[start] + self.chunk_once + (self.first_chunk_once if start == 0 else 0)

    def capped(self, cap: int) -> Holder:
        """This one, but for stages whose prefill chunk takes longer than `cap`."""
        chunk, budget = self.chunk, cap - self.chunk_once
        latest = [
            min(furthest_end, max(start, bisect_right(chunk, budget + chunk[start]) - 1))
            for start, furthest_end in enumerate(self.latest)
        ]
        latest[0] = min(latest[0], max(0, bisect_right(chunk, budget - self.first_chunk_once) - 1))
        return replace(self, latest=tuple(latest))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may take part."""

    index: int
    rates: NodeRates
    computes_float32: bool
    overhead_bytes: int
    free_bytes: int
    fetch_bytes_per_second: float = 0.0
    """At which it would get the files from a peer; 0: it has them."""
    layers: int = 0
    """That the operator wants it to hold; 0: any number."""


class Holders:
    """Makes them, for one model and workload."""

    def __init__(self, card: ModelCard, workload: Workload, bounds: Sequence[int], prefill_chunk_tokens: int) -> None:
        self.terms = Terms.of(workload, prefill_chunk_tokens)
        self.bounds = tuple(bounds)
        self._card = card
        self._workload = workload
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._works: dict[bool, ModelWork] = {}
        self._needs: dict[tuple[bool, int], RangeNeeds] = {}
        self._reach: dict[tuple[int, int], tuple[int, ...]] = {}
        self._tables: dict[object, tuple[tuple[int, ...], ...]] = {}

    def work(self, computes_float32: bool) -> ModelWork:
        """What the model asks of engines of that kind."""
        if computes_float32 not in self._works:
            self._works[computes_float32] = model_work(self._card, computes_float32)
        return self._works[computes_float32]

    def room(self, candidate: Candidate, ranks: int = 1) -> Room:
        """A node as a place for one seat of so many ranks."""
        key = candidate.computes_float32, ranks
        if key not in self._needs:
            self._needs[key] = RangeNeeds.of(
                self._card,
                self._workload.context_tokens,
                self._workload.concurrency,
                candidate.computes_float32,
                self._prefill_chunk_tokens,
                ranks,
            )
        return Room(self._needs[key], candidate.overhead_bytes, candidate.free_bytes)

    def _furthest(self, candidate: Candidate, ranks: int) -> tuple[int, ...]:
        """As `partition` has it; a node is asked for each group that it could be in."""
        key = candidate.index, ranks
        if key not in self._reach:
            self._reach[key] = furthest(self.room(candidate, ranks), self.bounds)
        return self._reach[key]

    def node(self, candidate: Candidate) -> Holder:
        """A node as a stage of its own."""
        return self._make([candidate], None)

    def group(self, ring: Sequence[Candidate], inner: LinkSpeed) -> Holder:
        """Nodes as the ranks of one stage; `inner` is the slowest link of their ring."""
        return self._make(ring, inner)

    def _make(self, ring: Sequence[Candidate], inner: LinkSpeed | None) -> Holder:
        terms, bounds = self.terms, self.bounds
        speeds = tuple(candidate.rates.layers for candidate in ring)
        # What a group of unlike engines sends is as wide as the widest of them.
        work = self.work(any(candidate.computes_float32 for candidate in ring))
        chunk, run = self._sums(work, speeds, inner, _seconds_per_byte(ring))
        stage = Stage(0, len(work.layers), speeds, inner, heads=tuple(candidate.rates.head for candidate in ring))
        overhead = picoseconds(max(speed.step_overhead_seconds for speed in speeds))
        embedding_chunk = picoseconds(embedding_seconds(work, stage, terms.chunk_tokens))
        reach = [self._furthest(candidate, len(ring)) for candidate in ring]
        latest = reach[0] if len(ring) == 1 else tuple(min(ends) for ends in zip(*reach, strict=True))
        soonest = tuple(range(1, len(bounds) + 1))
        if ring[0].layers:
            latest, soonest = _exactly(ring[0].layers, latest, bounds)
        return Holder(
            nodes=tuple(candidate.index for candidate in ring),
            members=sum(1 << candidate.index for candidate in ring),
            run=run,
            chunk=chunk,
            once=overhead * (1 + terms.steps),
            first_once=embedding_chunk + terms.steps * picoseconds(embedding_seconds(work, stage, terms.batch)),
            last_once=terms.steps * picoseconds(head_seconds(work, stage, terms.batch)),
            chunk_once=overhead,
            first_chunk_once=embedding_chunk,
            latest=latest,
            soonest=soonest,
        )

    def _sums(
        self, work: ModelWork, speeds: tuple[NodeSpeed, ...], inner: LinkSpeed | None, seconds_per_byte: float
    ) -> tuple[tuple[int, ...], ...]:
        """(prefill chunk, J) of the blocks before each boundary."""
        key = (id(work), speeds, inner, seconds_per_byte)
        if key in self._tables:
            return self._tables[key]
        terms, share = self.terms, 1 / len(speeds)
        between_step = between_chunk = 0
        if inner is not None:
            between_step, between_chunk = (
                2 * picoseconds(all_reduce_seconds(len(speeds), tokens * work.activation_bytes_per_token, inner))
                for tokens in (terms.batch, terms.chunk_tokens)
            )
        known: dict[int, tuple[int, int]] = {}
        layers: list[tuple[int, int]] = []
        for layer in work.layers:
            # Equal layers are one object.
            if id(layer) not in known:
                step = between_step + max(
                    picoseconds(layer_decode_seconds(layer, speed, terms.batch, terms.context, share))
                    for speed in speeds
                )
                chunk = between_chunk + max(
                    picoseconds(layer_prefill_seconds(layer, speed, terms.chunk_tokens, terms.chunk_context, share))
                    for speed in speeds
                )
                weights = layer.dense_bytes + layer.experts * layer.expert_bytes
                moved = picoseconds(weights * seconds_per_byte)
                known[id(layer)] = (chunk, chunk + terms.steps * step + moved)
            layers.append(known[id(layer)])
        # Of the last one a prefill chunk leaves keys and values only (`cost.prefill_time`).
        chunk, total = layers[-1]
        layers[-1] = between_chunk, total - chunk + between_chunk
        sums = [tuple(accumulate(column, initial=0)) for column in zip(*layers, strict=True)]
        self._tables[key] = tuple(tuple(column[bound] for bound in self.bounds) for column in sums)
        return self._tables[key]


def _exactly(layers: int, latest: Sequence[int], bounds: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(latest, soonest) ends of stages of so many layers, where cut points and memory allow them."""
    index = {layer: position for position, layer in enumerate(bounds)}
    ends = [index.get(layer + layers, position) for position, layer in enumerate(bounds)]
    fitting = [end if end <= latest[start] else start for start, end in enumerate(ends)]
    # Ascending, so that searches may slide over them; a start without an end then has its latest before its soonest.
    rising = list(accumulate(fitting, max))
    soonest = [0] * len(bounds)
    following = len(bounds)
    for start in range(len(bounds) - 1, -1, -1):
        following = fitting[start] if fitting[start] > start else following
        soonest[start] = following
    return tuple(rising), tuple(soonest)


def _seconds_per_byte(ring: Sequence[Candidate]) -> float:
    """Of J, for each byte of weights that must be fetched first; the ranks of a group fetch at once."""
    slowest = min((each.fetch_bytes_per_second for each in ring if each.fetch_bytes_per_second), default=0.0)
    return 1 / (slowest * len(ring) * REQUESTS_PER_MOVE) if slowest else 0.0


# --- rings ----------------------------------------------------------------------------------------

Links = Mapping[tuple[int, int], LinkSpeed]
"""Between nodes, by index."""


def slowest_of_ring(order: Sequence[int], links: Links) -> LinkSpeed:
    """The worst of each property over the links of a ring: all of them send at once, so the worst sets the pace."""
    around = [links[pair] for pair in pairwise((*order, order[0]))]
    return LinkSpeed(
        max(link.latency_seconds for link in around),
        min(link.bandwidth_bytes_per_second for link in around),
        max(link.message_seconds for link in around),
    )


def best_ring(nodes: Sequence[int], links: Links, message_bytes: float) -> tuple[int, ...]:
    """The order whose all-reduce is quickest; with many ranks, each beside the nearest that is left."""
    first, *rest = nodes
    if len(nodes) <= _EXHAUSTIVE_RING:

        def seconds(order: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
            return all_reduce_seconds(len(nodes), message_bytes, slowest_of_ring(order, links)), order

        return min(((first, *others) for others in permutations(rest)), key=seconds)
    order, left = [first], set(rest)
    while left:
        nearest = min(left, key=lambda node: (hop_seconds(links[order[-1], node], message_bytes), node))
        order.append(nearest)
        left.remove(nearest)
    return tuple(order)
