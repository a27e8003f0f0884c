"""SHA-256 of files, in chunks, under a watch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from meshinfer.models.progress import CHUNK_BYTES, Watch


def sha256_of(path: Path, watch: Watch) -> str:
    """Hex digest of a file: about 1.5 GB/s on a machine with SHA instructions, else 0.4."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            watch(f"verifying {path.name}", done, total)
    return digest.hexdigest()
