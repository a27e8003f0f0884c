"""Steering the mesh over HTTP: previews that can be posted, instances that come and go, refusals with numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_server import ASK, MODEL, running

from meshinfer.base.errors import PeerLost
from meshinfer.base.units import MIB
from meshinfer.testing.backend import NODE_IDS, FakeBackend, Script


async def test_a_preview_can_be_posted_deleted_and_posted_again(tmp_path: Path):
    async with running(tmp_path) as server:
        answer = await server.http("GET", f"/instance/previews?model_id={MODEL}&context=256&concurrency=2")
        previews = answer.json()["previews"]
        assert [preview["nodes"] for preview in previews] == [list(NODE_IDS[:count]) for count in (1, 2, 3)]
        for body in (previews[1], {"placement": previews[1]["placement"]}, previews[1]["placement"]):
            placed = await server.http("POST", "/instance", json=body)
            assert placed.status_code == 201
            instance = placed.json()
            assert instance["placement"] == previews[1]["placement"]
            assert (instance["state"], instance["model_id"]) == ("ready", MODEL)
            seen = await server.http("GET", placed.headers["location"])
            assert seen.json() == instance
            assert (await server.http("GET", "/instance")).json() == {"instances": [instance]}
            deleted = await server.http("DELETE", placed.headers["location"])
            assert deleted.json() == {
                "instance_id": instance["instance_id"],
                "freed_bytes": dict.fromkeys(NODE_IDS[:2], MIB),
                "unconfirmed": [],
            }
            assert (await server.http("GET", "/instance")).json() == {"instances": []}


async def test_a_preview_says_what_each_node_would_give(tmp_path: Path):
    async with running(tmp_path) as server:
        answer = await server.http("GET", f"/instance/previews?model_id={MODEL}")
        first = answer.json()["previews"][0]
    assert (first["sharding"], first["instance_meta"], first["error"]) == ("Pipeline", "Libp2p", None)
    memory = first["memory_delta_by_node"][NODE_IDS[0]]
    assert memory["total"] == sum(count for name, count in memory.items() if name != "total")


async def test_refusals_are_listed_with_need_have_and_shortfall(tmp_path: Path):
    async with running(tmp_path, backend=FakeBackend(tmp_path, node_memory_bytes=8 * MIB)) as server:
        answer = await server.http("GET", f"/instance/previews?model_id={MODEL}&context=64&concurrency=1")
        previews = answer.json()["previews"]
        possible = [preview for preview in previews if preview["error"] is None]
        refused = [preview for preview in previews if preview["error"] is not None]
        assert [len(preview["nodes"]) for preview in possible] == [3]
        (seat,) = [seat for seat in refused[0]["memory"] if seat["shortfall_bytes"]]
        assert seat["need_bytes"] - seat["free_bytes"] == seat["shortfall_bytes"] > 0
        assert refused[0]["placement"] is None


async def test_a_wish_is_planned_within_its_limits(tmp_path: Path):
    async with running(tmp_path) as server:
        body = {
            "model_id": MODEL,
            "context": 128,
            "concurrency": 1,
            "nodes": ["laptop-1", NODE_IDS[2]],
            "exclude": None,
        }
        placed = await server.http("POST", "/instance", json=body)
    assert placed.status_code == 201
    placement = placed.json()["placement"]
    assert (placement["context_tokens"], placement["concurrency"]) == (128, 1)
    assert [seat["node_id"] for seat in placement["seats"]] == [NODE_IDS[1]]


async def test_what_has_no_place_is_refused_with_its_reasons(tmp_path: Path):
    async with running(tmp_path, backend=FakeBackend(tmp_path, node_memory_bytes=MIB)) as server:
        refused = await server.http("POST", "/instance", json={"model_id": MODEL})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_room")
    assert len(refused.json()["refusals"]) == 3
    assert refused.json()["refusals"][0]["memory"][0]["shortfall_bytes"] > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model_id"),
        ({"model_id": "../x"}, "model_id"),
        ({"model_id": MODEL, "contxt": 5}, "contxt"),
        ({"model_id": MODEL, "context": 0}, "context"),
        ({"model_id": MODEL, "nodes": ["nobody"]}, "nodes"),
        ({"placement": {}}, "placement"),
        ({"placement": {}, "colour": "red"}, "colour"),
    ],
)
async def test_a_wish_that_cannot_be_is_unprocessable(tmp_path: Path, body: dict[str, Any], param: str):
    async with running(tmp_path) as server:
        answer = await server.http("POST", "/instance", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)


async def test_a_changed_placement_does_not_pass(tmp_path: Path):
    async with running(tmp_path) as server:
        answer = await server.http("GET", f"/instance/previews?model_id={MODEL}")
        placement = answer.json()["previews"][0]["placement"]
        changed = await server.http("POST", "/instance", json={**placement, "concurrency": 99})
        assert (changed.status_code, changed.json()["error"]["param"]) == (422, "placement.placement_id")
        gap = {**placement, "placement_id": None, "seats": [{**placement["seats"][0], "end": 5}]}
        assert (await server.http("POST", "/instance", json=gap)).status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/instance/previews", 400),
        ("GET", "/instance/previews?model_id=who/knows", 404),
        ("GET", f"/instance/previews?model_id={MODEL}&context=many", 400),
        ("GET", f"/instance/previews?model_id={MODEL}&model_id={MODEL}", 400),
        ("GET", f"/instance/previews?model_id={MODEL}&colour=red", 400),
        ("GET", f"/instance/previews?model_id={MODEL}&exclude=nobody", 400),
        ("GET", "/instance/0123456789abcdef", 404),
        ("DELETE", "/instance/0123456789abcdef", 404),
        ("PUT", "/instance", 405),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/nowhere", 404),
    ],
)
async def test_errors_have_one_shape(tmp_path: Path, method: str, path: str, status: int):
    async with running(tmp_path) as server:
        answer = await server.http(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.headers["x-request-id"]) == 32


async def test_another_method_is_told_which_there_are(tmp_path: Path):
    async with running(tmp_path) as server:
        answer = await server.http("PUT", "/instance")
        nowhere = await server.http("PUT", "/nowhere")
    assert (answer.json()["error"]["code"], answer.headers["allow"]) == ("method_not_allowed", "GET, HEAD, POST")
    assert "expected GET, HEAD, POST" in answer.json()["error"]["message"]
    assert nowhere.json()["error"]["code"] == "not_found"


async def test_what_the_node_believes(tmp_path: Path):
    async with running(tmp_path) as server:
        await server.http("POST", "/v1/chat/completions", json=ASK)
        state = (await server.http("GET", "/state")).json()
        assert (await server.http("GET", "/node_id")).json() == state["node_id"] == NODE_IDS[0]
        assert (await server.http("GET", "/topology")).json() == state["topology"]
        assert set(state["topology"]["nodes"]) == set(NODE_IDS)
        assert state["instances"][0]["model_id"] == MODEL
        assert (await server.http("GET", "/models")).json()["models"] == state["models"]
        assert "hello" not in str(state)


async def test_ready_means_that_it_can_generate(tmp_path: Path):
    async with running(tmp_path) as server:
        assert (await server.http("GET", "/readyz")).status_code == 200
        server.backend.unready = "the session task is stuck"
        answer = await server.http("GET", "/readyz")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the session task is stuck")
        assert (await server.http("GET", "/healthz")).status_code == 200


async def test_metrics_count_what_happened(tmp_path: Path):
    async with running(tmp_path, backend=FakeBackend(tmp_path, script=Script(answer="hi"))) as server:
        await server.http("POST", "/v1/chat/completions", json=ASK)
        server.backend.script = Script(fail=PeerLost("gone"))
        await server.http("POST", "/v1/chat/completions", json=ASK)
        await server.http("GET", "/instance/0123456789abcdef")
        lines = (await server.http("GET", "/metrics")).text.splitlines()
    assert 'meshinfer_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in lines
    assert 'meshinfer_http_requests_total{route="/v1/chat/completions",status="503"} 1.0' in lines
    assert 'meshinfer_http_requests_total{route="/instance/{instance_id}",status="404"} 1.0' in lines
    assert 'meshinfer_tokens_total{kind="generated"} 3.0' in lines
    assert "meshinfer_time_to_first_token_seconds_count 1.0" in lines
    assert "meshinfer_inter_token_latency_seconds_count 2.0" in lines
    assert "meshinfer_sessions 0.0" in lines
    assert "meshinfer_topology_nodes 3.0" in lines


async def test_the_page_shows_the_mesh_and_trusts_no_name(tmp_path: Path):
    async with running(tmp_path) as server:
        await server.http("POST", "/v1/chat/completions", json=ASK)
        page = await server.http("GET", "/")
        # Whatever else it holds, nothing is loaded from elsewhere and nothing runs.
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert f"{server.url}/v1" in page.text
    assert "laptop-2" in page.text
    assert "<script" not in page.text
