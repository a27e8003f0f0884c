"""A node that holds the model: one laptop that has it is enough for the room.

A file is asked for in chunks, a few at a time, and written in order, so what is on the disk is
always a true beginning of the file and a killed transfer goes on from its length. A file gets its
name only once its sha256 is what the peer's manifest said; one that is not is fetched once more,
since the other end may be another peer by then (the caller chooses whom `read_chunk` asks). At the
end our own engine describes the model: its digest must be the one that was announced.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import exc_info
from typing import BinaryIO

import trio

from meshinfer.base.errors import CorruptModel, DeadlineExceeded, MeshinferError, PeerLost, ProtocolError, Refused
from meshinfer.base.ids import ModelId
from meshinfer.models.digests import sha256_of
from meshinfer.models.disk import require_free
from meshinfer.models.engine_jobs import Describe, describe
from meshinfer.models.manifest import check_info
from meshinfer.models.progress import Watch
from meshinfer.models.store import ModelStore, Staging
from meshinfer.planning.model_card import ModelCard
from meshinfer.wire.messages import ModelChunk, ModelChunkRequest, ModelFile, ModelInfo

ReadChunk = Callable[[ModelChunkRequest], Awaitable[ModelChunk]]

CHUNK_BYTES = 192 * 1024
"""What the protocol allows in one answer."""
_CHUNKS_IN_FLIGHT = 6
"""1.1 MiB under way: fills 100 MB/s (what a libp2p stream does) up to a round trip of 11 ms."""
_CHUNK_SECONDS = 30.0
"""192 KiB at 6 KB/s; a slower peer is none."""
_TRIES_PER_CHUNK = 4
_FIRST_PAUSE_SECONDS = 0.5
"""Before the second try; doubled for each further one, 3.5 s in all: a Wi-Fi roam."""
_FETCHES_PER_FILE = 2


async def fetch_from_peer(
    info: ModelInfo,
    read_chunk: ReadChunk,
    store: ModelStore,
    watch: Watch | None = None,
    describe: Describe = describe,
) -> ModelInfo:
    """The model into the store, or what is missing of it. Cancelling keeps what arrived.

    Raises:
        ProtocolError: what the peer says of the model cannot be.
        Refused: the model is here in another version.
        CorruptModel: a file is not what was announced, twice.
        PeerLost: the peer does not answer; DeadlineExceeded: too slowly; NoRoom: no space for it.
    """
    model_id, watch = info.card.model_id, watch or Watch()
    check_info(info, model_id)
    patient = cancellable(watch)

    def describe_alike(directory: Path, of: ModelId, by: Watch) -> ModelCard:
        card = describe(directory, of, by)
        if card.digest != info.card.digest:
            raise CorruptModel(
                f"{model_id} came with digest {card.digest}", expected=info.card.digest, do="pull it from elsewhere"
            )
        return card

    def publish(staging: Staging) -> ModelInfo:
        promised = {file.name: file.sha256 for file in info.files}
        return store.publish(staging, promised, describe_alike, patient)

    async with _making(store, model_id, patient) as staging:
        if held := store.info(model_id):
            if held.card.digest != info.card.digest:
                raise Refused(
                    f"{model_id} is here with digest {held.card.digest[:16]}…",
                    expected=f"{info.card.digest[:16]}…, the peer's",
                    do=f"`meshinfer models rm {model_id}` on one of the two nodes, so that they agree",
                )
            return held
        staging.begin(f"peer {model_id} {info.card.digest}")
        require_free(staging.root, _missing_bytes(info.files, staging), f"fetching {model_id}")
        await fetch_files(info, info.files, staging.files, staging.scratch, read_chunk, watch)
        return await trio.to_thread.run_sync(publish, staging)


async def fetch_files(
    info: ModelInfo,
    files: Sequence[ModelFile],
    directory: Path,
    scratch: Path,
    read_chunk: ReadChunk,
    watch: Watch,
) -> None:
    """Those of `files` that are not in `directory` yet, each verified before it gets its name there.

    `info` was checked (`check_info`). Halves lie in `scratch` and are gone on with.
    """
    total, done = sum(file.size_bytes for file in files), 0
    for file in files:
        if not (directory / file.name).is_file():
            half = scratch / f"{file.name}.part"
            fetches_left, found = _FETCHES_PER_FILE, ""
            while found != file.sha256:
                if not fetches_left:
                    raise CorruptModel(
                        f"{file.name} of {info.card.model_id} came with sha256 {found}",
                        expected=file.sha256,
                        do="pull from another node that holds it; this one's copy is damaged",
                    )
                fetches_left -= 1
                await _Transfer(info, file, read_chunk, half, watch, done, total).run()
                found = await trio.to_thread.run_sync(sha256_of, half, cancellable(watch))
                if found != file.sha256:
                    half.unlink()
            half.rename(directory / file.name)
        done += file.size_bytes


@dataclass(slots=True)
class _Transfer:
    """The rest of one file: several tasks ask, and write in the order of the file."""

    info: ModelInfo
    file: ModelFile
    read_chunk: ReadChunk
    half: Path
    watch: Watch
    done_before: int
    total: int
    asked: int = 0
    """Bytes up to here are written or asked for."""
    written: int = 0
    """Bytes up to here are in the file."""

    async def run(self) -> None:
        failures: list[MeshinferError | OSError] = []
        with self.half.open("ab") as out:
            if out.tell() > self.file.size_bytes:
                out.truncate(0)
            self.asked = self.written = out.tell()
            turn = trio.Condition()
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    try:
                        await self._ask(out, turn)
                    except (MeshinferError, OSError) as error:  # one that failed ends them all; told below
                        failures.append(error)
                        nursery.cancel_scope.cancel()

                for _ in range(_CHUNKS_IN_FLIGHT):
                    nursery.start_soon(ask)
        if failures:
            raise failures[0]

    async def _ask(self, out: BinaryIO, turn: trio.Condition) -> None:
        while (offset := self.asked) < self.file.size_bytes:
            length = min(CHUNK_BYTES, self.file.size_bytes - offset)
            self.asked += length
            data = await self._chunk(offset, length)
            async with turn:
                while self.written != offset:
                    await turn.wait()
                await trio.to_thread.run_sync(out.write, data)
                self.written += length
                turn.notify_all()
            what = f"fetching {self.file.name} of {self.info.card.model_id}"
            self.watch(what, self.done_before + self.written, self.total)

    async def _chunk(self, offset: int, length: int) -> bytes:
        request = ModelChunkRequest(
            self.info.card.model_id, self.info.card.digest, self.file.name, offset=offset, length=length
        )
        pause_seconds = _FIRST_PAUSE_SECONDS
        for _ in range(_TRIES_PER_CHUNK - 1):
            try:
                return await self._try_chunk(request)
            except (PeerLost, DeadlineExceeded):
                await trio.sleep(pause_seconds)
                pause_seconds *= 2
        return await self._try_chunk(request)

    async def _try_chunk(self, request: ModelChunkRequest) -> bytes:
        what = f"{request.length} bytes at {request.offset} of {request.name} of {request.model_id}"
        try:
            with trio.fail_after(_CHUNK_SECONDS):
                data = (await self.read_chunk(request)).data
        except trio.TooSlowError:
            raise DeadlineExceeded(
                f"{what} did not come within {_CHUNK_SECONDS:.0f} s",
                do="pull again: it goes on from here, from any node that holds the model",
            ) from None
        if len(data) != request.length:
            raise ProtocolError(
                f"{len(data)} bytes for {what}", do="pull from another node; this one's copy is damaged"
            )
        return data


def cancellable(watch: Watch) -> Watch:
    """The same watch, for a worker thread of trio: it also ends the job when the task that waits for it is cancelled."""

    def should_stop() -> bool:
        trio.from_thread.check_cancelled()
        return watch.should_stop()

    return Watch(watch.progress, should_stop)


@asynccontextmanager
async def _making(store: ModelStore, model_id: ModelId, watch: Watch) -> AsyncGenerator[Staging]:
    """`store.making`, waiting for the lock in a thread."""
    making = store.making(model_id, watch)
    staging = await trio.to_thread.run_sync(making.__enter__)
    try:
        yield staging
    except BaseException:
        making.__exit__(*exc_info())  # raises: the same error, or what it means to a person
        raise
    else:
        making.__exit__(None, None, None)


def _missing_bytes(files: Sequence[ModelFile], staging: Staging) -> int:
    missing = 0
    for file in files:
        half = staging.scratch / f"{file.name}.part"
        if not (staging.files / file.name).is_file():
            missing += file.size_bytes - (half.stat().st_size if half.is_file() else 0)
    return missing
