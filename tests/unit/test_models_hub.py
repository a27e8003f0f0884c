"""A repository of the hub, from a small server on loopback that speaks as much of the hub's API as we need.

The hub's library reads its environment when it is imported, so each pull runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from meshinfer.base.units import MIB
from meshinfer.models.store import ModelStore
from meshinfer.testing.tiny_model import safetensors_bytes, write_tiny_model

REVISION = "c0ffee" + "0" * 34
REPOSITORY = "owner/tiny"

PULL = """
import json, sys
from pathlib import Path
from meshinfer.base.errors import MeshinferError
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
from meshinfer.testing.tiny_model import describe_tiny
seen = []
stop_at = int(sys.argv[3])
def stop():
    reached = bool(stop_at) and bool(seen) and seen[-1].done_bytes >= stop_at
    if reached:
        print("reached", flush=True)
    return reached
try:
    pull(sys.argv[1], ModelStore(Path(sys.argv[2])), seen.append, should_stop=stop, describe=describe_tiny)
    print(json.dumps({"done": max(moment.done_bytes for moment in seen)}))
except MeshinferError as error:
    print(json.dumps({"code": error.code, "text": str(error)}))
"""


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]]
    served: ClassVar[list[tuple[str, str, str]]]
    """(method, file, Range)"""
    cut_at: ClassVar[int]
    """Hang up after this many bytes of the weights, once; 0 never."""
    hold_at: ClassVar[int]
    """After this many bytes of the weights, once, wait for `go_on`; 0 never."""
    go_on: ClassVar[threading.Event]
    gated: ClassVar[bool]
    busy: ClassVar[int]
    """So many requests for files get 429."""

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in (f"/api/models/{REPOSITORY}", f"/api/models/{REPOSITORY}/revision/{REVISION}"):
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "blobId": hashlib.sha1(data).hexdigest(),
                    "lfs": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 1},
                }
                for name, data in type(self).files.items()
            ]
            body = json.dumps({"id": REPOSITORY, "sha": REVISION, "siblings": siblings}).encode()
            return self.answer(200, {"Content-Type": "application/json"}, body)
        prefix = f"/{REPOSITORY}/resolve/{REVISION}/"
        name = path.removeprefix(prefix)
        if not path.startswith(prefix) or name not in type(self).files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound" if prefix in path else "RepoNotFound"}, b"{}")
        if type(self).gated and self.headers.get("Authorization") != "Bearer hf_secret":
            return self.answer(403, {"X-Error-Code": "GatedRepo"}, b"{}")
        if type(self).busy:
            type(self).busy -= 1
            return self.answer(429, {"Retry-After": "0"})
        data, span = type(self).files[name], self.headers.get("Range", "")
        type(self).served.append((self.command, name, span))
        begin = int(span.removeprefix("bytes=").partition("-")[0]) if span and self.command == "GET" else 0
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        rest = data[begin:]
        if self.command == "GET" and type(self).cut_at and name == "model.safetensors":
            cut, type(self).cut_at = type(self).cut_at, 0
            self.close_connection = True
            return self.answer(200, headers, rest[:cut], len(rest))
        if self.command == "GET" and type(self).hold_at and name == "model.safetensors":
            hold, type(self).hold_at = type(self).hold_at, 0
            self.answer(200, headers, rest[:hold], len(rest))
            assert type(self).go_on.wait(60)
            with contextlib.suppress(OSError):  # the other end was killed, or has stopped
                self.wfile.write(rest[hold:])
            return None
        return self.answer(206 if begin else 200, headers, rest)


@pytest.fixture
def hub(tmp_path: Path) -> Generator[type[Hub]]:
    directory = write_tiny_model(tmp_path / "repository")
    (directory / "model.safetensors").write_bytes(safetensors_bytes({"w": (8 * 1024, 1024)}))
    for name in ("modeling.py", "README.md", "consolidated.safetensors", "pytorch_model.bin"):
        (directory / name).write_text("x")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    files["original/params.json"] = b"{}"
    state = {"files": files, "served": [], "cut_at": 0, "hold_at": 0, "go_on": threading.Event()}
    kind = type("ThisHub", (Hub,), {**state, "gated": False, "busy": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    kind.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield kind
    server.shutdown()
    server.server_close()
    thread.join()


def start(tmp_path: Path, url: str, what: str = REPOSITORY, stop_at: int = 0, **more: str) -> subprocess.Popen[str]:
    environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), **more}
    return subprocess.Popen(
        [sys.executable, "-c", PULL, what, tmp_path / "models", str(stop_at)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def run(tmp_path: Path, url: str, what: str = REPOSITORY, **more: str) -> dict[str, object]:
    process = start(tmp_path, url, what, **more)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_only_what_a_model_needs_is_fetched_at_one_revision(tmp_path: Path, hub: type[Hub]) -> None:
    outcome = run(tmp_path, hub.url)
    assert outcome == {"done": sum(file.size_bytes for file in store(tmp_path).info(REPOSITORY).files)}
    store(tmp_path).verify(REPOSITORY, deep=True)
    assert store(tmp_path).manifest(REPOSITORY).source == f"hub {REPOSITORY}@{REVISION}"
    assert {name for method, name, _ in hub.served if method == "GET"} == {
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_pull_that_was_ended_goes_on_where_it_was(tmp_path: Path, hub: type[Hub], end: str) -> None:
    hub.hold_at = 25 * MIB
    process = start(tmp_path, hub.url, stop_at=20 * MIB)
    assert process.stdout is not None
    assert process.stdout.readline() == "reached\n"
    if end == "kill":
        process.kill()
    hub.go_on.set()
    output, _ = process.communicate(timeout=60)
    assert end == "kill" or json.loads(output)["code"] == "stopped"
    assert store(tmp_path).held() == ()
    first = len(hub.served)
    assert "done" in run(tmp_path, hub.url)
    ranges = [span for method, name, span in hub.served[first:] if (method, name) == ("GET", "model.safetensors")]
    assert len(ranges) == 1
    assert int(ranges[0].removeprefix("bytes=").rstrip("-")) >= 10 * MIB
    assert not [name for method, name, _ in hub.served[first:] if method == "GET" and name == "tokenizer.json"]
    store(tmp_path).verify(REPOSITORY, deep=True)


def test_a_connection_that_breaks_is_resumed_by_itself(tmp_path: Path, hub: type[Hub]) -> None:
    hub.cut_at = 20_000_000
    assert "done" in run(tmp_path, hub.url)
    store(tmp_path).verify(REPOSITORY, deep=True)


def test_remote_code_is_refused_before_the_weights_are_fetched(tmp_path: Path, hub: type[Hub]) -> None:
    hub.files["config.json"] = json.dumps({"model_type": "martian", "auto_map": {"AutoModel": "m.M"}}).encode()
    outcome = run(tmp_path, hub.url)
    assert outcome["code"] == "bad_input"
    assert "auto_map" in outcome["text"]
    assert {name for method, name, _ in hub.served if method == "GET"} == {"config.json"}
    assert store(tmp_path).unfinished() == {}


def test_pickles_only_is_refused_by_the_listing(tmp_path: Path, hub: type[Hub]) -> None:
    del hub.files["model.safetensors"]
    outcome = run(tmp_path, hub.url)
    assert outcome["code"] == "bad_input"
    assert "pytorch_model.bin" in outcome["text"]
    assert hub.served == []


def test_an_unknown_repository_and_a_gated_one(tmp_path: Path, hub: type[Hub]) -> None:
    outcome = run(tmp_path, hub.url, "owner/none")
    assert outcome["code"] == "model_not_found"
    hub.gated = True  # it is listed for anyone; only its files are kept back
    outcome = run(tmp_path, hub.url)
    assert outcome["code"] == "bad_input"
    assert "HF_TOKEN" in outcome["text"]
    assert "done" in run(tmp_path, hub.url, HF_TOKEN="hf_secret")


def test_a_hub_that_is_busy_is_asked_again_when_it_says(tmp_path: Path, hub: type[Hub]) -> None:
    hub.busy = 3
    assert "done" in run(tmp_path, hub.url)
    store(tmp_path).verify(REPOSITORY, deep=True)


def test_offline_is_respected_and_said(tmp_path: Path, hub: type[Hub]) -> None:
    outcome = run(tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert outcome["code"] == "peer_lost"
    assert "HF_HUB_OFFLINE" in outcome["text"]
    assert hub.served == []


def test_no_network_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    outcome = run(tmp_path, url)
    assert outcome["code"] == "peer_lost"
    assert "cannot be reached" in outcome["text"]


def test_what_the_hubs_own_cache_holds_is_not_downloaded_again(tmp_path: Path, hub: type[Hub]) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--owner--tiny" / "snapshots" / REVISION
    write_tiny_model(snapshot)
    (snapshot / "model.safetensors").write_bytes(hub.files["model.safetensors"])
    reference = snapshot.parent.parent / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(REVISION)
    assert "done" in run(tmp_path, hub.url)
    assert hub.served == []
    store(tmp_path).remove(REPOSITORY)
    assert "done" in run(tmp_path, hub.url, HF_HUB_OFFLINE="1"), "also without the hub"
    assert store(tmp_path).manifest(REPOSITORY).source == f"hub {REPOSITORY}@{REVISION}"
