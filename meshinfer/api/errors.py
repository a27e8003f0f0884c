"""Errors as HTTP says them: a status, headers, and a body in the protocol's own shape. Pure.

| code                     | status | a client should                         |
|--------------------------|--------|-----------------------------------------|
| bad_input and its kinds  | 400    | change the request                      |
| invalid_api_key          | 401    | send the key                            |
| forbidden                | 403    | come by the right address               |
| model_not_found, instance_not_found, not_found | 404 | ask for another            |
| method_not_allowed       | 405    | use one of `Allow`                      |
| refused                  | 409    | look at the mesh again                  |
| body_too_large           | 413    | send less                               |
| queue_full               | 429    | wait (`Retry-After`)                    |
| no_room, peer_lost       | 503    | wait (`Retry-After`)                    |
| node_leaving             | 503    | ask another node                        |
| deadline_exceeded        | 504    | ask for less, or try again              |
| protocol_error           | 502    | report it: two of our nodes disagree    |
| anything else            | 500    | report it                               |
"""

from __future__ import annotations

from typing import Any

from meshinfer.base.errors import BadInput, MeshinferError, NodeLeaving


class BadParameter(BadInput):
    """A part of the request body cannot be right; `param` is its path."""

    def __init__(self, param: str, what: str, *, expected: str = "", do: str = "") -> None:
        super().__init__(what, expected=expected, do=do)
        self.param = param


class UnsupportedParameter(BadParameter):
    """A part of the protocol that is not served; never ignored in silence."""

    code = "unsupported_parameter"


class ContextExceeded(BadParameter):
    """The prompt does not fit the context that is reserved. The code is the one that clients look for."""

    code = "context_length_exceeded"


class NotFound(BadInput):
    """No such path."""

    code = "not_found"


class MethodNotAllowed(BadInput):
    """There is such a path, for another method."""

    code = "method_not_allowed"


class NotAllowed(MeshinferError):
    """No key, or a wrong one."""

    code = "invalid_api_key"


class Forbidden(MeshinferError):
    """A browser was led here by somebody else's page."""

    code = "forbidden"


class BodyTooLarge(MeshinferError):
    """More than `api_body_limit_bytes`."""

    code = "body_too_large"


_STATUS = {
    "bad_input": 400,
    "unsupported_parameter": 400,
    "context_length_exceeded": 400,
    "invalid_api_key": 401,
    "forbidden": 403,
    "not_found": 404,
    "model_not_found": 404,
    "instance_not_found": 404,
    "method_not_allowed": 405,
    "refused": 409,
    "body_too_large": 413,
    "queue_full": 429,
    "corrupt_model": 500,
    "protocol_error": 502,
    "no_room": 503,
    "node_leaving": 503,
    "peer_lost": 503,
    "deadline_exceeded": 504,
}

# A lost node is noticed and a model placed anew within a few seconds; a queue moves faster.
_RETRY_AFTER_SECONDS = {429: "1", 503: "5"}

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def status_of(error: MeshinferError) -> int:
    return _STATUS.get(error.code, 500)


def headers_of(error: MeshinferError) -> dict[str, str]:
    if isinstance(error, NodeLeaving):  # who waits would ask this node again, which is gone by then
        return {}
    retry_after = _RETRY_AFTER_SECONDS.get(status_of(error))
    return {"retry-after": retry_after} if retry_after else {}


def openai_body(error: MeshinferError) -> dict[str, Any]:
    """OpenAI's error body; ours for the control endpoints too."""
    status = status_of(error)
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.param if isinstance(error, BadParameter) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}


def meshinfer_error_in(error: BaseException) -> MeshinferError | None:
    """The error itself, or the first of ours inside a group of them (as a nursery wraps what its tasks raise)."""
    if isinstance(error, MeshinferError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := meshinfer_error_in(inner))), None)
    return None
