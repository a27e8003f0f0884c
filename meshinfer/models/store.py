"""The models that this node holds.

    HOME/models/owner--name/              a model: an mlx-lm directory and its manifest, `meshinfer.json`
    HOME/models/.partial/owner--name/     one that is being made: `files/`, `scratch/`, and `source`, a note
    HOME/models/.locks/owner--name.lock   held by the one process that makes or removes it

A model is made in `.partial`, where nobody looks; verified; written through to the disk; then
renamed to its place. So a model is there whole or not at all, and a pull that was killed is gone
on with by the next one. A partial model remembers its source, and one from another source (another
revision, too) starts anew, so that two versions never mix.

After that a file can still be damaged. `verify` compares sizes, which costs nothing and is done
before each load; with `deep`, digests too.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from meshinfer import __version__
from meshinfer.base.errors import BadInput, CorruptModel, DeadlineExceeded, MeshinferError, Refused, UnknownModel
from meshinfer.base.files import write_atomically
from meshinfer.base.ids import ModelId
from meshinfer.models.digests import sha256_of
from meshinfer.models.disk import directory_name, disk_errors, publish_directory
from meshinfer.models.engine_jobs import Describe
from meshinfer.models.filenames import MANIFEST
from meshinfer.models.manifest import FORMAT, Manifest, check_info, decode_manifest, encode_manifest
from meshinfer.models.progress import Watch
from meshinfer.models.soundness import check_model, model_files
from meshinfer.topology.card import HeldModel
from meshinfer.wire.messages import ModelChunk, ModelChunkRequest, ModelFile, ModelInfo

PULL_WAIT_SECONDS = 3600.0
"""How long a pull waits for another pull of the same model; then it usually finds the model made."""
REMOVE_WAIT_SECONDS = 10.0
_LOCK_LOOK_SECONDS = 0.5
_NOTE = "source"
"""In a partial model's directory: its id, a line feed, its source."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A model in the making; its owner holds the model's lock."""

    model_id: ModelId
    root: Path

    @property
    def files(self) -> Path:
        """What will be the model's directory."""
        return self.root / "files"

    @property
    def scratch(self) -> Path:
        """What a source needs on the way: kept for the next attempt, deleted at the end."""
        return self.root / "scratch"

    @property
    def source(self) -> str:
        """What `begin` was told; empty before that."""
        return _read_note(self.root)[1]

    def begin(self, source: str) -> None:
        """Go on with what an earlier attempt left, if it was from the same source; else start empty."""
        if _read_note(self.root) != (self.model_id, source):
            self.discard()
            self.root.mkdir(parents=True)
            (self.root / _NOTE).write_text(f"{self.model_id}\n{source}", encoding="utf-8")
        self.files.mkdir(exist_ok=True)
        self.scratch.mkdir(exist_ok=True)

    def discard(self) -> None:
        """Nothing of it will be of use to a further attempt."""
        shutil.rmtree(self.root, ignore_errors=True)


class ModelStore:
    """The models under one directory. Any number of processes may share it.

    Methods block on the disk; callers in an event loop give them a thread.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifests: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
        """Manifests as last read, with what their file's status was then. A peer asks for thousands of chunks."""

    # --- asking -----------------------------------------------------------------------------------

    def held(self) -> tuple[HeldModel, ...]:
        """Every model that is here whole, by id. A damaged manifest hides its model; `verify` says why."""
        found: list[HeldModel] = []
        for path in sorted(self.root.glob(f"*/{MANIFEST}")):
            try:
                manifest = self._read(path)
            except (CorruptModel, OSError):
                continue  # removed just now, or damaged: not something to offer
            card = manifest.info.card
            if directory_name(card.model_id) == path.parent.name:
                found.append(HeldModel(card.model_id, card.digest, manifest.size_bytes))
        return tuple(sorted(found, key=lambda model: model.model_id))

    def unfinished(self) -> dict[ModelId, int]:
        """Bytes on disk of models that are being made, or whose making was broken off."""
        found: dict[ModelId, int] = {}
        for root in sorted((self.root / ".partial").glob("*")):
            name, _ = _read_note(root)
            if name and directory_name(ModelId(name)) == root.name:
                found[ModelId(name)] = _bytes_below(root)
        return found

    def manifest(self, model_id: ModelId) -> Manifest | None:
        """All that is known of a held model; None if it is not here.

        Raises:
            CorruptModel: it is here with a damaged manifest.
        """
        path = self._place(model_id) / MANIFEST
        try:
            manifest = self._read(path)
        except FileNotFoundError:
            return None
        # A disk that ignores case finds `Owner/Name` under `owner--name`.
        return manifest if manifest.info.card.model_id == model_id else None

    def info(self, model_id: ModelId) -> ModelInfo | None:
        """What a peer is told of a held model; None if it is not here."""
        manifest = self.manifest(model_id)
        return manifest.info if manifest else None

    def path(self, model_id: ModelId) -> Path:
        """The mlx-lm directory of a held model.

        Raises:
            UnknownModel: it is not here.
        """
        self._require(model_id)
        return self._place(model_id)

    def verify(self, model_id: ModelId, deep: bool = False, watch: Watch | None = None) -> None:
        """The model's files are what its manifest says: sizes always, digests if `deep`.

        Raises:
            UnknownModel: it is not here.
            CorruptModel: the first file that is not right.
        """
        directory = self._place(model_id)
        for file in self._require(model_id).info.files:
            path = directory / file.name
            try:
                status = path.stat()
            except FileNotFoundError:
                raise _damaged(model_id, f"{path} is missing", f"{file.size_bytes} bytes") from None
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.size_bytes:
                raise _damaged(model_id, f"{path} has {status.st_size} bytes", f"{file.size_bytes}")
            if deep and (found := sha256_of(path, watch or Watch())) != file.sha256:
                raise _damaged(model_id, f"{path} has sha256 {found}", file.sha256)

    def read_chunk(self, request: ModelChunkRequest) -> ModelChunk:
        """A range of a file, for a peer. The name is looked up in the manifest; no path is the peer's choosing.

        Raises:
            UnknownModel: not here, or here with another digest.
            BadInput: no such file, or a range outside it.
            CorruptModel: the file is shorter than it should be.
        """
        info = self._require(request.model_id).info
        if info.card.digest != request.digest:
            raise UnknownModel(
                f"{request.model_id} with digest {request.digest[:16]}…",
                expected=f"{info.card.digest[:16]}…, which this node holds",
                do="ask what this node holds now",
            )
        file = next((file for file in info.files if file.name == request.name), None)
        if file is None:
            raise BadInput(f"{request.model_id} has no file {request.name!r}", expected="one that its manifest lists")
        length = min(request.length, file.size_bytes - request.offset)
        if length < 0:
            raise BadInput(
                f"offset {request.offset} in {file.name}", expected=f"at most {file.size_bytes}, the file's size"
            )
        path = self._place(request.model_id) / file.name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise _damaged(request.model_id, f"{path} cannot be opened ({error.strerror})", "a file") from error
        try:
            data = os.pread(descriptor, length, request.offset)
        finally:
            os.close(descriptor)
        if len(data) != length:
            raise _damaged(request.model_id, f"{path} ends before byte {request.offset + length}", f"{file.size_bytes}")
        return ModelChunk(data)

    # --- changing ---------------------------------------------------------------------------------

    @contextmanager
    def making(self, model_id: ModelId, watch: Watch, wait_seconds: float = PULL_WAIT_SECONDS) -> Generator[Staging]:
        """The right to make this model: one process at a time, others wait for it.

        Raises:
            DeadlineExceeded: another process still makes it after `wait_seconds`.
            NoRoom: the disk is full. What was made so far is kept for the next attempt.
        """
        with disk_errors(self.root), self._lock(model_id, watch, wait_seconds):
            yield Staging(model_id, self.root / ".partial" / directory_name(model_id))

    def publish(self, staging: Staging, promised: Mapping[str, str], describe: Describe, watch: Watch) -> ModelInfo:
        """Verify the model that was made and move it to its place.

        `promised` is the sha256 by file name, where the source gave one.

        Raises:
            CorruptModel: a file is damaged; it is deleted, so that the next pull fetches it again.
            BadInput: it is no model that can be run here.
        """
        model_id, destination = staging.model_id, self._place(staging.model_id)
        if destination.exists():
            raise Refused(
                f"{destination} is in the way of {model_id}",
                expected="no such directory",
                do=f"`meshinfer models rm {model_id}`, or delete it by hand",
            )
        files: list[ModelFile] = []
        for path in model_files(staging.files):
            found = sha256_of(path, watch)
            if (expected := promised.get(path.name, found)) != found:
                path.unlink()
                raise CorruptModel(
                    f"{path.name} of {model_id} arrived with sha256 {found}",
                    expected=expected,
                    do="pull again: only this file is fetched anew",
                )
            files.append(ModelFile(path.name, path.stat().st_size, found))
        for path in staging.files.iterdir():
            if path.name not in {file.name for file in files}:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        check_model(staging.files)
        info = ModelInfo(describe(staging.files, model_id, watch), tuple(files))
        check_info(info, model_id)
        manifest = Manifest(FORMAT, f"meshinfer {__version__}", staging.source, info)
        (staging.files / MANIFEST).write_bytes(encode_manifest(manifest))
        watch(f"storing {model_id}", manifest.size_bytes, manifest.size_bytes)
        publish_directory(staging.files, destination)
        staging.discard()
        return info

    def renew(self, model_id: ModelId, describe: Describe, watch: Watch) -> ModelInfo:
        """Describe a held model anew: the same files, a card that says more.

        Raises:
            UnknownModel: it is not here.
            CorruptModel: its files are not what they were.
        """
        with disk_errors(self.root), self._lock(model_id, watch, REMOVE_WAIT_SECONDS):
            manifest = self._require(model_id)
            known = manifest.info.card
            card = describe(self._place(model_id), model_id, watch)
            if card.digest != known.digest:
                raise CorruptModel(
                    f"the files of {model_id} have digest {card.digest[:16]}…",
                    expected=f"{known.digest[:16]}…",
                    do=f"`meshinfer models rm {model_id}`, then pull it again",
                )
            renewed = replace(manifest, made_by=f"meshinfer {__version__}", info=replace(manifest.info, card=card))
            write_atomically(self._place(model_id) / MANIFEST, encode_manifest(renewed))
            return renewed.info

    def remove(self, model_id: ModelId) -> None:
        """Delete a model that no instance here uses, and what a pull of it left unfinished.

        Raises:
            UnknownModel: there is nothing of it here.
            DeadlineExceeded: it is being pulled.
        """
        place, partial = self._place(model_id), self.root / ".partial" / directory_name(model_id)
        if not place.exists() and not partial.exists():
            raise self._unknown(model_id)
        with disk_errors(self.root), self._lock(model_id, Watch(), REMOVE_WAIT_SECONDS):
            shutil.rmtree(partial, ignore_errors=True)
            if place.exists():
                # Out of sight in one step: a removal that is killed half-way leaves no half model.
                partial.parent.mkdir(exist_ok=True)
                place.rename(partial)
                shutil.rmtree(partial)

    # --- within -----------------------------------------------------------------------------------

    def _place(self, model_id: ModelId) -> Path:
        return self.root / directory_name(model_id)

    def _require(self, model_id: ModelId) -> Manifest:
        manifest = self.manifest(model_id)
        if manifest is None:
            raise self._unknown(model_id)
        return manifest

    def _unknown(self, model_id: ModelId) -> MeshinferError:
        held = ", ".join(model.model_id for model in self.held()[:8]) or "none"
        return UnknownModel(
            f"no model {model_id} in {self.root}",
            expected=f"one that is held here: {held}",
            do=f"`meshinfer models pull {model_id}`",
        )

    def _read(self, path: Path) -> Manifest:
        status = path.stat()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if (known := self._manifests.get(path)) and known[0] == seen:
            return known[1]
        manifest = decode_manifest(path.read_bytes(), str(path.parent))
        self._manifests[path] = (seen, manifest)
        return manifest

    @contextmanager
    def _lock(self, model_id: ModelId, watch: Watch, wait_seconds: float) -> Generator[None]:
        path = self.root / ".locks" / f"{directory_name(model_id)}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        # thread_local=False: an async caller takes and frees the lock in different worker threads.
        lock = FileLock(path, thread_local=False)
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                lock.acquire(timeout=max(0.0, min(_LOCK_LOOK_SECONDS, deadline - time.monotonic())))
                break
            except Timeout:
                watch(f"waiting for another pull of {model_id}")
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"another process has been changing {model_id} for {wait_seconds:.0f} s",
                        do="wait for it, or end it, and try again",
                    ) from None
        try:
            yield
        finally:
            lock.release()


def _read_note(root: Path) -> tuple[str, str]:
    """Model id and source of a partial model; empty if there is none."""
    try:
        model_id, _, source = (root / _NOTE).read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return "", ""
    return model_id, source


def _bytes_below(root: Path) -> int:
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue  # its pull goes on meanwhile
    return total


def _damaged(model_id: ModelId, what: str, expected: str) -> CorruptModel:
    return CorruptModel(
        what, expected=expected, do=f"`meshinfer models rm {model_id} && meshinfer models pull {model_id}`"
    )
