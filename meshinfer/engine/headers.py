"""What a model's files say they hold: safetensors headers, read and checked before MLX maps a byte.

A safetensors file is eight bytes of header length, a JSON header that gives each tensor's type, shape and
place, and the tensors without gaps. MLX believes all that; a file that was cut short while copying would
then be read past its end. So `read_model_files` checks every number against the file's real size first.

A node that holds only its own layers need not have the other files: `tensor_headers.json`, which
`write_headers` makes where the model is whole, tells their tensors' shapes. `as_whole_directory` then
shows mlx-lm a complete directory in which a missing file is a hole of the right size (sparse: it takes no
disk), of which nothing is ever read.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshinfer.base.errors import CorruptModel

HEADERS_FILE = "tensor_headers.json"
INDEX_FILE = "model.safetensors.index.json"
_PATTERN = "model*.safetensors"
"""The files that mlx-lm reads."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 * 1024**2
"""The format's own bound."""
_MAX_JSON_BYTES = 256 * 1024**2
"""Of index and headers files: 120 bytes a tensor, and the largest models have 100,000."""
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
    names = sorted({path.name for path in directory.glob(_PATTERN)} | set(known))
    files = tuple(_read_file(directory / name) if (directory / name).is_file() else known[name] for name in names)
    _check_index(directory, files)
    if not files:
        raise CorruptModel(f"{directory} holds no tensors", expected=f"files named {_PATTERN}", do=_DO)
    return files


def write_headers(directory: Path) -> Path:
    """Write `tensor_headers.json` for the whole model in `directory`, atomically; returns its path."""
    content = {file.name: json.loads(file.header) for file in read_model_files(directory)}
    target = directory / HEADERS_FILE
    aside = directory / f".{HEADERS_FILE}.{os.getpid()}"
    aside.write_text(json.dumps(content, separators=(",", ":")))
    aside.replace(target)
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file.

    Raises:
        CorruptModel: it is missing, or is not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CorruptModel(f"{path} has {path.stat().st_size} bytes", expected=f"at most {_MAX_JSON_BYTES}", do=_DO)
        value: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CorruptModel(f"{path} is missing", expected="a model directory as mlx-lm writes it", do=_DO) from error
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{path} is not JSON ({error})", expected="a JSON object", do=_DO) from error
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} is not a JSON object", expected="a JSON object", do=_DO)
    return cast("dict[str, Any]", value)


def _read_file(path: Path) -> TensorFile:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CorruptModel(
                f"{path} has {size} bytes, and its header alone would have {length}",
                expected="a whole safetensors file",
                do=_DO,
            )
        header = file.read(length)
    return _checked(str(path), path.name, size, header, local=True)


def _read_headers_file(directory: Path) -> dict[str, TensorFile]:
    path = directory / HEADERS_FILE
    if not path.is_file():
        return {}
    files: dict[str, TensorFile] = {}
    for name, entry in read_json(path).items():
        # The name becomes a path in a scratch directory.
        if not (name == Path(name).name and name.startswith("model") and name.endswith(".safetensors")):
            raise CorruptModel(f"{path} names a file {name[:80]!r}", expected=f"names like {_PATTERN}", do=_DO)
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
    """See that every tensor lies inside the file, has the bytes that its shape needs, and that they meet without gaps."""
    try:
        entries: Any = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CorruptModel(f"{where} has an unreadable header ({error})", expected="JSON", do=_DO) from error
    if not isinstance(entries, dict):
        raise CorruptModel(f"{where} has an unreadable header", expected="a JSON object", do=_DO)
    available = size - 8 - len(header)
    spans: list[tuple[int, int]] = []
    for tensor, entry in cast("dict[str, Any]", entries).items():
        if tensor == "__metadata__":
            continue
        start, end = _span(where, tensor, entry)
        if end > available:
            raise CorruptModel(
                f"{where} is cut short: tensor {tensor!r} ends at byte {end} of its data, which has {available}",
                expected=f"a file of at least {8 + len(header) + end} bytes, not {size}",
                do=_DO,
            )
        spans.append((start, end))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise CorruptModel(f"{where}: tensors overlap or leave a gap at byte {position} of its data", do=_DO)
        position = end
    if position != available:
        raise CorruptModel(f"{where} has {available} bytes of data", expected=f"{position}, by its header", do=_DO)
    return TensorFile(name, size, header, tuple(key for key in entries if key != "__metadata__"), local)


def _span(where: str, tensor: str, entry: Any) -> tuple[int, int]:
    match entry:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [int() as start, int() as end]}:
            sizes = cast("list[Any]", shape)
            whole = all(type(size) is int and 0 <= size < 2**48 for size in sizes)
            if dtype in _BITS and whole and 0 <= start <= end < 2**62:
                if end - start == math.prod(cast("list[int]", sizes)) * _BITS[dtype] // 8:
                    return start, end
                raise CorruptModel(
                    f"{where}: tensor {tensor!r} has {end - start} bytes for {dtype}{sizes}",
                    expected="as many as type and shape need",
                    do=_DO,
                )
        case _:
            pass
    raise CorruptModel(f"{where}: tensor {tensor!r} is described by {str(entry)[:120]}", expected="type, shape, place")


def _check_index(directory: Path, files: tuple[TensorFile, ...]) -> None:
    """See that every file and tensor that the index names is there."""
    path = directory / INDEX_FILE
    if not path.is_file():
        return
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise CorruptModel(f"{path} has no weight_map", do=_DO)
    tensors = {file.name: set(file.tensors) for file in files}
    for tensor, name in cast("Mapping[str, Any]", weight_map).items():
        if name not in tensors:
            raise CorruptModel(
                f"{directory / str(name)} is missing (it holds {tensor!r})",
                expected=f"every file that {INDEX_FILE} names, or its entry in {HEADERS_FILE}",
                do=_DO,
            )
        if tensor not in tensors[name]:
            raise CorruptModel(f"{directory / name} lacks the tensor {tensor!r} that {INDEX_FILE} promises", do=_DO)
