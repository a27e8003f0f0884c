"""What can be asked for: OpenAI's model list, and the mesh's catalogue."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshinfer.api.backend import Backend, ModelEntry
from meshinfer.base.errors import BadInput, UnknownModel
from meshinfer.models.catalogue import not_in_mesh, parse_model_name


class ModelsApi:
    """GET /v1/models, /v1/models/{id} and /models."""

    def __init__(self, backend: Backend, started: int) -> None:
        """`started`: Unix time in seconds, which stands in for the models' own dates (nobody knows those)."""
        self._backend = backend
        self._started = started

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._list),
            Route("/v1/models/{model_id:path}", self._one),
            Route("/models", self._catalogue),
        ]

    async def _list(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": [self._openai(entry) for entry in self._backend.models()]})

    async def _one(self, request: Request) -> Response:
        try:
            model_id = parse_model_name(request.path_params["model_id"])
        except BadInput as error:  # what cannot be a name is none that is here
            raise UnknownModel(error.what, expected=error.expected, do="GET /v1/models lists what there is") from None
        held = self._backend.models()
        for entry in held:
            if entry.model_id == model_id:
                return JSONResponse(self._openai(entry))
        raise not_in_mesh(model_id, (entry.model_id for entry in held))

    async def _catalogue(self, request: Request) -> Response:
        del request
        return JSONResponse({"models": [entry_to_json(entry) for entry in self._backend.models()]})

    def _openai(self, entry: ModelEntry) -> dict[str, Any]:
        # `meshinfer` beside OpenAI's fields: its clients pass unknown ones through.
        about = {key: value for key, value in entry_to_json(entry).items() if key != "model_id"}
        return {
            "id": entry.model_id,
            "object": "model",
            "created": self._started,
            "owned_by": "meshinfer",
            "meshinfer": about,
        }


def entry_to_json(entry: ModelEntry) -> dict[str, Any]:
    """A model and where its files lie; `instance_state` is empty while it has no instance."""
    return {
        "model_id": entry.model_id,
        "digest": entry.digest,
        "file_bytes": entry.file_bytes,
        "node_ids": list(entry.node_ids),
        "instance_state": entry.instance_state,
    }
