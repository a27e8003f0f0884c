"""The endpoints that generate: each reads a body, names its adapter, and hands over to `answer`."""

from __future__ import annotations

import re
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshinfer.api.answer import GenerationResponse, InFlight
from meshinfer.api.backend import Backend
from meshinfer.api.body import read_json_object
from meshinfer.api.dialect import Ask, Dialect
from meshinfer.api.errors import NotFound
from meshinfer.api.generation import Generation
from meshinfer.api.metrics import Metrics
from meshinfer.api.openai_chat import ChatDialect, parse_chat, to_ask
from meshinfer.base.ids import SessionId
from meshinfer.config import Settings
from meshinfer.serving.text_library import TextLibrary

# With or without the prefix that a protocol puts in front of it.
_REQUEST_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{32})")


class InferenceApi:
    """POST /v1/chat/completions and /v1/cancel/{id}."""

    def __init__(self, backend: Backend, settings: Settings, metrics: Metrics) -> None:
        self._backend, self._settings, self._metrics = backend, settings, metrics
        self._library = TextLibrary()
        self._in_flight = InFlight(settings.request_queue_limit)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self._openai_chat, methods=["POST"]),
            Route("/v1/cancel/{request_id}", self._cancel, methods=["POST"]),
        ]

    async def _openai_chat(self, request: Request) -> GenerationResponse:
        body = parse_chat(await read_json_object(request, self._settings.api_body_limit_bytes))
        request_id = request.state.request_id
        as_delta = self._settings.api_heartbeat_as_delta
        dialect = ChatDialect(body, f"chatcmpl-{request_id}", int(time.time()), heartbeat_as_delta=as_delta)
        return self._respond(request_id, to_ask(body), dialect)

    def _respond(self, request_id: str, ask: Ask, dialect: Dialect) -> GenerationResponse:
        generation = Generation(ask, request_id, self._backend, self._library, self._settings, self._metrics)
        return GenerationResponse(request_id, generation, dialect, self._in_flight, self._settings)

    async def _cancel(self, request: Request) -> Response:
        """End a request by the id of its answer (or of its x-request-id header): all its choices."""
        named = request.path_params["request_id"]
        match = _REQUEST_ID.fullmatch(named)
        cancelled = False
        if match:
            generation = self._in_flight.find(match[1])
            for session_id in generation.session_ids if generation else (SessionId(match[1]),):
                cancelled = await self._backend.cancel(session_id) or cancelled
        if not cancelled:
            raise NotFound(
                f"no request {named[:64]!r} runs through this node",
                do="cancel at the node that was asked; an answer that is complete has nothing to cancel",
            )
        return JSONResponse({"id": named, "cancelled": True})
