"""One laptop that has the model is enough: the others fetch it, or only its tokenizer, from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from meshinfer.base.errors import CorruptModel, DeadlineExceeded, PeerLost, ProtocolError, Refused, UnknownModel
from meshinfer.base.ids import ModelId
from meshinfer.models.progress import Progress, Stopped, Watch
from meshinfer.models.pull import pull
from meshinfer.models.sources.peer import CHUNK_BYTES, cancellable, fetch_from_peer
from meshinfer.models.store import ModelStore
from meshinfer.models.text_cache import TextCache
from meshinfer.testing.tiny_model import describe_tiny, safetensors_bytes, write_tiny_model
from meshinfer.wire.messages import ModelChunk, ModelChunkRequest, ModelFile, ModelInfo

TINY = ModelId("owner/tiny")


@pytest.fixture
def there(tmp_path: Path) -> ModelStore:
    """The peer's store, with one model of some 40 chunks."""
    directory = write_tiny_model(tmp_path / "tiny")
    weights = safetensors_bytes({"model.layers.0.weight": (1024, 1900)}, fill=b"\7")
    (directory / "model.safetensors").write_bytes(weights)
    assert len(weights) > 39 * CHUNK_BYTES
    store = ModelStore(tmp_path / "there")
    pull(str(directory), store, lambda _: None, TINY, describe=describe_tiny)
    return store


@pytest.fixture
def here(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "here")


def told(store: ModelStore) -> ModelInfo:
    info = store.info(TINY)
    assert info is not None
    return info


class Wire:
    """Reads from a store as a peer would, and does what a test wants to single requests."""

    def __init__(self, store: ModelStore, harm: Callable[[int, ModelChunkRequest, bytes], bytes] | None = None) -> None:
        self.store, self.harm = store, harm or (lambda _number, _request, data: data)
        self.requests: list[ModelChunkRequest] = []
        self.at_once = self.most_at_once = 0

    async def __call__(self, request: ModelChunkRequest) -> ModelChunk:
        self.requests.append(request)
        number = len(self.requests)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.lowlevel.checkpoint()
            return ModelChunk(self.harm(number, request, self.store.read_chunk(request).data))
        finally:
            self.at_once -= 1


async def fetch(there: ModelStore, here: ModelStore, wire: Wire, watch: Watch | None = None) -> ModelInfo:
    return await fetch_from_peer(told(there), wire, here, watch, describe_tiny)


async def test_a_model_comes_over_whole_with_few_chunks_in_flight(there: ModelStore, here: ModelStore) -> None:
    wire, seen = Wire(there), list[Progress]()
    info = await fetch(there, here, wire, Watch(seen.append))
    assert info == told(there) == here.info(TINY)
    here.verify(TINY, deep=True)
    assert 1 < wire.most_at_once <= 8
    fetching = [moment.done_bytes for moment in seen if moment.what.startswith("fetching")]
    assert fetching == sorted(fetching)
    assert fetching[-1] == sum(file.size_bytes for file in info.files)


async def test_fetching_what_is_here_asks_for_nothing(there: ModelStore, here: ModelStore) -> None:
    await fetch(there, here, Wire(there))
    wire = Wire(there)
    assert await fetch(there, here, wire) == told(there)
    assert wire.requests == []


async def test_another_version_of_a_model_that_is_here_is_not_mixed_in(
    there: ModelStore, here: ModelStore, tmp_path: Path
) -> None:
    pull(str(write_tiny_model(tmp_path / "other")), here, lambda _: None, TINY, describe=describe_tiny)
    with pytest.raises(Refused, match=r"is here with digest.*models rm owner/tiny"):
        await fetch(there, here, Wire(there))


async def test_a_stopped_fetch_goes_on_from_where_it_was(there: ModelStore, here: ModelStore) -> None:
    moments = 0

    def enough() -> bool:
        nonlocal moments
        moments += 1
        return moments > 20

    wire = Wire(there)
    with pytest.raises(Stopped):
        await fetch(there, here, wire, Watch(should_stop=enough))
    assert here.held() == ()
    first = {(request.name, request.offset) for request in wire.requests}
    again = Wire(there)
    await fetch(there, here, again)
    second = {(request.name, request.offset) for request in again.requests}
    assert len(first & second) <= 6, "only what was in flight is asked for again"
    here.verify(TINY, deep=True)


async def test_a_cancelled_fetch_leaves_the_lock_free_and_the_next_one_goes_on(
    there: ModelStore, here: ModelStore
) -> None:
    with trio.CancelScope() as scope:

        def cancel_midway(number: int, _request: ModelChunkRequest, data: bytes) -> bytes:
            if number == 25:
                scope.cancel()
            return data

        await fetch(there, here, Wire(there, cancel_midway))
    assert scope.cancelled_caught
    await fetch(there, here, Wire(there))
    here.verify(TINY, deep=True)


async def test_a_worker_thread_ends_when_the_task_that_waits_for_it_is_cancelled() -> None:
    with trio.CancelScope() as scope:

        def endless() -> None:
            watch = cancellable(Watch())
            while True:
                watch("working")
                trio.from_thread.run_sync(scope.cancel)

        await trio.to_thread.run_sync(endless)
    assert scope.cancelled_caught


async def test_a_corrupt_chunk_is_found_and_its_file_fetched_again(there: ModelStore, here: ModelStore) -> None:
    harmed = False

    def flip_one(_number: int, request: ModelChunkRequest, data: bytes) -> bytes:
        nonlocal harmed
        if request.name == "model.safetensors" and request.offset > 0 and not harmed:
            harmed = True
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    await fetch(there, here, Wire(there, flip_one))
    assert harmed
    here.verify(TINY, deep=True)


async def test_a_peer_whose_copy_is_damaged_is_named_as_that(there: ModelStore, here: ModelStore) -> None:
    def flip_all(_number: int, request: ModelChunkRequest, data: bytes) -> bytes:
        return data if request.name != "tokenizer.json" else bytes(len(data))

    with pytest.raises(CorruptModel, match=r"tokenizer\.json of owner/tiny came with sha256"):
        await fetch(there, here, Wire(there, flip_all))
    assert here.held() == ()


async def test_a_short_chunk_is_a_protocol_error(there: ModelStore, here: ModelStore) -> None:
    with pytest.raises(ProtocolError, match="bytes for"):
        await fetch(there, here, Wire(there, lambda _number, _request, data: data[:-1]))


async def test_a_lost_chunk_is_asked_for_again_a_lost_peer_is_told(
    there: ModelStore, here: ModelStore, autojump_clock: MockClock
) -> None:
    def lose_some(number: int, _request: ModelChunkRequest, data: bytes) -> bytes:
        if number % 3 == 0:
            raise PeerLost("gone for a moment")
        return data

    await fetch(there, here, Wire(there, lose_some))
    here.verify(TINY, deep=True)
    here.remove(TINY)

    def lose_all(_number: int, _request: ModelChunkRequest, data: bytes) -> bytes:
        raise PeerLost("gone for good")

    with pytest.raises(PeerLost, match="for good"):
        await fetch(there, here, Wire(there, lose_all))
    assert here.held() == ()


async def test_a_peer_that_says_nothing_is_given_up(
    there: ModelStore, here: ModelStore, autojump_clock: MockClock
) -> None:
    async def silent(_: ModelChunkRequest) -> ModelChunk:
        await trio.sleep_forever()

    with pytest.raises(DeadlineExceeded, match="did not come within"):
        await fetch_from_peer(told(there), silent, here, None, describe_tiny)


async def test_another_error_of_the_peer_arrives_as_it_is(there: ModelStore, here: ModelStore) -> None:
    info = told(there)
    there.remove(TINY)
    with pytest.raises(UnknownModel):
        await fetch_from_peer(info, Wire(there), here, None, describe_tiny)


async def test_a_peer_that_lies_about_names_gets_no_request(there: ModelStore, here: ModelStore) -> None:
    info, wire = told(there), Wire(there)
    for name in ("../../.bashrc.json", "/etc/cron.json", "run.py"):
        lie = ModelInfo(info.card, (*info.files, ModelFile(name, 3, "0" * 64)))
        with pytest.raises(ProtocolError):
            await fetch_from_peer(lie, wire, here, None, describe_tiny)
    assert wire.requests == []
    assert not here.root.exists()


async def test_a_peer_that_lies_about_the_digest_is_found_out(there: ModelStore, here: ModelStore) -> None:
    def another(directory, model_id, watch):
        (directory / "config.json").write_text('{"model_type": "llama"}')
        return describe_tiny(directory, model_id, watch)

    with pytest.raises(CorruptModel, match="digest"):
        await fetch_from_peer(told(there), Wire(there), here, None, another)
    assert here.held() == ()


# --- only the text --------------------------------------------------------------------------------


async def test_an_origin_fetches_the_text_files_and_no_weights(there: ModelStore, tmp_path: Path) -> None:
    cache, wire, info = TextCache(tmp_path / "text"), Wire(there), told(there)
    directory = await cache.fetch(info, wire)
    assert sorted(path.name for path in directory.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert directory.parent == tmp_path / "text"
    asked = len(wire.requests)
    assert await cache.fetch(info, wire) == directory
    assert len(wire.requests) == asked
    (directory / "tokenizer.json").write_text("")
    await cache.fetch(info, wire)
    assert (directory / "tokenizer.json").read_bytes() == (there.path(TINY) / "tokenizer.json").read_bytes()


async def test_two_text_fetches_at_once_end_with_one_directory(there: ModelStore, tmp_path: Path) -> None:
    cache, info = TextCache(tmp_path / "text"), told(there)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(cache.fetch, info, Wire(there))
    found, wire = [path for path in (tmp_path / "text").iterdir() if path.name != ".partial"], Wire(there)
    assert found == [await cache.fetch(info, wire)]
    assert wire.requests == [], "it is whole"
    assert list((tmp_path / "text" / ".partial").iterdir()) == []


async def test_a_damaged_text_file_is_never_seen(there: ModelStore, tmp_path: Path) -> None:
    cache, info = TextCache(tmp_path / "text"), told(there)
    with pytest.raises(CorruptModel):
        await cache.fetch(info, Wire(there, lambda _number, _request, data: bytes(len(data))))
    assert list((tmp_path / "text").iterdir()) == [tmp_path / "text" / ".partial"]
    assert list((tmp_path / "text" / ".partial").iterdir()) == []
