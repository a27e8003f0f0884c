"""This node's coordinate, from round trips to the few nodes that it measures. Pure.

Vivaldi (Dabek, Cox, Kaashoek, Morris, "Vivaldi: A Decentralized Network Coordinate System", SIGCOMM 2004):
every measured pair is a spring whose rest length is the round trip, and each node lets itself be pulled a
little way; who is surer of his place pulls more. With what years of running it taught (Ledlie, Gardner,
Seltzer, "Network Coordinates in the Wild", NSDI 2007; serf runs the same):

- a median over the last three round trips to each node, since one late answer would throw the node far off;
- an *adjustment* by the mean of what the model missed lately;
- a weak pull towards the origin, or the whole cloud of nodes would drift away together;
- a *height*, for the last mile that Euclid has no place for. Between laptops it is mostly software.

What is announced is steadied: it stays until the node has moved by a fifth of its distance to what it measures.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from meshinfer.base.ids import NodeId
from meshinfer.topology.coordinate import DIMENSIONS, Coordinate, core_distance_seconds

MAX_ERROR = 1.5
"""Where a node begins: it knows nothing."""
ERROR_STEP = 0.25
"""How much one measurement counts for the error. Vivaldi's c_e: its best value in the paper and in serf."""
FORCE_STEP = 0.25
"""How far along the spring one measurement pulls. Vivaldi's c_c, likewise."""
MIN_HEIGHT_SECONDS = 10e-6
ADJUSTMENT_WINDOW = 20
FILTER_WINDOW = 3
GRAVITY_SECONDS = 150.0
"""At this distance from the origin gravity pulls a second; at 100 ms nothing that could be noticed."""
MAX_ROUND_TRIP_SECONDS = 10.0
MAX_PLACE_SECONDS = 3600.0
MAX_FILTERED = 256
"""Nodes whose last round trips are kept."""
MOVED_SHARE = 0.2
_TINY = 1e-6


def at_origin() -> Coordinate:
    return Coordinate((0.0,) * DIMENSIONS, MIN_HEIGHT_SECONDS, MAX_ERROR)


class Coordinates:
    """This node's place as it is now."""

    def __init__(self, rng: random.Random) -> None:
        """`rng` says which way two nodes at one place part."""
        self._rng = rng
        self._own = at_origin()
        self._said = self._own
        self._recent: dict[NodeId, deque[float]] = {}
        self._missed: deque[float] = deque(maxlen=ADJUSTMENT_WINDOW)
        """By how much the model was wrong of late."""
        self._typical_seconds = 0.0
        """Smoothed round trip of what is measured: what 'far' means here."""

    @property
    def own(self) -> Coordinate:
        return self._own

    def measured(self, peer: NodeId, place: Coordinate, rtt_seconds: float) -> None:
        """A round trip to `peer`, which says that it is at `place`. What makes no sense is not believed."""
        if not 0 < rtt_seconds <= MAX_ROUND_TRIP_SECONDS or not _is_sane(place):
            return
        rtt = self._filtered(peer, rtt_seconds)
        self._typical_seconds += (rtt - self._typical_seconds) / 8 if self._typical_seconds else rtt
        moved = self._pulled(place, rtt)
        if not _is_sane(moved):
            moved = at_origin()
            self._missed.clear()
        self._missed.append(rtt - core_distance_seconds(moved, place))
        adjustment = math.fsum(self._missed) / (2 * ADJUSTMENT_WINDOW)
        self._own = _towards_origin(replace(moved, adjustment_seconds=adjustment), self._rng)

    def forget(self, peers: Iterable[NodeId]) -> None:
        """These are gone."""
        for peer in peers:
            self._recent.pop(peer, None)

    def announced(self) -> Coordinate:
        """The own coordinate as others are told."""
        moved = math.dist(self._own.position, self._said.position) + abs(
            self._own.height_seconds - self._said.height_seconds
        )
        surer = self._own.error < self._said.error / 2
        if moved > MOVED_SHARE * self._typical_seconds or surer:
            self._said = Coordinate(
                tuple(round(x, 7) for x in self._own.position),
                round(self._own.height_seconds, 7),
                round(self._own.error, 3),
                round(self._own.adjustment_seconds, 7),
            )
        return self._said

    # --- inside ---------------------------------------------------------------------------------

    def _filtered(self, peer: NodeId, rtt_seconds: float) -> float:
        recent = self._recent.pop(peer, None) or deque(maxlen=FILTER_WINDOW)
        recent.append(rtt_seconds)
        self._recent[peer] = recent
        if len(self._recent) > MAX_FILTERED:
            del self._recent[next(iter(self._recent))]  # measured longest ago
        return statistics.median(recent)

    def _pulled(self, place: Coordinate, rtt: float) -> Coordinate:
        """Where the spring to `place` moves this node."""
        own = self._own
        distance = core_distance_seconds(own, place)
        weight = own.error / max(own.error + place.error, _TINY)
        wrong = abs(distance - rtt) / max(rtt, _TINY)
        error = min(MAX_ERROR, ERROR_STEP * weight * wrong + own.error * (1 - ERROR_STEP * weight))
        return replace(_pushed(own, place, FORCE_STEP * weight * (rtt - distance), self._rng), error=error)


def _pushed(own: Coordinate, other: Coordinate, force: float, rng: random.Random) -> Coordinate:
    """`own` after a push by `force` seconds away from `other` (towards it if negative)."""
    apart = math.dist(own.position, other.position)
    if apart > _TINY:
        direction = [(mine - theirs) / apart for mine, theirs in zip(own.position, other.position, strict=True)]
        # Both heights stretch with the spring, in proportion.
        height = own.height_seconds + (own.height_seconds + other.height_seconds) * force / apart
    else:
        drawn = [rng.gauss(0, 1) for _ in range(DIMENSIONS)]
        length = math.hypot(*drawn) or 1.0
        direction, height = [x / length for x in drawn], own.height_seconds
    position = tuple(mine + force * way for mine, way in zip(own.position, direction, strict=True))
    return replace(own, position=position, height_seconds=max(height, MIN_HEIGHT_SECONDS))


def _towards_origin(own: Coordinate, rng: random.Random) -> Coordinate:
    origin = replace(at_origin(), height_seconds=0.0)
    distance = math.dist(own.position, origin.position)
    pulled = _pushed(own, origin, -((distance / GRAVITY_SECONDS) ** 2), rng)
    return replace(pulled, height_seconds=own.height_seconds)


def _is_sane(place: Coordinate) -> bool:
    numbers = (*place.position, place.height_seconds, place.error, place.adjustment_seconds)
    return len(place.position) == DIMENSIONS and all(
        math.isfinite(number) and abs(number) <= MAX_PLACE_SECONDS for number in numbers
    )
