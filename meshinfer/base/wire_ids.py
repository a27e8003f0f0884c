"""Ids as fields of what other nodes send: the same types, each with the longest that it can be.

Here and not in `base.ids`, since whoever only names things need not load msgspec.
"""

from __future__ import annotations

from typing import Annotated

from meshinfer.base.bounds import sized
from meshinfer.base.ids import InstanceId, ModelId, NodeId, PlacementId, SessionId

WireNodeId = Annotated[NodeId, sized(1, 128)]
"""A peer id of an Ed25519 key takes 52 characters, of the longest hash that libp2p knows 94."""
WireModelId = Annotated[ModelId, sized(1, 193)]
"""Two parts of 96 and what joins them, see `ids.parse_model_id`."""
WireInstanceId = Annotated[InstanceId, sized(1, 64)]
WirePlacementId = Annotated[PlacementId, sized(1, 64)]
WireSessionId = Annotated[SessionId, sized(1, 64)]
