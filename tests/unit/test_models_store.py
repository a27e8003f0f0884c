"""A model is in the store whole or not at all; what happens to it there is found and named."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import (
    BadInput,
    CorruptModel,
    DeadlineExceeded,
    MeshinferError,
    UnknownModel,
)
from meshinfer.base.ids import ModelId, parse_model_id
from meshinfer.models.disk import directory_name
from meshinfer.models.filenames import is_model_file
from meshinfer.models.manifest import check_info, decode_manifest, encode_manifest, text_files
from meshinfer.models.progress import Progress, Watch
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
from meshinfer.testing.tiny_model import describe_tiny, write_tiny_model
from meshinfer.wire.messages import ModelChunkRequest, ModelFile, ModelInfo

TINY = ModelId("owner/tiny")


def unseen(_: Progress) -> None:
    pass


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home" / "models")


def take(store: ModelStore, directory: Path, model_id: str = TINY) -> ModelInfo:
    return pull(str(directory), store, unseen, model_id, describe=describe_tiny)


@pytest.fixture
def held(store: ModelStore, tmp_path: Path) -> ModelInfo:
    return take(store, write_tiny_model(tmp_path / "tiny"))


# --- what is here ---------------------------------------------------------------------------------


def test_an_empty_store_holds_nothing(store: ModelStore) -> None:
    assert store.held() == ()
    assert store.info(TINY) is None
    with pytest.raises(UnknownModel, match="owner/tiny"):
        store.path(TINY)


def test_a_taken_model_is_listed_and_described(store: ModelStore, held: ModelInfo) -> None:
    [model] = store.held()
    assert (model.model_id, model.digest) == (TINY, held.card.digest)
    assert model.file_bytes == sum(file.size_bytes for file in held.files)
    assert store.info(TINY) == held
    assert store.path(TINY) == store.root / "owner--tiny"
    assert ModelStore(store.root).held() == store.held(), "another process sees the same"
    assert {file.name for file in text_files(held)} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    store.verify(TINY, deep=True)


def test_what_is_being_made_is_never_listed(store: ModelStore, tmp_path: Path) -> None:
    with store.making(TINY, Watch()) as staging:
        staging.begin("test")
        write_tiny_model(staging.files)
        assert store.held() == ()
        assert store.info(TINY) is None
        store.publish(staging, {}, describe_tiny, Watch())
    assert [model.model_id for model in store.held()] == [TINY]
    assert not staging.root.exists()


def test_a_directory_without_a_manifest_is_no_model_and_rm_clears_it(store: ModelStore) -> None:
    write_tiny_model(store.root / "owner--tiny")
    assert store.held() == ()
    store.remove(TINY)
    assert not (store.root / "owner--tiny").exists()


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}(/[A-Za-z0-9][A-Za-z0-9._-]{0,20})?", fullmatch=True))
def test_ids_and_directory_names_are_one_to_one_and_stay_inside(text: str) -> None:
    try:
        model_id = parse_model_id(text)
    except BadInput:
        assert ".." in text or "--" in text
        return
    name = directory_name(model_id)
    assert name.replace("--", "/", 1) == model_id.replace("---", "-/", 1) or "/" in model_id
    assert "/" not in name
    assert not name.startswith(".")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "/etc",
        "a/b/c",
        "a//b",
        "~x",
        ".partial",
        "-rf",
        "a\0b",
        "a/b\n",
        "x" * 200,
        "a--b",
    ],
)
def test_ids_that_are_none_never_reach_the_disk(store: ModelStore, tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput):
        take(store, write_tiny_model(tmp_path / "tiny"), text or "..")
    assert not store.root.exists()


@pytest.mark.parametrize(
    "name",
    ["../x.json", "/x.json", "a/x.json", ".x.json", "-x.json", "x.py", "x.bin", "model.pt", "x.safetensors", "", "..",
     "meshinfer.json", "Meshinfer.json", "x.json\0", "x.json\n", "é.json", "m" * 140 + ".json"],
)  # fmt: skip
def test_names_that_are_none_of_a_model(name: str) -> None:
    assert not is_model_file(name)


# --- damage ---------------------------------------------------------------------------------------


def test_a_truncated_file_is_found_by_its_size_and_named(store: ModelStore, held: ModelInfo) -> None:
    path = store.path(TINY) / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptModel) as caught:
        store.verify(TINY)
    assert str(path) in caught.value.what
    assert str(size - 1) in caught.value.what
    assert str(size) in caught.value.expected
    assert "models rm owner/tiny && meshinfer models pull owner/tiny" in caught.value.do


def test_a_flipped_bit_is_found_by_its_digest_and_named(store: ModelStore, held: ModelInfo) -> None:
    path = store.path(TINY) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    store.verify(TINY)
    with pytest.raises(CorruptModel, match=r"model\.safetensors has sha256"):
        store.verify(TINY, deep=True)


def test_a_missing_file_is_named(store: ModelStore, held: ModelInfo) -> None:
    (store.path(TINY) / "tokenizer.json").unlink()
    with pytest.raises(CorruptModel, match=r"tokenizer\.json is missing"):
        store.verify(TINY)


def test_a_damaged_manifest_hides_its_model_and_says_why(store: ModelStore, held: ModelInfo) -> None:
    (store.path(TINY) / "meshinfer.json").write_text("{")
    assert store.held() == ()
    with pytest.raises(CorruptModel, match="manifest"):
        store.verify(TINY)
    store.remove(TINY)
    with pytest.raises(UnknownModel):
        store.verify(TINY)


# --- manifests that lie ---------------------------------------------------------------------------


def with_files(info: ModelInfo, *more: ModelFile) -> ModelInfo:
    return ModelInfo(info.card, (*info.files, *more))


@pytest.mark.parametrize(
    "name", ["../../authorized_keys.json", "/etc/passwd.json", "a/b.json", "run.py", "config.json", "Config.json"]
)
def test_a_manifest_with_a_name_that_cannot_be_is_refused(held: ModelInfo, name: str) -> None:
    check_info(held, TINY)
    with pytest.raises(MeshinferError):
        check_info(with_files(held, ModelFile(name, 1, "0" * 64)), TINY)


def test_a_manifest_of_another_model_or_with_a_bad_digest_is_refused(held: ModelInfo) -> None:
    with pytest.raises(MeshinferError, match="owner/other"):
        check_info(held, ModelId("owner/other"))
    with pytest.raises(MeshinferError, match="sha256"):
        check_info(with_files(held, ModelFile("more.json", 1, "Z" * 64)), TINY)
    with pytest.raises(MeshinferError, match="text files"):
        check_info(with_files(held, ModelFile("special_tokens_map.json", 2**40, "0" * 64)), TINY)


def test_a_manifest_with_too_many_files_is_refused(store: ModelStore, held: ModelInfo) -> None:
    manifest = store.manifest(TINY)
    assert manifest is not None
    text = encode_manifest(manifest)
    assert decode_manifest(text, "here") == manifest
    many = ",".join(f'{{"name":"f{n}.json","size_bytes":1,"sha256":"{"0" * 64}"}}' for n in range(1025))
    with pytest.raises(CorruptModel):
        decode_manifest(text.replace(b'"files": [', b'"files": [' + many.encode() + b",", 1), "here")


# --- chunks for peers -----------------------------------------------------------------------------


def request(info: ModelInfo, name: str, offset: int = 0, length: int = 1024, digest: str = "") -> ModelChunkRequest:
    return ModelChunkRequest(info.card.model_id, digest or info.card.digest, name, offset, length)


def test_a_peer_reads_ranges_of_listed_files(store: ModelStore, held: ModelInfo) -> None:
    whole = (store.path(TINY) / "model.safetensors").read_bytes()
    assert store.read_chunk(request(held, "model.safetensors", 8, 16)).data == whole[8:24]
    assert store.read_chunk(request(held, "model.safetensors", len(whole) - 3, 100)).data == whole[-3:]
    assert store.read_chunk(request(held, "model.safetensors", len(whole))).data == b""


@pytest.mark.parametrize(
    "name", ["meshinfer.json", "../owner--tiny/config.json", "/etc/passwd", "secret.json", ".", ""]
)
def test_a_peer_reads_nothing_else(store: ModelStore, held: ModelInfo, name: str) -> None:
    (store.path(TINY) / "secret.json").write_text("{}")
    with pytest.raises(BadInput, match="no file"):
        store.read_chunk(request(held, name))


def test_a_peer_gets_errors_for_what_cannot_be(store: ModelStore, held: ModelInfo) -> None:
    with pytest.raises(UnknownModel, match="digest"):
        store.read_chunk(request(held, "config.json", digest="other"))
    with pytest.raises(BadInput, match="offset"):
        store.read_chunk(request(held, "config.json", offset=10**9))
    with pytest.raises(UnknownModel):
        store.read_chunk(ModelChunkRequest(ModelId("no/such"), "d", "config.json", 0, 1))


def test_a_peer_is_not_led_out_by_a_link(store: ModelStore, held: ModelInfo, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 1000)
    path = store.path(TINY) / "config.json"
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(CorruptModel):
        store.read_chunk(request(held, "config.json"))


def test_a_file_that_became_shorter_is_an_error_not_a_short_answer(store: ModelStore, held: ModelInfo) -> None:
    (store.path(TINY) / "config.json").write_text("{")
    with pytest.raises(CorruptModel, match="ends before"):
        store.read_chunk(request(held, "config.json"))


# --- removing, and one writer at a time -----------------------------------------------------------


def test_rm_frees_the_model_and_says_when_there_is_none(store: ModelStore, held: ModelInfo) -> None:
    store.remove(TINY)
    assert store.held() == ()
    assert [path.name for path in store.root.iterdir() if not path.name.startswith(".")] == []
    with pytest.raises(UnknownModel, match="owner/tiny"):
        store.remove(TINY)


def test_rm_keeps_the_files_that_a_directory_pull_linked(store: ModelStore, held: ModelInfo, tmp_path: Path) -> None:
    store.remove(TINY)
    assert (tmp_path / "tiny" / "model.safetensors").stat().st_size > 0


def test_the_writer_who_waits_too_long_is_told(store: ModelStore) -> None:
    path = store.root / ".locks" / "owner--tiny.lock"
    path.parent.mkdir(parents=True)
    with FileLock(path), pytest.raises(DeadlineExceeded, match="another process"), store.making(TINY, Watch(), 0.01):
        pytest.fail("two writers")


def test_two_pulls_at_once_make_one_model(store: ModelStore, tmp_path: Path) -> None:
    """The second waits for the first, and finds the model made."""
    directory = write_tiny_model(tmp_path / "tiny")
    described = threading.Barrier(2, timeout=60)
    waiting, count = threading.Event(), 0
    results: list[ModelInfo] = []

    def describe(*arguments):
        nonlocal count
        count += 1
        described.wait()  # the first pull is in the middle of it
        assert waiting.wait(60)  # the second one has seen that
        return describe_tiny(*arguments)

    def second_progress(progress: Progress) -> None:
        if progress.what.startswith("waiting"):
            waiting.set()

    def run(progress) -> None:
        results.append(pull(str(directory), store, progress, TINY, describe=describe))

    first = threading.Thread(target=run, args=(unseen,))
    first.start()
    described.wait()
    second = threading.Thread(target=run, args=(second_progress,))
    second.start()
    first.join(60)
    second.join(60)
    assert count == 1
    assert results == [store.info(TINY)] * 2


KILLED = """
import os, sys
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
from pathlib import Path
def die(directory, model_id, watch):
    os.kill(os.getpid(), 9)
pull(sys.argv[1], ModelStore(Path(sys.argv[2])), lambda _: None, "owner/tiny", describe=die)
"""


def test_a_killed_pull_leaves_nothing_listed_and_the_next_one_succeeds(store: ModelStore, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    killed = subprocess.run([sys.executable, "-c", KILLED, directory, store.root], check=False, timeout=60)
    assert killed.returncode == -9
    assert (store.root / ".partial" / "owner--tiny" / "files" / "model.safetensors").exists()
    assert store.held() == ()
    take(store, directory)
    store.verify(TINY, deep=True)
    assert not (store.root / ".partial" / "owner--tiny").exists()


def test_a_half_made_model_of_another_source_is_not_mixed_in(store: ModelStore) -> None:
    with store.making(TINY, Watch()) as staging:
        staging.begin("hub a/b@1")
        (staging.files / "old.json").write_text("{}")
        staging.begin("hub a/b@1")
        assert (staging.files / "old.json").exists()
        staging.begin("hub a/b@2")
        assert list(staging.files.iterdir()) == []


def test_a_file_that_is_not_what_its_source_promised_is_fetched_anew(store: ModelStore) -> None:
    with store.making(TINY, Watch()) as staging:
        staging.begin("test")
        write_tiny_model(staging.files)
        with pytest.raises(CorruptModel, match=r"tokenizer\.json"):
            store.publish(staging, {"tokenizer.json": "0" * 64}, describe_tiny, Watch())
        assert not (staging.files / "tokenizer.json").exists()
        assert (staging.files / "model.safetensors").exists()
    assert store.held() == ()
