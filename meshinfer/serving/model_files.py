"""Model files, here or from a peer: one laptop that has the model is enough for the room.

A node that is to hold a seat of a model it does not have fetches the files first; an origin that
holds no model at all fetches the tokenizer only. Both are verified against the digests that the
peer announced, and the peer's own digest must be the one that the placement names.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from meshinfer.base.errors import DeadlineExceeded, PeerLost, UnknownModel
from meshinfer.base.ids import ModelId, NodeId
from meshinfer.models.progress import Progress, Watch
from meshinfer.models.sources.peer import fetch_from_peer
from meshinfer.models.store import ModelStore
from meshinfer.models.text_cache import TextCache
from meshinfer.serving.model_cards import ModelCards
from meshinfer.transport.base import Call, Transport
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import MODEL_CHUNK, ModelChunk, ModelChunkRequest

log = logging.getLogger(__name__)

CHUNK_CALL_SECONDS = 30.0
"""For 192 KiB: a link of 6 KB/s is the slowest that makes sense."""


class ModelFiles:
    """The store of this node, and what can be fetched into it."""

    def __init__(
        self, store: ModelStore, text_cache: TextCache, cards: ModelCards, transport: Transport, call: Call
    ) -> None:
        self._store = store
        self._text_cache = text_cache
        self._cards = cards
        self._node_id, self._call = transport.node_id, call
        self._fetching: dict[ModelId, trio.Lock] = {}
        transport.serve(MODEL_CHUNK, self._answer)

    async def path(self, model_id: ModelId, progress: Callable[[int, int], None]) -> Path:
        """The model's directory, verified by size; fetched from a peer if it is not here.

        Raises:
            UnknownModel: no live node holds it. CorruptModel: a file is not what it should be.
            PeerLost, DeadlineExceeded: the peers that hold it do not answer. NoRoom: the disk is full.
        """
        if await trio.to_thread.run_sync(self._store.info, model_id) is None:
            await self._fetch(model_id, progress)
        await trio.to_thread.run_sync(self._store.verify, model_id)
        return await trio.to_thread.run_sync(self._store.path, model_id)

    async def text_directory(self, model_id: ModelId) -> Path:
        """The directory with the model's tokenizer, template and generation config. Raises as `path` does."""
        if await trio.to_thread.run_sync(self._store.info, model_id) is not None:
            return await trio.to_thread.run_sync(self._store.path, model_id)
        info = await self._cards.get(model_id)
        lock = self._fetching.setdefault(model_id, trio.Lock())
        async with lock:
            return await self._text_cache.fetch(info, self._reader(model_id))

    async def _fetch(self, model_id: ModelId, progress: Callable[[int, int], None]) -> None:
        info = await self._cards.get(model_id)
        log.info("fetching %s from a peer", model_id)

        def shown(moment: Progress) -> None:
            if trio.lowlevel.in_trio_task():
                progress(moment.done_bytes, moment.total_bytes)
            else:  # files are verified and described in worker threads
                trio.from_thread.run_sync(progress, moment.done_bytes, moment.total_bytes)

        async with self._fetching.setdefault(model_id, trio.Lock()):
            await fetch_from_peer(info, self._reader(model_id), self._store, Watch(progress=shown))

    def _reader(self, model_id: ModelId) -> Callable[[ModelChunkRequest], Awaitable[ModelChunk]]:
        """Reads chunks from the peers that hold the model: one of them until it fails, then the next."""
        passed_over: set[NodeId] = set()

        async def read(request: ModelChunkRequest) -> ModelChunk:
            holders = [
                node
                for node, digest in sorted(self._cards.holders(model_id).items())
                if digest == request.digest and node != self._node_id
            ]
            if not holders:
                raise UnknownModel(
                    f"no live node holds {model_id} with digest {request.digest[:16]} any more",
                    do=f"run `meshinfer models pull {model_id}` on a node",
                )
            if passed_over.issuperset(holders):
                passed_over.clear()
            node = next(node for node in holders if node not in passed_over)
            try:
                answer = await self._call(node, MODEL_CHUNK, encode(request), CHUNK_CALL_SECONDS)
            except (PeerLost, DeadlineExceeded):
                passed_over.add(node)
                raise
            return decode(ModelChunk, answer)

        return read

    async def _answer(self, peer: NodeId, payload: bytes) -> bytes:
        del peer
        request = decode(ModelChunkRequest, payload)
        return encode(await trio.to_thread.run_sync(self._store.read_chunk, request))
