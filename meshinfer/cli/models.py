"""`meshinfer models`: what this node holds, and how it gets more. No agent is needed for any of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from meshinfer.base.errors import Refused, UnknownModel
from meshinfer.base.ids import ModelId, parse_model_id
from meshinfer.base.units import format_bytes
from meshinfer.cli.asked_agent import agent_url
from meshinfer.cli.options import (
    ApiKeyOption,
    ApiOption,
    HomeOption,
    JsonOption,
    ModelArgument,
    home_or_default,
    reads,
)
from meshinfer.cli.terminal import err, out, print_json

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast

app = typer.Typer(help="List, pull and remove models.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command("list")
def list_models(
    home: HomeOption = None, api: ApiOption = None, api_key: ApiKeyOption = "", as_json: JsonOption = False
) -> None:
    """Models on this node, in the mesh if an agent answers, and those that can be pulled by a short name."""
    from meshinfer.models.catalogue import catalogue
    from meshinfer.models.store import ModelStore

    known = catalogue(ModelStore(home_or_default(home) / "models"))
    elsewhere = _in_the_mesh(api, home, api_key)
    rows = [
        {
            "id": entry.model_id,
            "alias": entry.alias,
            "size_bytes": entry.size_bytes,
            "held": entry.held,
            "partial_bytes": entry.partial_bytes,
            "nodes": elsewhere.pop(entry.model_id, []),
            "about": entry.about,
        }
        for entry in known
    ]
    rows += [
        {
            "id": model_id,
            "alias": "",
            "size_bytes": None,
            "held": False,
            "partial_bytes": 0,
            "nodes": nodes,
            "about": "",
        }
        for model_id, nodes in sorted(elsewhere.items())
    ]
    if as_json:
        print_json(rows)
    else:
        out.print(models_table(rows))


def models_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("MODEL", "SIZE", "HERE", "NODES", ""):
        table.add_column(heading, justify="right" if heading in {"SIZE", "NODES"} else "left", overflow="fold")
    for row in rows:
        named = row["alias"] or row["id"]
        size = format_bytes(row["size_bytes"]) if row["size_bytes"] else ""
        about = row["about"]
        if row["partial_bytes"]:
            about = f"half pulled, {format_bytes(row['partial_bytes'])} here; pull it again to go on, or rm it"
        elif not (row["held"] or row["nodes"]):
            about = f"can be pulled: {about}"
        table.add_row(named, size, "yes" if row["held"] else "", str(len(row["nodes"]) or ""), Text(about, style="dim"))
    return table


@app.command("pull")
def pull_model(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="`smollm2-135m`, a repository of the hub (`owner/name`), an mlx-lm directory, or a GGUF file. "
            "A directory's files are hard-linked where the disk allows it: do not change them in place afterwards.",
        ),
    ],
    as_id: Annotated[
        str | None,
        typer.Option("--as", metavar="ID", parser=reads(parse_model_id, "ID"), help="Keep it under this id."),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model, verify it and keep it. Stopped half-way, the same command goes on from there."""
    from meshinfer.cli.progress import bars
    from meshinfer.models.pull import pull
    from meshinfer.models.store import ModelStore
    from meshinfer.transport.home_lock import make_home

    place = home_or_default(home)
    make_home(place)  # lest the store make it on its way, open to all
    store = ModelStore(place / "models")
    with bars() as show:
        info = pull(what, store, show, as_id=as_id)
    card, file_bytes = info.card, sum(file.size_bytes for file in info.files)
    if as_json:
        print_json({"id": card.model_id, "digest": card.digest, "file_bytes": file_bytes, "layers": card.layer_count})
    else:
        out.print(f"{card.model_id} is here: {card.layer_count} layers, {format_bytes(file_bytes)}.")


@app.command("rm")
def remove_model(model: ModelArgument, home: HomeOption = None, api_key: ApiKeyOption = "") -> None:
    """Delete a model from this node, and what a pull of it left unfinished."""
    from meshinfer.models.store import ModelStore
    from meshinfer.transport.home_lock import api_of

    place = home_or_default(home)
    # The agent of this home and no other: while it does not answer yet, it holds no seat either.
    api = api_of(place)
    seats_of = _instances_here(api, api_key, model) if api else []
    if seats_of:
        raise Refused(
            f"{model} is in use: this node has a seat of instance {', '.join(seats_of)}",
            do=f"`meshinfer unload {model} --api {api}` first",
        )
    try:
        ModelStore(place / "models").remove(ModelId(model))
    except UnknownModel as error:
        raise UnknownModel(error.what, do="`meshinfer models list` shows what is here") from error
    err.print(f"{model} is deleted from this node.")


def _in_the_mesh(api: str | None, home: Path | None, api_key: str) -> dict[str, list[str]]:
    """Which nodes hold which models; nothing if no agent answers, since this node's own files are list enough."""
    from meshinfer.cli.agent_client import NoAgent, get

    try:
        return {
            model["model_id"]: model["node_ids"] for model in get(agent_url(api, home), api_key, "/models")["models"]
        }
    except NoAgent:
        return {}


def _instances_here(api: str, api_key: str, model: str) -> list[str]:
    """The model's instances that have a seat on that very node."""
    from meshinfer.cli.agent_client import get

    here = get(api, api_key, "/node_id")
    return [
        instance["instance_id"]
        for instance in get(api, api_key, "/instance")["instances"]
        if instance["model_id"] == model and any(seat["node_id"] == here for seat in instance["seats"])
    ]
