"""Placements as JSON and back, strict both ways: what a preview shows can be posted, and nothing else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshinfer.api.errors import BadParameter
from meshinfer.api.validation import shown
from meshinfer.base.errors import BadInput
from meshinfer.base.ids import parse_model_id
from meshinfer.topology.placement import ChannelKind, Placement, Strategy

SHARDING: Mapping[Strategy, str] = {"pipeline": "Pipeline", "tensor": "Tensor", "hybrid": "Hybrid"}
INSTANCE_META: Mapping[ChannelKind, str] = {"libp2p": "Libp2p", "mlx-ring": "MlxRing", "mlx-jaccl": "MlxJaccl"}

_PLACEMENT_KEYS = frozenset(Placement.__dataclass_fields__) | {"placement_id"}
_SEAT_KEYS = frozenset(("node_id", "start", "end", "rank", "ranks"))


def placement_to_json(placement: Placement) -> dict[str, Any]:
    return {"placement_id": placement.placement_id, **msgspec.to_builtins(placement)}


def placement_from_json(value: Any) -> Placement:
    """The placement in `value`, valid in itself (whether nodes and memory are there is the mesh's to say).

    Raises:
        BadParameter: unknown or missing fields, wrong types, layers not held exactly once, or a
            `placement_id` that is another placement's.
    """
    fields = _known(value, "placement", _PLACEMENT_KEYS)
    claimed = fields.pop("placement_id", None)
    seats = fields.get("seats")
    if isinstance(seats, list):
        for index, seat in enumerate(seats):
            _known(seat, f"placement.seats.{index}", _SEAT_KEYS)
    try:
        placement = msgspec.convert(fields, Placement, strict=True)
    except msgspec.ValidationError as error:
        raise BadParameter("placement", f"not a placement: {error}", do="post one from a preview") from error
    try:
        parse_model_id(placement.model_id)
        placement.validate()
    except BadInput as error:
        raise BadParameter("placement", error.what, expected=error.expected, do=error.do) from error
    if claimed is not None and claimed != placement.placement_id:
        raise BadParameter(
            "placement.placement_id",
            f"the placement was changed: its id would be {placement.placement_id}",
            expected="a placement as a preview gave it",
            do="leave the id out of a placement of your own",
        )
    return placement


def _known(value: Any, param: str, keys: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadParameter(param, f"'{param}' is {shown(value)}", expected="an object")
    unknown = sorted(value.keys() - keys)
    if unknown:
        raise BadParameter(f"{param}.{unknown[0]}", f"unknown field '{unknown[0]}' in '{param}'", do="leave it out")
    return dict(value)
