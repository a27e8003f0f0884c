"""Is it alive, can it generate, how much has it done."""

from __future__ import annotations

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshinfer.api.backend import Backend
from meshinfer.api.metrics import Metrics

# Load balancers commonly give a probe 5 s; a path that needs 2 s to say that it lives does not.
READY_SECONDS = 2.0


class HealthApi:
    """GET /healthz (the event loop turns), /readyz (the generation path lives), /metrics."""

    def __init__(self, backend: Backend, metrics: Metrics) -> None:
        self._backend = backend
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [Route("/healthz", self._health), Route("/readyz", self._ready), Route("/metrics", self._text)]

    async def _health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        del request
        ready, why = False, f"the generation path did not answer within {READY_SECONDS:.0f} s"
        with trio.move_on_after(READY_SECONDS):
            ready, why = await self._backend.ready()
        body = {"status": "ready"} if ready else {"status": "not ready", "reason": why}
        return JSONResponse(body, 200 if ready else 503)

    async def _text(self, request: Request) -> Response:
        del request
        return Response(self._metrics.text(), media_type=None, headers={"content-type": self._metrics.content_type})
