"""What a planner of serving knows beside the cards: what runs already, and which links are only estimated."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from whole_agents import simulate

from meshinfer.base.ids import NodeId
from meshinfer.config import Settings
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.model_cards import ModelCards
from meshinfer.serving.ports import Ports
from meshinfer.serving.service import Serving
from meshinfer.testing.cluster import WORKLOAD, Cluster
from meshinfer.testing.network import SimNetwork
from meshinfer.testing.phantoms import dense_model, forty_sites
from meshinfer.wire.messages import ModelInfo, Place


def test_what_runs_stays_the_choice_of_equals() -> None:
    async def scenario(cluster: Cluster) -> None:
        planner, model_id = cluster.nodes[0].serving.planner, cluster.model.model_id
        before = await planner.preview(model_id, WORKLOAD, Constraints())
        first = before.plans[0].placement
        other = next(
            plan.placement
            for plan in before.plans[1:]
            if len(plan.placement.seats) == len(first.seats) and plan.placement.node_ids != first.node_ids
        )
        placed = await planner.place(Place(model_id, WORKLOAD, Constraints(), other))
        await cluster.until(lambda: [each.state for each in cluster.nodes[0].instances()] == ["ready"])
        after = await planner.preview(model_id, WORKLOAD, Constraints())
        assert after.plans[0].placement == placed.placement == other
        assert first in [plan.placement for plan in after.plans], "it is not the running one's memory that hinders it"
        barred = Constraints(exclude=(other.node_ids[0],))
        assert other.node_ids[0] not in (await planner.preview(model_id, WORKLOAD, barred)).plans[0].placement.node_ids

    simulate(Cluster(random.Random(1)), scenario, 4)


async def test_candidates_over_links_that_are_only_estimated_have_them_measured(tmp_path: Path) -> None:
    topology = forty_sites(random.Random(5), 40).topology
    model = dense_model(layers=80)
    asked: set[tuple[NodeId, NodeId]] = set()
    transport = SimNetwork().add(topology.nodes[0].node_id)
    settings = Settings(home=tmp_path)

    def no(*_: object) -> Any:
        raise AssertionError("a preview touches nothing")

    ports = Ports(
        settings=settings,
        transport=transport,
        call=no,
        topology=lambda: topology,
        doubtful=frozenset,
        out_of_reach=frozenset,
        is_waking=lambda: False,
        blame=no,
        watch=no,
        announce=no,
        drain=no,
        model_cards=ModelCards(transport, no, lambda: topology, lambda _: ModelInfo(model.card, ()), 1.0),
        model_path=no,
        start_runner=no,
        open_channel=no,
        origin_certificate_der=b"",
        want_links=asked.update,
    )
    preview = await Serving.of(ports).planner.preview(model.card.model_id, Workload(), Constraints())
    seats = [plan.placement.seats for plan in preview.plans if len(plan.placement.seats) > 1]
    assert seats
    for each in seats:
        around = zip(each, (*each[1:], each[0]), strict=True)
        assert {(here.node_id, there.node_id) for here, there in around} <= asked
    assert asked - topology.link_between.keys(), "some of them nobody has measured"
