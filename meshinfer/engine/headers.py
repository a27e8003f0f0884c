"""What a model's files say they hold: safetensors headers, read and checked before MLX maps a byte.

The reading and checking is the store's (`models.tensors`); here it is asked of a whole model, each time
that it is opened: MLX believes what it reads, and files may have changed since the store took them in.

A node that holds only its own layers need not have the other files: `tensor_headers.json`, which
`write_headers` makes where the model is whole, tells their tensors' shapes. `as_whole_directory` then
shows mlx-lm a complete directory in which a missing file is a hole of the right size (sparse: it takes no
disk), of which nothing is ever read.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshinfer.base.errors import CorruptModel
from meshinfer.base.files import write_atomically
from meshinfer.models.filenames import WEIGHTS_PATTERN
from meshinfer.models.json_file import read_json
from meshinfer.models.tensors import check_header, check_index, read_header

HEADERS_FILE = "tensor_headers.json"
_DO = "pull the model again"


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One safetensors file of a model."""

    name: str
    size_bytes: int
    header: bytes
    """The JSON header, as it stands in the file."""
    tensors: tuple[str, ...]
    local: bool
    """It is here; else only its header is known."""


def read_model_files(directory: Path) -> tuple[TensorFile, ...]:
    """The tensor files of the model in `directory`, checked; sorted by name.

    Raises:
        CorruptModel: a file is missing, cut short or says what cannot be; it is named.
    """
    known = _read_headers_file(directory)
    names = sorted({path.name for path in directory.glob(WEIGHTS_PATTERN)} | set(known))
    files = tuple(_read_file(directory / name) if (directory / name).is_file() else known[name] for name in names)
    check_index(directory, {file.name: file.tensors for file in files})
    if not files:
        raise CorruptModel(f"{directory} holds no tensors", expected=f"files named {WEIGHTS_PATTERN}", do=_DO)
    return files


def write_headers(directory: Path) -> Path:
    """Write `tensor_headers.json` for the whole model in `directory`, atomically; returns its path."""
    content = {file.name: json.loads(file.header) for file in read_model_files(directory)}
    target = directory / HEADERS_FILE
    write_atomically(target, json.dumps(content, separators=(",", ":")).encode())
    return target


@contextmanager
def as_whole_directory(directory: Path, files: tuple[TensorFile, ...]) -> Generator[Path]:
    """A directory in which every tensor file is there: `directory` itself, or one of links and holes for a while."""
    if all(file.local for file in files):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="meshinfer-") as scratch:
        whole = Path(scratch)
        for path in directory.iterdir():
            (whole / path.name).symlink_to(path.resolve())
        for file in files:
            if not file.local:
                hole = whole / file.name
                hole.write_bytes(len(file.header).to_bytes(8, "little") + file.header)
                os.truncate(hole, file.size_bytes)
        yield whole


def _read_file(path: Path) -> TensorFile:
    size, header = read_header(path)
    return _checked(str(path), path.name, size, header, local=True)


def _read_headers_file(directory: Path) -> dict[str, TensorFile]:
    path = directory / HEADERS_FILE
    if not path.is_file():
        return {}
    files: dict[str, TensorFile] = {}
    for name, entry in read_json(path).items():
        # The name becomes a path in a scratch directory.
        if not (name == Path(name).name and name.startswith("model") and name.endswith(".safetensors")):
            raise CorruptModel(f"{path} names a file {name[:80]!r}", expected=f"names like {WEIGHTS_PATTERN}", do=_DO)
        header = json.dumps(entry, separators=(",", ":")).encode()
        data_bytes = _data_bytes(f"{path}: {name}", header)
        files[name] = _checked(f"{path}: {name}", name, 8 + len(header) + data_bytes, header, local=False)
    return files


def _data_bytes(where: str, header: bytes) -> int:
    try:
        entries = json.loads(header)
        return max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CorruptModel(f"{where} has an unreadable header", do=_DO) from error


def _checked(where: str, name: str, size: int, header: bytes, *, local: bool) -> TensorFile:
    return TensorFile(name, size, header, tuple(tensor.name for tensor in check_header(where, size, header)), local)
