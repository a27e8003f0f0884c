"""`meshinfer status`: who is here, how far away, and where every layer lies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshinfer.base.units import format_bytes, format_seconds
from meshinfer.cli.asked_agent import agent_url
from meshinfer.cli.hints import with_home
from meshinfer.cli.options import ApiKeyOption, ApiOption, HomeOption, JsonOption
from meshinfer.cli.terminal import out, print_json, printable

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast

# Wide enough to show a layer in models of up to 40 layers, narrow enough to leave room for words in 80 columns.
BAR_CELLS = 40
_STATE_STYLES = {"ready": "green", "loading": "yellow", "linking": "yellow", "leased": "yellow", "placing": "yellow"}
_MANY_LINKS = 8
"""Nodes above which a table of all pairs no longer fits a terminal."""


def status(
    home: HomeOption = None, api: ApiOption = None, api_key: ApiKeyOption = "", as_json: JsonOption = False
) -> None:
    """Nodes, links and instances, as one agent sees them."""
    from meshinfer.cli.agent_client import get

    url = agent_url(api, home)
    topology = get(url, api_key, "/topology")
    instances = get(url, api_key, "/instance")["instances"]
    here = get(url, api_key, "/node_id")
    if as_json:
        print_json({"node_id": here, "topology": topology, "instances": instances})
        return
    out.print(mesh(topology, instances, here, home))


def mesh(topology: Any, instances: list[Any], here: str = "", home: Path | None = None) -> RenderableType:
    """All of it, as a person reads it. `here`: the node that was asked, by `home` if it was named."""
    nodes: dict[str, Any] = topology["nodes"]
    parts: list[RenderableType] = [nodes_table(nodes, instances, here)]
    for node_id, node in nodes.items():
        if node.get("warning"):
            parts += ["", Text(printable(f"{name_of(node_id, nodes)}: {node['warning']}"), style="red")]
    if len(nodes) > 1:
        parts += ["", links_table(nodes)]
    for instance in instances:
        parts += ["", layers_of(instance, nodes)]
    if not instances:
        parts += ["", Text(with_home("No instances. `meshinfer chat MODEL` places one.", home), style="dim")]
    return Group(*parts)


def nodes_table(nodes: dict[str, Any], instances: list[Any], here: str = "") -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("NODE", "ID", "MEMORY FREE", "ACCELERATOR", "LOAD", "SEATS"):
        table.add_column(heading, justify="right" if heading in {"MEMORY FREE", "LOAD", "SEATS"} else "left")
    for node_id, node in nodes.items():
        seats = sum(seat["node_id"] == node_id for instance in instances for seat in instance["seats"])
        memory = f"{format_bytes(node['memory_free_bytes'])} of {format_bytes(node['memory_bytes'])}"
        table.add_row(
            Text.assemble(
                name_of(node_id, nodes),
                (" (asked)" if node_id == here else "", "dim"),
                (" leaving" if node.get("leaving") else "", "yellow"),
            ),
            short(node_id),
            memory,
            printable(node["accelerator"]),
            f"{node['load']:.2f}",
            str(seats),
        )
    return table


def links_table(nodes: dict[str, Any]) -> Table:
    """Round trips from each row's node to each column's; a list where a square would be too wide."""
    if len(nodes) > _MANY_LINKS:
        table = Table(box=None, pad_edge=False)
        for heading in ("LINK", "ROUND TRIP"):
            table.add_column(heading)
        for source, node in nodes.items():
            for target in node["links"]:
                table.add_row(
                    f"{name_of(source, nodes)} → {name_of(target, nodes)}", round_trip(node["links"].get(target))
                )
        return table
    table = Table(box=None, pad_edge=False)
    table.add_column("ROUND TRIP →")
    for target in nodes:
        table.add_column(name_of(target, nodes), justify="right")
    for source, node in nodes.items():
        table.add_row(
            name_of(source, nodes),
            *("·" if source == target else round_trip(node["links"].get(target)) for target in nodes),
        )
    return table


def round_trip(link: Any) -> str:
    """A link in a few characters: `~0.8 ms, 2.4 Gbit/s, 5% lost`; `~` where it is estimated and not measured.

    What activations see, where that was measured; else the agents' own round trip, which `latency_us` is half of.
    """
    if link is None:
        return "?"
    seconds = (link.get("channel_rtt_us") or link["latency_us"] * 2) * 1e-6
    parts = [("~" if link.get("estimated") else "") + format_seconds(seconds)]
    if link.get("bandwidth_gbps"):
        parts.append(f"{link['bandwidth_gbps']:.3g} Gbit/s")
    if link.get("loss"):
        parts.append(f"{link['loss']:.0%} lost")
    if link.get("degraded"):
        parts.append("degraded")
    if link.get("blocked"):
        parts.append("blocked")
    return ", ".join(parts)


def layers_of(instance: Any, nodes: dict[str, Any]) -> RenderableType:
    """Its heading, and for each seat a bar that shows which of the model's layers it holds."""
    placement = instance["placement"]
    state = instance["state"]
    reserved = f"{placement['concurrency']} × {placement['context_tokens']} tokens"
    named = f"instance {instance['instance_id']} epoch {instance['epoch']}"
    heading = Text.assemble(
        (placement["model_id"], "bold"),
        "  ",
        (state, _STATE_STYLES.get(state, "red")),
        "" if state in {"ready", "broken"} else f" {instance['progress']:.0%}",
        (f"  {placement['strategy']} over {placement['channel']}, {reserved}, {named}", "dim"),
    )
    rows: list[RenderableType] = [heading]
    if instance["error"]:
        rows.append(Text(printable(f"  {instance['error']}"), style="red"))
    for other in instance.get("outlived", ()):
        answers = "brings the answers to an end that it had when two sides of a split met"
        rows.append(Text(f"  another placement (epoch {other['epoch']}) {answers}", style="dim"))
    table = Table(box=None, pad_edge=False, show_header=False)
    last = len(instance["seats"]) - 1
    for index, seat in enumerate(instance["seats"]):
        style = _STATE_STYLES.get(seat["state"], "red")
        roles = [role for role, at in (("head", 0), ("samples", last)) if index == at]
        table.add_row(
            f"  {name_of(seat['node_id'], nodes)}",
            bar(seat["start"], seat["end"], placement["layer_count"], style),
            f"layers {seat['start']}–{seat['end'] - 1}",
            Text(seat["state"], style=style),
            format_bytes(seat["resident_bytes"]) if seat.get("resident_bytes") else "",
            Text(", ".join(roles), style="dim"),
        )
    rows.append(table)
    return Group(*rows)


def bar(start: int, end: int, layer_count: int, style: str) -> Text:
    """Layers `[start, end)` of `layer_count`; a cell stands for one layer, or for several in deep models.

    Neighbours round to the same cell border, so the bars of a placement tile the whole.
    """
    cells = min(layer_count, BAR_CELLS)
    first = math.floor(start * cells / layer_count + 0.5)
    last = math.floor(end * cells / layer_count + 0.5)
    return Text.assemble(("·" * first, "dim"), ("█" * (last - first), style), ("·" * (cells - last), "dim"))


def short(node_id: str) -> str:
    """The end of a node id, which differs; all begin alike."""
    return f"…{node_id[-8:]}"


def name_of(node_id: str, nodes: dict[str, Any]) -> str:
    node = nodes.get(node_id)
    return printable(node["name"]) if node else short(node_id)
