"""GET /: who is here and what runs, for a person with a browser. One page, nothing loaded from elsewhere."""

from __future__ import annotations

from importlib import resources

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from meshinfer.api.backend import Backend
from meshinfer.base.units import format_bytes

# Nodes choose their names, so the page trusts none of what it shows: escaped, and no script could run anyway.
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


class PageApi:
    """GET /."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        source = resources.files("meshinfer.api").joinpath("page.html").read_text(encoding="utf-8")
        self._template = jinja2.Environment(autoescape=True).from_string(source)

    def routes(self) -> list[Route]:
        return [Route("/", self._page)]

    async def _page(self, request: Request) -> Response:
        nodes = self._backend.topology().nodes
        html = self._template.render(
            node_id=self._backend.node_id,
            nodes=nodes,
            names={node.node_id: node.name for node in nodes},
            instances=self._backend.instances(),
            models=self._backend.models(),
            base_url=str(request.base_url).rstrip("/"),
            bytes=format_bytes,
        )
        return HTMLResponse(html, headers=_HEADERS)
