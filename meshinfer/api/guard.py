"""Who may call, before anything else looks at the request.

| bound to                         | open to                                                       |
|----------------------------------|---------------------------------------------------------------|
| loopback, no key set             | programs on this machine; not web pages of other origins      |
| anything, a key set              | who sends it, as `Authorization: Bearer` or `x-api-key`       |
| anything else, no key set        | nobody: the agent does not start                              |
| anything, `api_without_key`      | everyone who can reach it; not web pages of other origins     |

A web page anywhere can make its visitor's browser send requests to `http://127.0.0.1:52415`. Three
things keep it out. Cross-origin answers stay unreadable, as no CORS header is ever sent. A request
that names another origin is refused, since a form can post without asking. And on loopback the `Host`
must be this machine's, or a page could point its own name at 127.0.0.1 (DNS rebinding) and be of the
same origin.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshinfer.api.errors import Forbidden, NotAllowed, headers_of, openai_body, status_of
from meshinfer.api.sse import to_json
from meshinfer.base.errors import BadInput, MeshinferError
from meshinfer.config import Settings

# They say nothing but that the node lives, and what asks them (load balancers) has no key.
OPEN_PATHS = frozenset(("/healthz", "/readyz"))


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine and nothing else."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_key(settings: Settings) -> None:
    """
    Raises:
        BadInput: bound beyond loopback without a key, and nobody said that this is meant.
    """
    if not (settings.api_key or settings.api_without_key or is_loopback(settings.api_host)):
        raise BadInput(
            f"the HTTP API on {settings.api_host} has no key",
            expected="an API key wherever others can reach it",
            do="give one with --api-key or MESHINFER_API_KEY, bind to 127.0.0.1, or let everyone in with "
            "--api-without-key",
        )


class Guard:
    """ASGI middleware: gives each request its id, and lets in who may come in."""

    def __init__(self, app: ASGIApp, settings: Settings, new_request_id: Callable[[], str]) -> None:
        """
        Raises:
            BadInput: as `require_key` says.
        """
        require_key(settings)
        self._app = app
        self._loopback = is_loopback(settings.api_host)
        self._key = settings.api_key.encode()
        self._needs_key = bool(self._key) and not settings.api_without_key
        self._new_request_id = new_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        request_id = self._new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        error = self.objection(Headers(scope=scope), scope["path"])
        if error is None:
            return await self._app(scope, receive, send_with_id)
        body = to_json(openai_body(error))
        response = Response(body, status_of(error), headers_of(error), media_type="application/json")
        return await response(scope, receive, send_with_id)

    def objection(self, headers: Headers, path: str) -> MeshinferError | None:
        """Why this request may not come in; None if it may."""
        host = headers.get("host", "")
        if self._loopback and not is_loopback(_host_name(host)):
            return Forbidden(
                f"the Host {host[:128]!r} is not this machine",
                expected="127.0.0.1 or localhost, since the API is bound to loopback",
                do="call it by that, or bind it to the address that you call (and set a key)",
            )
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host.lower()}", f"https://{host.lower()}"}:
            return Forbidden(
                f"a page of {origin[:128]!r} sent this request", expected="requests from this origin alone"
            )
        if self._needs_key and path not in OPEN_PATHS and not self._has_key(headers):
            return NotAllowed(
                "the API key is missing or wrong",
                expected="`Authorization: Bearer KEY` or `x-api-key: KEY`",
                do="ask who runs this node for the key",
            )
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Header text is Latin-1; constant time, so that answers' timing does not tell the key's beginning.
        return hmac.compare_digest(offered.encode("latin-1", "replace"), self._key)


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # not a host at all
        return ""
