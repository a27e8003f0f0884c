"""`status`: who is here, how far away, and where every layer lies."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from meshinfer.cli.status import bar, mesh, nodes_table, round_trip


def shown(renderable: RenderableType) -> str:
    console = Console(width=140, color_system=None, markup=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def node(name: str, **links: float):
    return {
        "name": name, "memory_bytes": 2**30, "memory_free_bytes": 2**29, "accelerator": "cpu", "load": 0.5,
        "links": {target: {"latency_us": latency, "loss": 0.0} for target, latency in links.items()},
    }  # fmt: skip


def seat(node_id: str, start: int, end: int, state: str = "ready"):
    return {"node_id": node_id, "start": start, "end": end, "state": state, "resident_bytes": 2**20}


def instance(state: str, *seats: dict[str, object]):
    placement = {
        "model_id": "tiny", "strategy": "pipeline", "channel": "libp2p", "concurrency": 4, "context_tokens": 512,
        "layer_count": 6,
    }  # fmt: skip
    return {
        "instance_id": "7f", "epoch": 1, "state": state, "progress": 0.5, "placement": placement, "error": "",
        "seats": list(seats),
    }  # fmt: skip


MESH = {"nodes": {"idA": node("anna", idB=100.0), "idB": node("ben", idA=250.0)}}


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n)))))
def test_the_bars_of_a_placement_tile_the_model(drawn: tuple[int, list[int]]):
    layers, cuts = drawn
    edges = [0, *sorted(cuts), layers]

    bars = [bar(start, end, layers, "").plain for start, end in pairwise(edges)]

    assert len({len(text) for text in bars}) == 1
    for cell in zip(*bars, strict=True):
        assert sorted(cell) == ["·"] * (len(bars) - 1) + ["█"]


def test_a_node_that_is_about_to_leave_is_shown_as_such():
    nodes = {"idA": node("anna"), "idB": {**node("ben"), "leaving": True}}

    rows = shown(nodes_table(nodes, [])).splitlines()

    assert [("leaving" in row) for row in rows[1:]] == [False, True]


def test_every_layer_is_shown_where_it_lies():
    text = shown(mesh(MESH, [instance("ready", seat("idA", 0, 4), seat("idB", 4, 6))]))

    assert "████··" in text
    assert "layers 0–3" in text
    assert "····██" in text
    assert "layers 4–5" in text


def test_answers_that_another_epoch_brings_to_an_end_are_shown():
    whole = instance("ready", seat("idA", 0, 6))

    outlived = [{"epoch": 3, "placement_id": "a"}]
    assert "another placement (epoch 3) brings the answers" in shown(mesh(MESH, [{**whole, "outlived": outlived}]))
    assert "to an end" not in shown(mesh(MESH, [whole]))


def test_a_link_is_shown_in_each_direction():
    text = shown(mesh(MESH, []))

    assert "200 µs" in text
    assert "500 µs" in text


def test_a_seat_that_nobody_announces_is_missing():
    text = shown(mesh(MESH, [instance("broken", seat("idA", 0, 3), seat("idC", 3, 6, "missing"))]))

    assert "broken" in text
    assert "missing" in text
    assert "…idC" in text


def test_loading_shows_how_far():
    assert "loading 50%" in shown(mesh(MESH, [instance("loading", seat("idA", 0, 6))]))


def test_a_name_is_a_name_and_no_markup():
    odd = {"nodes": {"idA": node("[/nobody]\x1b[2J")}}

    text = shown(mesh(odd, []))

    assert "[/nobody]" in text
    assert "\x1b" not in text


def test_an_unmeasured_link_is_not_a_fast_one():
    assert round_trip(None) == "?"
    assert round_trip({"latency_us": 400.0, "estimated": True}).startswith("~")


def test_a_link_is_told_as_activations_see_it_with_its_troubles():
    link = {"latency_us": 20000.0, "channel_rtt_us": 210.0, "bandwidth_gbps": 9.125, "loss": 0.05, "degraded": True}

    assert round_trip(link) == "210 µs, 9.12 Gbit/s, 5% lost, degraded"
    assert round_trip({"latency_us": 50.0, "blocked": True}) == "100 µs, blocked"


def test_seats_are_counted_per_node():
    table = nodes_table(MESH["nodes"], [instance("ready", seat("idA", 0, 6)), instance("ready", seat("idA", 0, 6))])

    assert list(table.columns[-1].cells) == ["2", "0"]
