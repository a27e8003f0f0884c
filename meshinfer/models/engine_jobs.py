"""What only the engine can say or do, asked of a short-lived process.

The agent never loads MLX (its import takes seconds, memory and now and then the process with it),
so a model is described, and a GGUF file converted, by `python -m meshinfer.runner …`: one JSON
object on its last line of output, exit code 0; or one with an error, exit code 1.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from meshinfer.base.errors import ERRORS_BY_CODE, MeshinferError
from meshinfer.base.ids import ModelId
from meshinfer.models.engine_process import engine_command, engine_options
from meshinfer.models.progress import Watch
from meshinfer.models.watched_process import wait_watched
from meshinfer.planning.model_card import ModelCard

Describe = Callable[[Path, ModelId, Watch], ModelCard]

_START_SECONDS = 120.0
"""For the process to start and import MLX: 3 s measured, 40 s on a busy machine with a cold disk."""
_BYTES_PER_SECOND = 20e6
"""The slowest disk that we wait for while it reads a model through once."""
_MAX_OUTPUT_BYTES = 4 * 1024 * 1024


def describe(directory: Path, model_id: ModelId, watch: Watch) -> ModelCard:
    """The card of the model in `directory`.

    Raises:
        MeshinferError: what the engine says is wrong with it; DeadlineExceeded; Stopped.
    """
    size = sum(path.stat().st_size for path in directory.iterdir())
    line = _run(["describe", str(directory), model_id], size, f"reading the layers of {model_id}", watch)
    try:
        card = msgspec.json.decode(line, type=ModelCard, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MeshinferError(
            f"the engine's description of {model_id} cannot be read: {error}", do="reinstall meshinfer"
        ) from error
    if card.model_id != model_id:
        raise MeshinferError(f"the engine described {card.model_id}", expected=model_id, do="reinstall meshinfer")
    return card


def convert_gguf(source: Path, destination: Path, watch: Watch) -> None:
    """Turn a GGUF file into an mlx-lm directory, quantised weights kept as they are.

    Raises:
        MeshinferError: it is not of a kind that can be converted without loss; DeadlineExceeded; Stopped.
    """
    size = source.stat().st_size
    _run(["convert-gguf", str(source), str(destination)], size, f"converting {source.name}", watch)


def _run(arguments: list[str], size_bytes: int, what: str, watch: Watch) -> bytes:
    """Last line of the runner's output."""
    allowed_seconds = _START_SECONDS + size_bytes / _BYTES_PER_SECOND
    # Files rather than pipes: a process that writes much never blocks, and there is nothing to drain while we watch.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(engine_command(*arguments), stdout=output, stderr=complaints, **engine_options())
        code = wait_watched(
            process,
            allowed_seconds,
            what,
            lambda: watch(what, 0, size_bytes),
            do="see whether the disk answers",
        )
        line = _tail(output, _MAX_OUTPUT_BYTES).strip().rpartition(b"\n")[2]
        if code == 0 and line:
            return line
        raise _reported(line) or MeshinferError(
            f"the engine ended with code {code} while {what}: {_last_words(complaints)}",
            do="`python -m meshinfer.runner accelerator` shows what the engine says of this machine",
        )


def _reported(line: bytes) -> MeshinferError | None:
    try:
        error: Any = json.loads(line)["error"]
        kind = ERRORS_BY_CODE.get(error["code"], MeshinferError)
        return kind(str(error["what"]), expected=str(error.get("expected", "")), do=str(error.get("do", "")))
    except (ValueError, KeyError, TypeError):
        return None


def _last_words(complaints: BinaryIO) -> str:
    text = _tail(complaints, 4096).decode(errors="replace").strip()
    return " / ".join(text.splitlines()[-3:]) or "it said nothing"


def _tail(file: BinaryIO, count: int) -> bytes:
    end = file.seek(0, 2)
    file.seek(max(0, end - count))
    return file.read(count)
