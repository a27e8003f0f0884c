"""A running agent as the command line sees it: JSON over HTTP, errors as our own."""

from __future__ import annotations

from typing import Any

import httpx

from meshinfer.base.errors import ERRORS_BY_CODE, DeadlineExceeded, MeshinferError, ProtocolError

# To connect: an agent on this machine answers in milliseconds, one across the room in tens of them.
_CONNECT_SECONDS = 5.0
# Between two signs of life: in a stream they come at most 10 s apart, also while a model loads; a placement
# waits for other nodes, each with its own deadline of seconds.
_ANSWER_SECONDS = 60.0


class NoAgent(MeshinferError):
    """Nothing listens where an agent was expected."""

    code = "no_agent"


def http_client(url: str, api_key: str) -> httpx.Client:
    """A client for the agent at `url`; close it."""
    # trust_env=False: a proxy for the internet is no way to an agent in this room.
    return httpx.Client(
        base_url=url.rstrip("/"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
        trust_env=False,
    )


def get(url: str, api_key: str, path: str, params: dict[str, Any] | None = None) -> Any:
    """What `GET path` answers.

    Raises:
        NoAgent: nothing listens there.
        MeshinferError: what the agent says is wrong.
    """
    return _request(url, api_key, "GET", path, params=params)


def post(url: str, api_key: str, path: str, body: Any) -> Any:
    """What `POST path` answers to `body`. Raises as `get` does."""
    return _request(url, api_key, "POST", path, json=body)


def delete(url: str, api_key: str, path: str) -> Any:
    """What `DELETE path` answers. Raises as `get` does."""
    return _request(url, api_key, "DELETE", path)


def _request(url: str, api_key: str, method: str, path: str, **content: Any) -> Any:
    try:
        with http_client(url, api_key) as client:
            response = client.request(method, path, **content)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise explain(error, url) from error
    return answer_of(response, url)


def answer_of(response: httpx.Response, url: str) -> Any:
    """The JSON of a whole answer.

    Raises:
        MeshinferError: it is an error, or no JSON.
    """
    try:
        body = response.json()
    except ValueError as error:
        raise ProtocolError(
            f"{url} answered {response.status_code} with something that is not JSON",
            expected="a meshinfer agent",
            do="check --api; another program may have that port",
        ) from error
    if response.is_error:
        raise error_of(body, response.status_code)
    return body


def error_of(body: Any, status: int) -> MeshinferError:
    """The agent's error, as itself where its code is one of ours."""
    error: Any = body.get("error", body) if isinstance(body, dict) else body
    message, code = (
        (str(error.get("message", error)), str(error.get("code", ""))) if isinstance(error, dict) else (str(error), "")
    )
    if status == 401:
        return MeshinferError(
            "this agent wants an API key, and was given none or another one",
            do="pass the one that it was started with by --api-key or MESHINFER_API_KEY",
        )
    kind = ERRORS_BY_CODE.get(code, MeshinferError)
    return kind(message.rstrip("."))


def explain(error: httpx.HTTPError | httpx.InvalidURL, url: str) -> MeshinferError:
    """What went wrong on the way to the agent, and what to do."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return NoAgent(
            f"no agent answers at {url}",
            do="start one with `meshinfer up`, or name another with --home, --api URL or MESHINFER_API",
        )
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return MeshinferError(
            f"{url!r} is not an address", expected="http://HOST:PORT", do="check --api and MESHINFER_API"
        )
    if isinstance(error, httpx.TimeoutException):
        return DeadlineExceeded(f"the agent at {url} did not answer in time", do="see `meshinfer status`, and its log")
    return MeshinferError(f"the conversation with the agent at {url} broke off: {error}", do="see its log; try again")
