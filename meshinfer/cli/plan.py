"""`meshinfer plan`: every way to place a model, best first, and every refusal with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshinfer.base.errors import BadInput
from meshinfer.base.units import format_bytes, format_seconds
from meshinfer.cli.asked_agent import agent_url
from meshinfer.cli.options import ApiKeyOption, ApiOption, HomeOption, JsonOption, ModelArgument
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
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", metavar="NODE=N", help="This node takes part, with N layers; may be repeated."),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option("--memory-limit", metavar="NODE=SIZE", help="No more than that on this node; may be repeated."),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            metavar="latency|throughput|fit",
            help="A quick answer, many at once, or the fewest nodes with most room.",
            show_default="latency",
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=1, help="Tokens of a typical prompt.", show_default="256")
    ] = None,
    output: Annotated[
        int | None, typer.Option("--output", min=1, help="Tokens of a typical answer.", show_default="256")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every term of every prediction, and which measurement to doubt.")
    ] = False,
    home: HomeOption = None,
    api: ApiOption = None,
    api_key: ApiKeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Where a model would go, how fast it would be there, and why not elsewhere. Changes nothing."""
    from meshinfer.cli.agent_client import get

    url = agent_url(api, home)
    topology = get(url, api_key, "/topology")["nodes"]
    running = () if as_json else get(url, api_key, "/instance")["instances"]
    params: dict[str, Any] = {"model_id": model}
    if context is not None:
        params["context"] = context
    if concurrency is not None:
        params["concurrency"] = concurrency
    if objective is not None:
        params["objective"] = objective
    if prompt is not None:
        params["prompt_tokens"] = prompt
    if output is not None:
        params["output_tokens"] = output
    if layers:
        params["layers"] = [_with_node(text, topology) for text in layers]
    if memory:
        params["memory_limits"] = [_with_node(text, topology) for text in memory]
    if nodes:
        params["nodes"] = [find_node(text, topology) for text in nodes]
    if exclude:
        params["exclude"] = [find_node(text, topology) for text in exclude]
    answer = get(url, api_key, "/instance/previews", params)
    if as_json:
        print_json(answer)
    else:
        out.print(previews(answer["previews"], topology, answer.get("declined", ()), running))
        if explain:
            out.print(explanation(answer["previews"], topology))
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


def _with_node(text: str, nodes: dict[str, Any]) -> str:
    """`node=value`, the node by its id."""
    named, equals, value = text.rpartition("=")
    if not equals:
        raise BadInput(f"{text!r} does not name a node and a value", expected="NODE=VALUE, such as anna=12")
    return f"{find_node(named, nodes)}={value}"


def previews(
    answer: list[Any], nodes: dict[str, Any], declined: Sequence[Any] = (), instances: Sequence[Any] = ()
) -> RenderableType:
    """What serves now, the choice with its memory and speed, the others in a line each, who is not needed, refusals."""
    plans = [preview for preview in answer if preview["error"] is None]
    refusals = [preview for preview in answer if preview["error"] is not None]
    # What no laptop and no dial could mend.
    later = [refusal for refusal in refusals if refusal.get("constraint") == "build"]
    refusals = [refusal for refusal in refusals if refusal not in later]
    models = {preview.get("model_id") for preview in answer}
    parts: list[RenderableType] = [
        Text.assemble(("Now     ", "bold"), f"{route(instance, nodes)} ({instance['state']}; it stays as it is)")
        for instance in instances
        if instance["model_id"] in models
    ]
    if plans:
        parts += [Text.assemble(("Chosen  ", "bold green"), route(plans[0], nodes)), memory_table(plans[0], nodes)]
        if plans[0].get("prediction"):
            parts.append(Text(figures(plans[0]["prediction"])))
        parts.append(Text(printable(f"{plans[0]['reason']}"), style="dim"))
    else:
        parts.append(Text("This model cannot be placed now.", style="bold red"))
    if plans[1:]:
        parts += ["", Text("Would also do", style="bold"), others_table(plans[1:], nodes)]
    if declined:
        parts += ["", Text("Not needed", style="bold")]
        parts += [Text(printable(node["explanation"])) for node in declined]
    for heading, those in (("Refused", refusals), ("Not in this version", later)):
        if those:
            parts += ["", Text(heading, style="bold")]
            parts += [Text(printable(line)) for line in told_once(those, nodes)]
    return Group(*parts)


def told_once(refusals: list[Any], nodes: dict[str, Any]) -> list[str]:
    """Each refusal in its words; those that differ by the node's name alone in one."""
    alike: dict[str, list[str]] = {}
    for refusal in refusals:
        names = [name_of(node_id, nodes) for node_id in refusal.get("nodes", [])]
        name = names[0] if len(names) == 1 and refusal["error"].startswith(f"{names[0]} alone: ") else ""
        alike.setdefault(refusal["error"].removeprefix(name), []).append(name)
    return [f"{', '.join(names)}{rest}" for rest, names in alike.items()]


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


def figures(told: Any) -> str:
    """A prediction in a line."""
    doubt = "" if told["is_measured"] else "; part of this is assumed, see --explain"
    return (
        f"Predicted: first token after {format_seconds(told['ttft_seconds'])} "
        f"({told['prompt_tokens']} tokens of prompt), {told['tokens_per_second_alone']:.3g} tokens/s alone, "
        f"{told['served_tokens_per_second']:.3g} with {told['concurrency']} at once{doubt}"
    )


def explanation(answer: list[Any], nodes: dict[str, Any]) -> RenderableType:
    """Every term of every candidate that has a prediction."""
    parts: list[RenderableType] = []
    for preview in answer:
        told = preview.get("prediction")
        if not told:
            continue
        parts += ["", Text.assemble((f"{preview.get('sharding', '')}  ", "bold"), route(preview, nodes))]
        if preview.get("binds"):
            parts.append(Text(printable(f"Binds: {preview['binds']}")))
        parts.append(Text(printable(_token(told))))
        parts += [stages_table(told, nodes), *([hops_table(told, nodes)] if told["hops"] else [])]
        parts += [Text(printable(f"Doubt  {line}"), style="yellow") for line in doubts(told, nodes)]
    return Group(*parts)


def _token(told: Any) -> str:
    parts = ", ".join(f"{name} {format_seconds(told[f'{name}_seconds'])}" for name in ("compute", "link", "overhead"))
    return (
        f"A token of one stream takes {format_seconds(told['tpot_seconds'])}: {parts}. "
        f"{told['concurrency']} at once decode {told['tokens_per_second']:.3g} tokens/s together. "
        f"Objective {told['objective']}: {format_seconds(told['objective_seconds'])}."
    )


def stages_table(told: Any, nodes: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("STAGE", "STEP", "COMPUTE", "ALL-REDUCE", "OVERHEAD", "PREFILL CHUNK", "STREAMS", "MULTIPLIES"):
        table.add_column(heading, justify="left" if heading == "STAGE" else "right")
    for stage in told["stages"]:
        parts = ("seconds", "compute_seconds", "link_seconds", "overhead_seconds", "chunk_seconds")
        table.add_row(
            " + ".join(name_of(node, nodes) for node in stage["nodes"]),
            *(format_seconds(stage[part]) for part in parts),
            f"{stage['stream_bytes_per_second'] / 1e9:.3g} GB/s",
            f"{stage['flops_per_second'] / 1e12:.3g} TFLOP/s",
        )
    return table


def hops_table(told: Any, nodes: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("HOP", "STEP", "PREFILL CHUNK", "LATENCY", "SOFTWARE", "BANDWIDTH"):
        table.add_column(heading, justify="left" if heading == "HOP" else "right")
    for hop in told["hops"]:
        parts = ("seconds", "chunk_seconds", "latency_seconds", "message_seconds")
        table.add_row(
            f"{name_of(hop['source'], nodes)} → {name_of(hop['target'], nodes)}",
            *(format_seconds(hop[part]) for part in parts),
            f"{hop['bandwidth_bytes_per_second'] / 1e6:.3g} MB/s",
        )
    return table


def doubts(told: Any, nodes: dict[str, Any]) -> list[str]:
    """What to look at if the prediction seems wrong: what nobody measured, else what most of a token's time is."""
    lines = [
        f"{' + '.join(name_of(node, nodes) for node in stage['nodes'])}: {stage['assumed']}"
        for stage in told["stages"]
        if stage["assumed"]
    ]
    lines += [
        f"{name_of(hop['source'], nodes)} → {name_of(hop['target'], nodes)}: {hop['assumed']}"
        for hop in told["hops"]
        if hop["assumed"]
    ]
    if lines:
        return lines
    stage = max(told["stages"], key=lambda each: each["seconds"])
    hop = max(told["hops"], key=lambda each: each["seconds"], default=None)
    most, what = stage, f"the speed of {' + '.join(name_of(node, nodes) for node in stage['nodes'])}"
    if hop is not None and hop["seconds"] > stage["seconds"]:
        most, what = hop, f"the link {name_of(hop['source'], nodes)} → {name_of(hop['target'], nodes)}"
    return [f"first {what}, {most['seconds'] / told['tpot_seconds']:.0%} of each token"]


def others_table(plans: list[Any], nodes: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("PLACEMENT", "LINKS PER TOKEN", "WHY NOT"):
        table.add_column(heading)
    for preview in plans:
        hops = preview["predicted_hop_seconds"]
        table.add_row(route(preview, nodes), format_seconds(hops) if hops else "none", printable(preview["reason"]))
    return table
