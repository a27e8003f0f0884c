"""A repository of the Hugging Face hub.

The revision is pinned before the first byte, so a repository that changes meanwhile is not mixed
into one directory with itself. Only the files that we need are fetched; those that the hub's cache
on this machine already has are taken from there (so that nobody downloads twice, and so that a
machine with HF_HUB_OFFLINE can still use what it has). Listing, cache, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE are the library's; the bytes come by our own download, which goes on after a kill.
`trust_remote_code` has no equivalent here: code is not even fetched.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] - httpx's or httpx2's, by the library's version
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import build_hf_headers

from meshinfer import __version__
from meshinfer.base.errors import BadInput, MeshinferError, PeerLost, UnknownModel
from meshinfer.base.ids import ModelId
from meshinfer.models.disk import require_free
from meshinfer.models.download import download, open_client
from meshinfer.models.filenames import CONFIG, KINDS, is_model_file
from meshinfer.models.json_file import read_json
from meshinfer.models.progress import Stopped, Watch
from meshinfer.models.soundness import check_config, check_names, model_files
from meshinfer.models.sources.directory import take_files
from meshinfer.models.store import Staging

_ANSWER_SECONDS = 30.0
_DOWNLOADS_AT_ONCE = 4
"""Files at a time. One connection to the hub's CDN rarely fills a fast line; more than 8 meet its rate limit."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository at one revision."""

    name: str
    size_bytes: int
    sha256: str
    """Empty where the hub does not say (small files)."""


@dataclass(slots=True)
class _Tally:
    """What the downloads of one pull have done, counted by their threads."""

    stopping: threading.Event = field(default_factory=threading.Event)
    done_by_name: dict[str, int] = field(default_factory=dict)
    """One key per download, written by its thread only."""

    def count(self, name: str, done_bytes: int) -> None:
        """Called by a download's thread.

        Raises:
            Stopped: the pull is over.
        """
        self.done_by_name[name] = done_bytes
        if self.stopping.is_set():
            raise Stopped(f"stopped while downloading {name}")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository; the model has the repository's id here too, unless told otherwise."""

    model_id: ModelId
    repository: str

    def fill(self, staging: Staging, watch: Watch) -> dict[str, str]:
        """Fetch the files that are not in the hub's cache on this machine.

        Raises:
            UnknownModel: no such repository.
            BadInput: gated, or not a model that runs here (known before its weights are fetched).
            PeerLost: the hub cannot be reached, and its cache does not hold the model.
        """
        watch(f"asking {constants.ENDPOINT} for {self.repository}")
        try:
            revision, files = self._listing()
        except PeerLost as lost:
            return self._from_cache(staging, watch, lost)
        check_names([file.name for file in files], where=self.repository)
        staging.begin(f"hub {self.repository}@{revision}")
        with _hub_errors(self.repository):
            self._fetch(revision, [file for file in files if file.name == CONFIG], staging, watch)
            try:
                check_config(read_json(staging.files / CONFIG), where=self.repository)
            except BadInput:
                staging.discard()
                raise
            self._fetch(revision, files, staging, watch)
        return {file.name: file.sha256 for file in files if file.sha256}

    def _listing(self) -> tuple[str, list[HubFile]]:
        with _hub_errors(self.repository):
            found = HfApi().model_info(self.repository, files_metadata=True, timeout=_ANSWER_SECONDS)
        files = [
            HubFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else "")
            for sibling in found.siblings or ()
        ]
        if CONFIG not in {file.name for file in files} or not found.sha:
            raise BadInput(f"repository {self.repository} has no {CONFIG}", expected="an mlx-lm model")
        return found.sha, files

    def _fetch(self, revision: str, files: list[HubFile], staging: Staging, watch: Watch) -> None:
        wanted = [file for file in files if is_model_file(file.name) and not (staging.files / file.name).exists()]
        cached = [path for file in wanted if (path := self._cached(file.name, revision))]
        take_files(cached, staging, watch)
        wanted = [file for file in wanted if not (staging.files / file.name).exists()]
        total = sum(file.size_bytes for file in wanted)
        halves = {file.name: staging.scratch / f"{file.name}.part" for file in wanted}
        have = sum(half.stat().st_size for half in halves.values() if half.is_file())
        require_free(staging.root, total - have, f"downloading {self.repository}")
        headers = build_hf_headers(library_name="meshinfer", library_version=__version__)
        tally, jobs = _Tally(), len(wanted)
        with open_client(headers) as client, ThreadPoolExecutor(_DOWNLOADS_AT_ONCE, "hub") as pool:

            def fetch(file: HubFile) -> None:
                url = hf_hub_url(self.repository, file.name, revision=revision)
                half = halves[file.name]
                download(client, url, half, file.size_bytes, lambda done: tally.count(file.name, done))
                tally.count(file.name, file.size_bytes)
                half.rename(staging.files / file.name)

            running = {pool.submit(fetch, file) for file in wanted}
            try:
                while running:
                    done, running = wait(running, timeout=_LOOK_SECONDS)
                    for job in done:
                        job.result()
                    what = f"downloading {self.repository}, {jobs - len(running)} of {jobs} files"
                    watch(what, sum(tally.done_by_name.copy().values()), total)
            finally:
                # Those that run end at their next look, those that wait never start; the pool waits for both.
                tally.stopping.set()
                for job in running:
                    job.cancel()

    def _cached(self, name: str, revision: str) -> Path | None:
        path = try_to_load_from_cache(self.repository, name, revision=revision)
        return Path(path) if isinstance(path, str) else None

    def _from_cache(self, staging: Staging, watch: Watch, lost: PeerLost) -> dict[str, str]:
        """The hub does not answer: whatever revision its cache here holds whole will do."""
        try:
            directory = Path(snapshot_download(self.repository, local_files_only=True, allow_patterns=list(KINDS)))
            check_names([path.name for path in directory.iterdir()], where=str(directory))
        except (LocalEntryNotFoundError, BadInput):
            raise lost from None
        staging.begin(f"hub {self.repository}@{directory.name}")
        take_files(model_files(directory), staging, watch)
        return {}


@contextmanager
def _hub_errors(repository: str) -> Generator[None]:
    """The library's errors as ours."""
    try:
        yield
    except MeshinferError:
        raise
    except GatedRepoError as error:
        raise _gated(repository) from error
    except httpx.HTTPStatusError as error:
        # A gated repository is listed for anyone; only its files are kept back.
        if error.response.status_code in (401, 403):
            raise _gated(repository) from error
        raise PeerLost(
            f"{error.request.url.host} answers {error.response.status_code} for {repository}", do="try again later"
        ) from error
    except RepositoryNotFoundError as error:
        raise UnknownModel(
            f"{constants.ENDPOINT} has no repository {repository}, or it is private",
            do="check its name; for a private one set HF_TOKEN",
        ) from error
    except OfflineModeIsEnabled as error:
        raise PeerLost(
            f"HF_HUB_OFFLINE is set, and the hub's cache on this machine does not hold {repository} whole",
            do="unset it, pull from a directory, or from a node that holds the model",
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, HTTPError, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise PeerLost(
            f"{constants.ENDPOINT} cannot be reached or does not answer rightly for {repository}: {reason}",
            do="try again later (it goes on from here), pull from a directory, or from a node that holds the model",
        ) from error


def _gated(repository: str) -> BadInput:
    return BadInput(
        f"{repository} is gated or private: its owners want to know who downloads it",
        do=f"accept the terms at {constants.ENDPOINT}/{repository}, then set HF_TOKEN or run `hf auth login`",
    )
