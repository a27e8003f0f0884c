"""`meshinfer plan`: every way to place a model, best first, and every refusal with its numbers."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshinfer.base.errors import BadInput
from meshinfer.base.units import format_bytes, format_seconds
from meshinfer.cli.options import DEFAULT_API_URL, ApiKeyOption, ApiOption, JsonOption, ModelArgument
from meshinfer.cli.status import name_of
from meshinfer.cli.terminal import out, print_json, printable

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast


def plan(
    model: ModelArgument,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Tokens to reserve per conversation.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Conversations to reserve for.")
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", metavar="NODE", help="Only these: names, or ends of ids; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="NODE", help="Not these; may be repeated.")
    ] = None,
    api: ApiOption = DEFAULT_API_URL,
    api_key: ApiKeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Where a model would go, and why not elsewhere. Changes nothing."""
    from meshinfer.cli.agent_client import get

    topology = get(api, api_key, "/topology")["nodes"]
    params: dict[str, Any] = {"model_id": model}
    if context is not None:
        params["context"] = context
    if concurrency is not None:
        params["concurrency"] = concurrency
    if nodes:
        params["nodes"] = [find_node(text, topology) for text in nodes]
    if exclude:
        params["exclude"] = [find_node(text, topology) for text in exclude]
    answer = get(api, api_key, "/instance/previews", params)
    if as_json:
        print_json(answer)
    else:
        out.print(previews(answer["previews"], topology))
    if all(preview["error"] is not None for preview in answer["previews"]):
        raise typer.Exit(1)


def find_node(text: str, nodes: dict[str, Any]) -> str:
    """The id of the one node that `text` names: its name, its id, or the end of its id."""
    found = [node_id for node_id, node in nodes.items() if node["name"] == text or node_id.endswith(text)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{node['name']} ({node_id[-8:]})" for node_id, node in nodes.items())
    raise BadInput(
        f"{text!r} names {len(found) or 'no'} nodes" if found else f"no node is called {text!r}",
        expected=f"one of {known}",
    )


def previews(answer: list[Any], nodes: dict[str, Any]) -> RenderableType:
    """The choice with its memory, the other plans in a line each, and the refusals."""
    plans = [preview for preview in answer if preview["error"] is None]
    refusals = [preview for preview in answer if preview["error"] is not None]
    parts: list[RenderableType] = []
    if plans:
        parts += [Text.assemble(("Chosen  ", "bold green"), route(plans[0], nodes)), memory_table(plans[0], nodes)]
        parts.append(Text(printable(f"{plans[0]['reason']}"), style="dim"))
    else:
        parts.append(Text("This model cannot be placed now.", style="bold red"))
    if plans[1:]:
        parts += ["", Text("Would also do", style="bold"), others_table(plans[1:], nodes)]
    if refusals:
        parts += ["", Text("Refused", style="bold")]
        parts += [Text(printable(refusal["error"])) for refusal in refusals]
    return Group(*parts)


def route(preview: Any, nodes: dict[str, Any]) -> str:
    """Who holds which layers, in pipeline order."""
    return " → ".join(
        f"{name_of(seat['node_id'], nodes)} {seat['start']}–{seat['end'] - 1}" for seat in preview["seats"]
    )


def memory_table(preview: Any, nodes: dict[str, Any]) -> Table:
    """What each seat takes, part by part, and what its node has."""
    table = Table(box=None, pad_edge=False)
    for heading in ("NODE", "LAYERS", "WEIGHTS", "KV CACHE", "PREFILL", "RUNNER", "NEEDS", "HAS"):
        table.add_column(heading, justify="left" if heading == "NODE" else "right")
    for seat, memory in zip(preview["seats"], preview["memory"], strict=True):
        parts = ("weight_bytes", "kv_bytes", "activation_bytes", "overhead_bytes", "need_bytes", "free_bytes")
        table.add_row(
            name_of(seat["node_id"], nodes),
            f"{seat['start']}–{seat['end'] - 1}",
            *(format_bytes(memory[part]) for part in parts),
        )
    return table


def others_table(plans: list[Any], nodes: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("PLACEMENT", "LINKS PER TOKEN", "WHY NOT"):
        table.add_column(heading)
    for preview in plans:
        hops = preview["predicted_hop_seconds"]
        table.add_row(route(preview, nodes), format_seconds(hops) if hops else "none", printable(preview["reason"]))
    return table
