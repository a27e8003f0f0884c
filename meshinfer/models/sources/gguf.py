"""A GGUF file, turned into an mlx-lm directory by the engine; weights of a kind that MLX has keep their bits."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.base.ids import ModelId
from meshinfer.models.disk import require_free
from meshinfer.models.engine_jobs import convert_gguf
from meshinfer.models.progress import Watch
from meshinfer.models.store import Staging

_MAGIC = b"GGUF"
_GROWTH = 1.3
"""Converted over original size: 1.16 for SmolLM2 in Q4_1, whose scales become fp32."""


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file, under the id that the model is to have here."""

    model_id: ModelId
    file: Path
    """Absolute."""

    def fill(self, staging: Staging, watch: Watch) -> dict[str, str]:
        """Convert the file.

        Raises:
            BadInput: there is no such file.
            CorruptModel: it is not a GGUF file.
            MeshinferError: the engine cannot convert it.
        """
        if not self.file.is_file():
            raise BadInput(f"there is no file {self.file}", expected="a GGUF file")
        status = self.file.stat()
        staging.begin(f"gguf {self.file} of {status.st_size} bytes, {status.st_mtime_ns}")
        convert_into(self.file, staging, watch)
        return {}


def convert_into(file: Path, staging: Staging, watch: Watch) -> None:
    """Fill `staging.files` from a GGUF file, in one step: a killed conversion leaves nothing there."""
    with file.open("rb") as opened:
        magic = opened.read(len(_MAGIC))
    if magic != _MAGIC:
        raise CorruptModel(f"{file} begins with {magic!r}", expected=f"{_MAGIC!r}, as every GGUF file")
    if any(staging.files.iterdir()):
        return  # converted by an earlier attempt
    require_free(staging.root, int(file.stat().st_size * _GROWTH), f"converting {file.name}")
    for left in staging.scratch.glob("converted-*"):
        shutil.rmtree(left, ignore_errors=True)
    # A new name each time: the converter of a pull that was killed may still be writing under the old one.
    half = Path(tempfile.mkdtemp(prefix="converted-", dir=staging.scratch))
    half.chmod(0o755)
    convert_gguf(file, half, watch)
    staging.files.rmdir()
    half.rename(staging.files)
