"""`meshinfer unload`: give a model's memory back; its files stay."""

from __future__ import annotations

from typing import Annotated

import typer

from meshinfer.base.errors import UnknownInstance
from meshinfer.base.units import format_bytes
from meshinfer.cli.asked_agent import agent_url
from meshinfer.cli.options import ApiKeyOption, ApiOption, HomeOption, JsonOption, ModelArgument
from meshinfer.cli.terminal import err, print_json

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast


def unload(
    model: ModelArgument,
    instance: Annotated[
        str | None, typer.Option("--instance", metavar="ID", help="This instance only, as `meshinfer status` shows it.")
    ] = None,
    home: HomeOption = None,
    api: ApiOption = None,
    api_key: ApiKeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Delete a model's instances: their memory is free again, answers under way end. The files stay."""
    from meshinfer.cli.agent_client import delete, get

    url = agent_url(api, home)
    found = [
        each["instance_id"]
        for each in get(url, api_key, "/instance")["instances"]
        if each["model_id"] == model and instance in {None, each["instance_id"]}
    ]
    if not found:
        named = f"{model} has no instance{f' {instance}' if instance else ''}"
        raise UnknownInstance(named, do="`meshinfer status` shows what there is")
    deleted = [delete(url, api_key, f"/instance/{instance_id}") for instance_id in found]
    if as_json:
        print_json(deleted)
        return
    for each in deleted:
        freed = format_bytes(sum(each["freed_bytes"].values()))
        err.print(f"Instance {each['instance_id']} is deleted; {freed} are free again.")
        if each["unconfirmed"]:
            err.print("Some of its nodes did not confirm; they give it up when they hear of it.", style="yellow")
