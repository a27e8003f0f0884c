"""A coordinate is announced while the mesh is large, and not with every round trip."""

from __future__ import annotations

import random
from pathlib import Path

from meshinfer.base.ids import NodeId
from meshinfer.mesh.coordinates import at_origin
from meshinfer.mesh.own_card import OwnCard
from meshinfer.mesh.own_coordinate import FROM_NODES, TOLD_APART_SECONDS, OwnCoordinate
from meshinfer.testing.cards import node_card
from meshinfer.topology.graph import Topology


def mesh_of(count: int) -> Topology:
    return Topology.of([node_card(f"n{index:02}", coordinate=at_origin()) for index in range(count)], ())


def test_it_comes_and_goes_with_the_size_of_the_mesh(tmp_path: Path):
    own_card = OwnCard(node_card("n00"), tmp_path)
    coordinate = OwnCoordinate(own_card, random.Random(1))
    neighbour = [(NodeId("n01"), 2e-3)]
    coordinate.look(mesh_of(FROM_NODES - 1), neighbour, 0.0)
    assert own_card.card.coordinate is None
    coordinate.look(mesh_of(FROM_NODES), neighbour, 1.0)
    assert own_card.card.coordinate is not None
    coordinate.look(mesh_of(FROM_NODES - 1), neighbour, 2.0)
    assert own_card.card.coordinate is not None, "a mesh of about that size does not flicker"
    coordinate.look(mesh_of(FROM_NODES // 2 - 1), neighbour, 3.0)
    assert own_card.card.coordinate is None


def test_it_is_told_now_and_then_only(tmp_path: Path):
    own_card = OwnCard(node_card("n00"), tmp_path)
    coordinate = OwnCoordinate(own_card, random.Random(1))
    versions: set[int] = set()
    for tenth in range(int(10 * TOLD_APART_SECONDS) * 3):
        coordinate.look(mesh_of(FROM_NODES), [(NodeId("n01"), 2e-3 * (1 + tenth)), (NodeId("n02"), 0.0)], tenth / 10)
        versions.add(own_card.card.version)
    assert len(versions) == 3
