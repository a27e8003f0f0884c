"""Who may call."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from meshinfer.api.guard import Guard, is_loopback
from meshinfer.base.errors import BadInput
from meshinfer.config import Settings


async def _app(scope: Any, receive: Any, send: Any) -> None: ...


def _code(headers: dict[str, str], path: str = "/v1/models", **dials: Any) -> str:
    guard = Guard(_app, Settings(**dials), lambda: "id")
    objection = guard.objection(Headers(headers), path)
    return objection.code if objection else "open"


@pytest.mark.parametrize("host", ["127.0.0.1:52415", "localhost", "LOCALHOST:1", "[::1]:52415", "127.0.0.2"])
def test_loopback_is_open_by_its_own_names(host: str):
    assert _code({"host": host}) == "open"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:52415", "192.168.1.5", "", "[::1", "localhost.evil.example"]
)
def test_another_name_for_loopback_is_an_attack(host: str):
    assert _code({"host": host}) == "forbidden"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "http://[::1"])
def test_pages_of_other_origins_stay_out(origin: str):
    assert _code({"host": "localhost:52415", "origin": origin}) == "forbidden"


def test_the_nodes_own_page_may_call():
    assert _code({"host": "localhost:52415", "origin": "http://localhost:52415"}) == "open"


LAN = {"api_host": "192.0.2.7", "api_key": "s3cret"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "invalid_api_key"),
        ({"authorization": "Bearer s3cret"}, "open"),
        ({"authorization": "bearer  s3cret "}, "open"),
        ({"x-api-key": "s3cret"}, "open"),
        ({"authorization": "Bearer s3cre"}, "invalid_api_key"),
        ({"authorization": "Basic s3cret"}, "invalid_api_key"),
        ({"x-api-key": "\xff"}, "invalid_api_key"),
        ({"authorization": "Bearer "}, "invalid_api_key"),
    ],
)
def test_beyond_loopback_the_key_opens(headers: dict[str, str], code: str):
    assert _code({"host": "192.0.2.7", **headers}, **LAN) == code


def test_probes_need_no_key():
    assert _code({"host": "192.0.2.7"}, "/healthz", **LAN) == "open"


def test_everyone_may_come_if_that_is_said():
    assert _code({"host": "box"}, api_host="0.0.0.0", api_without_key=True) == "open"


@pytest.mark.parametrize(("headers", "code"), [({}, "invalid_api_key"), ({"x-api-key": "s3cret"}, "open")])
def test_a_key_that_is_set_is_wanted_on_loopback_too(headers: dict[str, str], code: str):
    assert _code({"host": "localhost", **headers}, api_key="s3cret") == code


def test_no_key_beyond_loopback_is_a_mistake():
    with pytest.raises(BadInput, match="no key"):
        Guard(_app, Settings(api_host="0.0.0.0"), lambda: "id")


@pytest.mark.parametrize(("host", "loopback"), [("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("a", False)])
def test_what_loopback_is(host: str, loopback: bool):
    assert is_loopback(host) == loopback
