"""The mesh as one can see and steer it: topology, previews, instances.

A mutating call answers when it is done: 201 with the instance, or a refusal with its numbers; never
"accepted" and then nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import trio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshinfer.api.backend import Backend
from meshinfer.api.body import read_json_object
from meshinfer.api.errors import BadParameter, headers_of, openai_body
from meshinfer.api.models import entry_to_json
from meshinfer.api.placements import INSTANCE_META, SHARDING, placement_from_json, placement_to_json
from meshinfer.api.validation import bad_parameter
from meshinfer.base.errors import BadInput, DeadlineExceeded, MeshinferError, NoRoom, Refused, UnknownInstance
from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.base.units import parse_bytes
from meshinfer.config import Settings
from meshinfer.models.catalogue import parse_model_name
from meshinfer.planning.plan import Declined, Plan, Preview, Refusal, SeatMemory, memory_to_json
from meshinfer.planning.prediction import Prediction
from meshinfer.planning.workload import Constraints, Objective, Workload
from meshinfer.serving.view import Instance
from meshinfer.topology.graph import Topology
from meshinfer.topology.placement import Placement
from meshinfer.wire.messages import Place

# What a preview shows beside its placement: may come back with it, so that a preview can be posted as it is.
_PREVIEW_KEYS = frozenset(
    (
        *("model_id", "sharding", "instance_meta", "memory_delta_by_node", "memory", "nodes", "seats", "error"),
        *("constraint", "predicted_hop_seconds", "binds", "reason", "topology_digest", "placement", "prediction"),
    )
)


class _Wish(BaseModel):
    """A model to place, and what to reserve for it; also the query of a preview, whose values are all text."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=())

    model_id: Annotated[str, Field(min_length=1, max_length=256)]
    context: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=4096)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    objective: Objective | None = None
    nodes: Annotated[list[str], Field(max_length=256)] = []
    """Ids or names."""
    exclude: Annotated[list[str], Field(max_length=256)] = []
    layers: Annotated[list[str], Field(max_length=256)] = []
    """`node=n`: this node takes part, with n layers."""
    memory_limits: Annotated[list[str], Field(max_length=256)] = []
    """`node=8GiB`: no more than that on this node."""


class ControlApi:
    """GET /topology, /state, /node_id; previews; instances."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self._backend = backend
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            Route("/node_id", self._node_id),
            Route("/topology", self._topology),
            Route("/state", self._state),
            Route("/instance/previews", self._previews),
            Route("/instance", self._instances, methods=["GET"]),
            Route("/instance", self._place, methods=["POST"]),
            Route("/instance/{instance_id}", self._instance, methods=["GET"]),
            Route("/instance/{instance_id}", self._delete, methods=["DELETE"]),
        ]

    async def _node_id(self, request: Request) -> Response:
        del request
        return JSONResponse(self._backend.node_id)

    async def _topology(self, request: Request) -> Response:
        del request
        return JSONResponse(self._backend.topology().to_json())

    async def _state(self, request: Request) -> Response:
        """What this node believes; no prompts, no secrets."""
        del request
        return JSONResponse(
            {
                "node_id": self._backend.node_id,
                "topology": self._backend.topology().to_json(),
                "instances": [instance_to_json(instance) for instance in self._backend.instances()],
                "runners": [asdict(runner) for runner in self._backend.runners()],
                "models": [entry_to_json(entry) for entry in self._backend.models()],
            }
        )

    async def _previews(self, request: Request) -> Response:
        wish = _parse_wish(_query_to_object(request.query_params))
        model_id, workload, constraints = self._understand(wish)
        preview = await self._backend.previews(model_id, workload, constraints)
        return JSONResponse(
            {
                "previews": preview_to_json(model_id, preview),
                "declined": [_declined_to_json(declined) for declined in preview.declined],
            }
        )

    async def _instances(self, request: Request) -> Response:
        del request
        return JSONResponse({"instances": [instance_to_json(instance) for instance in self._backend.instances()]})

    async def _instance(self, request: Request) -> Response:
        named = request.path_params["instance_id"]
        for instance in self._backend.instances():
            if instance.instance_id == named:
                return JSONResponse(instance_to_json(instance))
        raise UnknownInstance(f"no live node has a seat of instance {named[:64]!r}", do="GET /instance lists them")

    async def _place(self, request: Request) -> Response:
        body = await read_json_object(request, self._settings.api_body_limit_bytes)
        try:
            place = self._place_from(body)
        except BadParameter as error:
            # The body is JSON and its meaning is clear; what it means cannot be.
            return JSONResponse(openai_body(error), 422)
        deadline = self._settings.request_deadline_seconds
        try:
            with trio.fail_after(deadline):
                instance = await self._backend.place(place)
        except (NoRoom, Refused) as error:
            return JSONResponse({**openai_body(error), "refusals": await self._refusals(place)}, 409, headers_of(error))
        except trio.TooSlowError:
            raise DeadlineExceeded(
                f"not placed after {deadline:.0f} s", do="GET /instance shows what came of it"
            ) from None
        return JSONResponse(instance_to_json(instance), 201, {"location": f"/instance/{instance.instance_id}"})

    async def _delete(self, request: Request) -> Response:
        deleted = await self._backend.delete(InstanceId(request.path_params["instance_id"]))
        return JSONResponse(
            {
                "instance_id": deleted.instance_id,
                "freed_bytes": deleted.freed_bytes,
                # Their seats are given up when they hear of it; until then they hold memory.
                "unconfirmed": list(deleted.unconfirmed),
            }
        )

    def _place_from(self, body: dict[str, Any]) -> Place:
        """A placement (alone, or inside its preview), or a wish to be planned for."""
        if "placement" in body or "seats" in body:
            unknown = sorted(body.keys() - _PREVIEW_KEYS) if "placement" in body else []
            if unknown:
                raise BadParameter(unknown[0], f"unknown field '{unknown[0]}'", do="post a preview, or its placement")
            placement = placement_from_json(body.get("placement", body))
            return Place(placement.model_id, _workload_of(placement), Constraints(), placement)
        return Place(*self._understand(_parse_wish(body)))

    def _understand(self, wish: _Wish) -> tuple[ModelId, Workload, Constraints]:
        try:
            model_id = parse_model_name(wish.model_id)
        except BadInput as error:
            raise BadParameter("model_id", error.what, expected=error.expected, do=error.do) from None
        usual = Workload()
        workload = Workload(
            context_tokens=wish.context or self._settings.context_tokens,
            concurrency=wish.concurrency or self._settings.concurrency,
            prompt_tokens=wish.prompt_tokens or usual.prompt_tokens,
            output_tokens=wish.output_tokens or usual.output_tokens,
            objective=wish.objective or usual.objective,
        )
        topology = self._backend.topology()
        nodes, exclude = _resolve(topology, wish.nodes, "nodes"), _resolve(topology, wish.exclude, "exclude")
        layers = tuple((node, _parse_layers(text)) for node, text in _resolve_pairs(topology, wish.layers, "layers"))
        pairs = _resolve_pairs(topology, wish.memory_limits, "memory_limits")
        limits = tuple((node, _parse_memory(text)) for node, text in pairs)
        return model_id, workload, Constraints(nodes, exclude, layers, limits)

    async def _refusals(self, place: Place) -> list[dict[str, Any]]:
        """Why nothing else can be either; empty if that cannot be told now."""
        try:
            preview = await self._backend.previews(place.model_id, place.workload, place.constraints)
        except MeshinferError:  # the refusal itself is the answer; this only adds to it
            return []
        return [_refusal_to_json(place.model_id, refusal) for refusal in preview.refusals]


def instance_to_json(instance: Instance) -> dict[str, Any]:
    """An instance with the state of each of its seats."""
    seats: list[dict[str, Any]] = []
    for index, (seat, report) in enumerate(zip(instance.placement.seats, instance.reports, strict=True)):
        about: dict[str, Any] = {"seat_index": index, "node_id": seat.node_id, "start": seat.start, "end": seat.end}
        if report is None:
            about["state"] = "missing"
        else:
            about |= {
                "state": report.state,
                "progress": report.progress,
                "promised_bytes": report.promised_bytes,
                "resident_bytes": report.resident_bytes,
                "sessions": report.sessions,
                "step_seconds": report.step_seconds,
                "error": report.error,
            }
        seats.append(about)
    return {
        "instance_id": instance.instance_id,
        "model_id": instance.placement.model_id,
        "epoch": instance.epoch,
        # Where two sides of a partition met: others of its placements go on with the answers that they have.
        "outlived": [{"epoch": epoch, "placement_id": key} for epoch, key in sorted(instance.outlived)],
        "state": instance.state,
        "progress": instance.progress,
        "error": instance.error,
        "seats": seats,
        "placement": placement_to_json(instance.placement),
    }


def preview_to_json(model_id: ModelId, preview: Preview) -> list[dict[str, Any]]:
    """Plans, best first, then refusals."""
    plans = [_plan_to_json(model_id, plan) for plan in preview.plans]
    return plans + [_refusal_to_json(model_id, refusal) for refusal in preview.refusals]


def _plan_to_json(model_id: ModelId, plan: Plan) -> dict[str, Any]:
    placement = plan.placement
    return {
        "model_id": model_id,
        "sharding": SHARDING[placement.strategy],
        "instance_meta": INSTANCE_META[placement.channel],
        "memory_delta_by_node": _memory_by_node(plan.memory),
        "memory": memory_to_json(plan.memory),
        "nodes": list(placement.node_ids),
        "seats": placement_to_json(placement)["seats"],
        "error": None,
        "predicted_hop_seconds": plan.predicted_hop_seconds,
        "binds": plan.binds,
        "reason": plan.reason,
        "topology_digest": plan.topology_digest,
        "placement": placement_to_json(placement),
        "prediction": plan.prediction and prediction_to_json(plan.prediction),
    }


def prediction_to_json(told: Prediction) -> dict[str, Any]:
    """Every term, in seconds, bytes and tokens per second; what was not measured says so."""
    return {
        "objective": told.objective,
        "objective_seconds": told.objective_seconds,
        "prompt_tokens": told.prompt_tokens,
        "output_tokens": told.output_tokens,
        "concurrency": told.concurrency,
        "ttft_seconds": told.ttft_seconds,
        "tpot_seconds": told.tpot_seconds,
        "compute_seconds": told.compute_seconds,
        "link_seconds": told.link_seconds,
        "overhead_seconds": told.overhead_seconds,
        "request_seconds": told.request_seconds,
        "tokens_per_second_alone": told.tokens_per_second_alone,
        "tokens_per_second": told.tokens_per_second,
        "served_tokens_per_second": told.served_tokens_per_second,
        "is_measured": told.is_measured,
        "stages": [{**msgspec.to_builtins(stage), "seconds": stage.seconds} for stage in told.stages],
        "hops": msgspec.to_builtins(told.hops),
    }


def _declined_to_json(declined: Declined) -> dict[str, Any]:
    return {
        "node_id": declined.node_id,
        "with_it_seconds": declined.with_it,
        "without_it_seconds": declined.without_it,
        "explanation": declined.explanation,
    }


def _refusal_to_json(model_id: ModelId, refusal: Refusal) -> dict[str, Any]:
    return {
        "model_id": model_id,
        "sharding": SHARDING[refusal.strategy],
        "instance_meta": INSTANCE_META[refusal.channel],
        "memory_delta_by_node": _memory_by_node(refusal.memory) or None,
        "memory": memory_to_json(refusal.memory),
        "nodes": list(refusal.nodes),
        "seats": placement_to_json(refusal.placement)["seats"] if refusal.placement else [],
        "error": refusal.explanation,
        "constraint": refusal.constraint,
        "placement": refusal.placement and placement_to_json(refusal.placement),
        "prediction": refusal.prediction and prediction_to_json(refusal.prediction),
    }


def _memory_by_node(memory: Iterable[SeatMemory]) -> dict[NodeId, dict[str, int]]:
    """Bytes that the node would give, over all its seats."""
    by_node: dict[NodeId, dict[str, int]] = {}
    for seat in memory:
        parts = {
            "total": seat.need_bytes,
            "weights": seat.weight_bytes,
            "kv": seat.cache_bytes,
            "activations": seat.activation_bytes,
            "overhead": seat.overhead_bytes,
        }
        before = by_node.get(seat.node_id, {})
        by_node[seat.node_id] = {name: before.get(name, 0) + count for name, count in parts.items()}
    return by_node


def _workload_of(placement: Placement) -> Workload:
    return Workload(context_tokens=placement.context_tokens, concurrency=placement.concurrency)


def _query_to_object(query: QueryParams) -> dict[str, Any]:
    """Lists as `nodes=a&nodes=b` or `nodes=a,b`; everything else once."""
    value: dict[str, Any] = {}
    for name in query:
        given = query.getlist(name)
        if name in ("nodes", "exclude", "layers", "memory_limits"):
            value[name] = [part for text in given for part in text.split(",") if part]
        elif len(given) > 1:
            raise BadParameter(name, f"'{name}' is given {len(given)} times", expected="once")
        else:
            value[name] = given[0]
    return value


def _parse_wish(value: dict[str, Any]) -> _Wish:
    try:
        return _Wish.model_validate({key: item for key, item in value.items() if item is not None})
    except ValidationError as error:
        raise bad_parameter(error) from None


def _resolve(topology: Topology, named: Sequence[str], param: str) -> tuple[NodeId, ...]:
    """Node ids for ids or names."""
    found: list[NodeId] = []
    for text in named:
        matches = [card.node_id for card in topology.nodes if text in (card.node_id, card.name)]
        if len(matches) != 1:
            what = (
                f"no live node is called {text[:128]!r}" if not matches else f"{len(matches)} nodes are called {text!r}"
            )
            raise BadParameter(param, what, expected="a node id, or a name that one node has", do="GET /topology")
        found += matches
    return tuple(dict.fromkeys(found))


def _resolve_pairs(topology: Topology, given: Sequence[str], param: str) -> list[tuple[NodeId, str]]:
    """Node ids and values of `node=value`."""
    pairs: list[tuple[NodeId, str]] = []
    for text in given:
        named, equals, value = text.rpartition("=")
        if not equals:
            raise BadParameter(param, f"{text[:128]!r} in '{param}'", expected="node=value, such as ada=12")
        (node_id,) = _resolve(topology, [named], param)
        pairs.append((node_id, value))
    if len({node_id for node_id, _ in pairs}) < len(pairs):
        raise BadParameter(param, f"'{param}' names a node twice", expected="each node once")
    return pairs


def _parse_layers(text: str) -> int:
    # No model has more than 1024 layers, and int() would take megabytes of digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= 1024):
        raise BadParameter("layers", f"{text[:32]!r} layers", expected="a number from 1 to 1024")
    return int(text)


def _parse_memory(text: str) -> int:
    try:
        return min(parse_bytes(text), 2**63 - 1)
    except BadInput as error:
        raise BadParameter("memory_limits", error.what, expected=error.expected, do=error.do) from None
