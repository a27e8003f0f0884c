"""An mlx-lm directory that is on this machine already.

Files are hard-linked where the disk allows it, so a model of 40 GB is taken in within a second and
takes no room twice; else copied. Symbolic links are followed (the hub's cache is made of them).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from meshinfer.base.errors import BadInput
from meshinfer.base.ids import ModelId
from meshinfer.models.disk import require_free
from meshinfer.models.progress import CHUNK_BYTES, Watch
from meshinfer.models.soundness import check_model, model_files
from meshinfer.models.store import Staging


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A directory, under the id that the model is to have here."""

    model_id: ModelId
    directory: Path
    """Absolute."""

    def fill(self, staging: Staging, watch: Watch) -> dict[str, str]:
        """Take the files in.

        Raises:
            BadInput: not a directory, or not one that mlx-lm can run without foreign code.
            CorruptModel: a file is damaged.
            NoRoom: copying needs more than the disk has.
        """
        if not self.directory.is_dir():
            raise BadInput(f"{self.directory} is not a directory", expected="an mlx-lm directory")
        check_model(self.directory)  # before anything is copied
        staging.begin(f"directory {self.directory}")
        take_files(model_files(self.directory), staging, watch)
        return {}


def take_files(paths: list[Path], staging: Staging, watch: Watch) -> None:
    """Link or copy files into `staging.files`, all or those that are not there yet.

    Raises:
        NoRoom: copying needs more than the disk has.
    """
    sizes = {path: path.stat().st_size for path in paths}
    total, done = sum(sizes.values()), 0
    for path in paths:
        target = staging.files / path.name
        if not (_taken(path, target) or _link(path, target)):
            require_free(staging.root, sizes[path], f"copying {path.name}")
            _copy(path, target, staging.scratch / path.name, watch, done, total)
        done += sizes[path]
        watch(f"taking {path.name}", done, total)


def _taken(path: Path, target: Path) -> bool:
    """An earlier attempt linked or copied this very file (copies keep the time of their last change)."""
    if not target.is_file():
        return False
    there, here = path.stat(), target.stat()
    return (there.st_size, there.st_mtime_ns) == (here.st_size, here.st_mtime_ns)


def _link(path: Path, target: Path) -> bool:
    target.unlink(missing_ok=True)
    try:
        os.link(path.resolve(), target)
    except OSError:
        return False  # another disk, or one without links: it is copied, and that says what else is wrong
    return True


def _copy(path: Path, target: Path, half: Path, watch: Watch, done: int, total: int) -> None:
    half.unlink(missing_ok=True)
    with path.open("rb") as source, half.open("wb") as copy:
        while chunk := source.read(CHUNK_BYTES):
            copy.write(chunk)
            done += len(chunk)
            watch(f"copying {path.name}", done, total)
    shutil.copystat(path, half)
    half.rename(target)
