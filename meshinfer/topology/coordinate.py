"""A node's place in a made-up space, in which distances are round trips: for pairs that nobody has measured.

Vivaldi's model: a position in a Euclidean space for the network's core, and a height for the way from
the node to the core, which no path avoids. Distance = ‖a − b‖ + both heights + both adjustments, in seconds.
How coordinates come about is `mesh.coordinates`; here is only what they mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import between, sized

DIMENSIONS = 8
"""As serf's: found best by experiment; each costs 9 bytes of a card."""

Offset = Annotated[float, between(-3600, 3600)]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Where a node is."""

    position: Annotated[tuple[Offset, ...], sized(DIMENSIONS, DIMENSIONS)]
    """Seconds."""
    height_seconds: Annotated[float, between(0, 3600)]
    error: Annotated[float, between(0, 10)]
    """Of its estimates, as a share of the round trip: 0.1 is good, above 1 it knows nothing."""
    adjustment_seconds: Offset = 0.0
    """By how much its own measurements differ from the model on average: what no Euclidean space can hold."""


def core_distance_seconds(one: Coordinate, other: Coordinate) -> float:
    """Between the two positions, heights included: the model without adjustments."""
    return math.dist(one.position, other.position) + one.height_seconds + other.height_seconds


def distance_seconds(one: Coordinate, other: Coordinate) -> float:
    """The estimated round trip; symmetric, positive unless both coincide."""
    distance = core_distance_seconds(one, other)
    adjusted = distance + one.adjustment_seconds + other.adjustment_seconds
    return adjusted if adjusted > 0 else distance
