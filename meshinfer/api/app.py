"""The HTTP server of a node: which endpoints there are, what stands around them, and how it listens."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import trio
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshinfer.api.backend import Backend
from meshinfer.api.connections import PATIENCE_SECONDS, serve_connections
from meshinfer.api.control import ControlApi
from meshinfer.api.errors import MethodNotAllowed, NotFound, headers_of, openai_body, status_of
from meshinfer.api.guard import Guard, require_key
from meshinfer.api.health import HealthApi
from meshinfer.api.inference import InferenceApi
from meshinfer.api.metrics import Metrics
from meshinfer.api.models import ModelsApi
from meshinfer.api.page import PageApi
from meshinfer.api.sse import to_json
from meshinfer.base.errors import BadInput, MeshinferError
from meshinfer.config import Settings

_log = logging.getLogger("meshinfer.http")

# Open streams get this long to come to their end when the agent stops.
GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where the API listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def make_app(backend: Backend, settings: Settings) -> ASGIApp:
    """The ASGI app of this node.

    Raises:
        BadInput: bound beyond loopback without a key (see `guard`), or a dial that cannot be.
    """
    if settings.api_heartbeat_seconds <= 0:
        raise BadInput(f"api_heartbeat_seconds is {settings.api_heartbeat_seconds}", expected="more than 0")
    metrics = Metrics(lambda: len(backend.topology().nodes))
    routes = [
        *InferenceApi(backend, settings, metrics).routes(),
        *ModelsApi(backend, int(time.time())).routes(),
        *ControlApi(backend, settings).routes(),
        *HealthApi(backend, metrics).routes(),
        *PageApi(backend).routes(),
    ]
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        MeshinferError: _answer_error,
        HTTPException: _answer_http_exception,
        Exception: _answer_bug,
    }
    inner = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(_Counted(inner, routes, metrics), settings, new_request_id=partial(secrets.token_hex, 16))


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    stop: trio.Event | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
    task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `app` at what `listen` gave until `stop` is set (open answers get GRACE_SECONDS) or the task is cancelled."""
    host, port = listener.getsockname()[:2]
    config = Config()
    config.accesslog = None
    config.errorlog = _log
    config.graceful_timeout = GRACE_SECONDS
    config.include_server_header = False
    # Its default closes a connection after 1000 requests, in the middle of a busy client's pipeline.
    config.keep_alive_max_requests = 10**9
    if stop is None:
        stop = trio.Event()  # never set
    # Taken over by its number, so that the caller's may be closed again.
    taken = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=listener.detach())))
    async with taken:
        task_status.started(Address(host, port))
        await serve_connections(app, config, taken, stop, patience_seconds)


def listen(settings: Settings) -> socket.socket:
    """Take the API's address; who connects before `serve` waits for it.

    Raises:
        BadInput: the address cannot be had, or may not be served (see `guard`).
    """
    require_key(settings)
    host, port = settings.api_host, settings.api_port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise BadInput(
            f"the HTTP API cannot listen on {host}:{port}: {'the port is in use' if in_use else error}",
            expected="a free port on an address of this machine",
            do="choose another port with --api-port (0: any free one), or end what uses it",
        ) from error


class _Counted:
    """ASGI middleware: counts answers by the pattern of their route."""

    def __init__(self, app: ASGIApp, routes: list[Route], metrics: Metrics) -> None:
        self._app = app
        self._patterns: dict[Any, str] = {route.endpoint: route.path for route in routes}
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.request(self._patterns.get(scope.get("endpoint"), "none"), message["status"])
            await send(message)

        await self._app(scope, receive, counting)


def _respond(error: MeshinferError, status: int | None = None) -> Response:
    return Response(
        to_json(openai_body(error)), status or status_of(error), headers_of(error), media_type="application/json"
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, MeshinferError)
    return _respond(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:128]}: {error.detail}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette's own header knows the first route of a path only, and a path may have one for each method.
        matching = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        allowed = ", ".join(sorted({method for route in matching for method in route.methods}))
        response = _respond(MethodNotAllowed(what, expected=allowed))
        response.headers["allow"] = allowed
        return response
    response = _respond(NotFound(what, do="GET / tells what there is"), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The server logs it with its traceback; the client gets no more than that it happened."""
    del request, error
    return _respond(MeshinferError("this node made a mistake", do="look into its log"))
