"""Tokenizers of models that this node does not hold.

Any node can be the origin of any request, so it needs the model's text files (a few megabytes) and
not its weights. They are fetched from a peer once per model and digest:

    HOME/text/owner--name@<16 hex digits>/

Made aside and renamed when verified, like a model. A model whose digest changed gets a directory of
its own, and the older one is deleted.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import trio

from meshinfer.base.ids import ModelId, digest_hex
from meshinfer.models.disk import directory_name, disk_errors, publish_directory, require_free
from meshinfer.models.manifest import check_info, text_files
from meshinfer.models.progress import Watch
from meshinfer.models.sources.peer import ReadChunk, fetch_files
from meshinfer.wire.messages import ModelFile, ModelInfo


class TextCache:
    """The text files under one directory; one cache per home, the agent's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._partial = root / ".partial"
        self._publishing = trio.Lock()
        shutil.rmtree(self._partial, ignore_errors=True)  # what a killed agent left

    async def fetch(self, info: ModelInfo, read_chunk: ReadChunk, watch: Watch | None = None) -> Path:
        """The directory with the text files of `info`, fetched if it is not here.

        Raises:
            ProtocolError: what the peer says of the model cannot be.
            CorruptModel: a file is not what was announced, twice.
            PeerLost: the peer does not answer.
        """
        model_id = info.card.model_id
        check_info(info, model_id)
        place = self._place(model_id, info.card.digest)
        files = text_files(info)
        if _is_whole(place, files):
            return place
        with disk_errors(self.root):
            self._partial.mkdir(parents=True, exist_ok=True)
            require_free(self.root, sum(file.size_bytes for file in files), f"fetching the tokenizer of {model_id}")
            # A directory for each fetch: two at once (rare, and small) never meet before the rename.
            with tempfile.TemporaryDirectory(dir=self._partial) as temporary:
                scratch, made = Path(temporary), Path(temporary) / "made"
                made.mkdir()
                await fetch_files(info, files, made, scratch, read_chunk, watch or Watch())
                async with self._publishing:
                    await trio.to_thread.run_sync(self._publish, made, place, files)
        return place

    def _publish(self, made: Path, place: Path, files: tuple[ModelFile, ...]) -> None:
        if _is_whole(place, files):
            return  # another fetch was first
        shutil.rmtree(place, ignore_errors=True)
        publish_directory(made, place)
        for other in self.root.glob(f"{place.name.partition('@')[0]}@*"):
            if other != place:
                shutil.rmtree(other, ignore_errors=True)

    def _place(self, model_id: ModelId, digest: str) -> Path:
        # The digest is a peer's word: hashed again, it is a file name whatever it says.
        return self.root / f"{directory_name(model_id)}@{digest_hex(digest.encode(), length_bytes=8)}"


def _is_whole(place: Path, files: tuple[ModelFile, ...]) -> bool:
    """Every file is there with its size: digests were checked before it was published."""
    return all((path := place / file.name).is_file() and path.stat().st_size == file.size_bytes for file in files)
