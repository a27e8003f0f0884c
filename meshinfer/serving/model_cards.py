"""Model cards at hand: from this node's store, or asked of a peer that holds the model. Bounded, by digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from meshinfer.base.errors import MeshinferError, PeerLost, UnknownModel
from meshinfer.base.ids import ModelId, NodeId
from meshinfer.models.catalogue import not_in_mesh
from meshinfer.topology.graph import Topology
from meshinfer.transport.base import Call, Transport
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import MODEL_INFO, ModelInfo, ModelInfoRequest

REMEMBERED_CARDS = 64
"""Peers' model cards kept; one takes about 10 KB."""


class ModelCards:
    """`model_id → ModelInfo` for every model that some live node holds."""

    def __init__(
        self,
        transport: Transport,
        call: Call,
        topology: Callable[[], Topology],
        local: Callable[[ModelId], ModelInfo | None],
        timeout_seconds: float,
    ) -> None:
        self._call = call
        self._topology = topology
        self._local = local
        self._timeout_seconds = timeout_seconds
        self._remembered: OrderedDict[str, ModelInfo] = OrderedDict()
        transport.serve(MODEL_INFO, self._answer)

    def holders(self, model_id: ModelId) -> dict[NodeId, str]:
        """Live nodes that hold `model_id`, each with its digest."""
        return {
            card.node_id: held.digest
            for card in self._topology().nodes
            for held in card.models
            if held.model_id == model_id and not card.leaving
        }

    async def get(self, model_id: ModelId) -> ModelInfo:
        """What is known of `model_id`.

        Raises:
            UnknownModel: no live node holds it.
            PeerLost: those that hold it do not answer.
        """
        local = self._local(model_id)
        if local is not None:
            return local
        holders = self.holders(model_id)
        if not holders:
            raise not_in_mesh(model_id, (held.model_id for card in self._topology().nodes for held in card.models))
        for digest in holders.values():
            if digest in self._remembered:
                self._remembered.move_to_end(digest)
                return self._remembered[digest]
        failure: MeshinferError | None = None
        for node_id in sorted(holders):
            try:
                request = encode(ModelInfoRequest(model_id))
                info = decode(ModelInfo, await self._call(node_id, MODEL_INFO, request, self._timeout_seconds))
            except MeshinferError as error:
                failure = error
                continue
            self._remembered[info.card.digest] = info
            while len(self._remembered) > REMEMBERED_CARDS:
                self._remembered.popitem(last=False)
            return info
        raise PeerLost(f"no node that holds {model_id} answers: {failure}", do="try again in a moment")

    async def _answer(self, peer: NodeId, payload: bytes) -> bytes:
        del peer
        model_id = decode(ModelInfoRequest, payload).model_id
        local = self._local(model_id)
        if local is None:
            raise UnknownModel(f"this node does not hold {model_id[:128]!r}")
        return encode(local)
