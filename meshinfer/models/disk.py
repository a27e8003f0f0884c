"""The few things about files that must be done right: made durable, moved in one step, errors told plainly."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from meshinfer.base.errors import BadInput, MeshinferError, NoRoom
from meshinfer.base.files import sync
from meshinfer.base.ids import ModelId
from meshinfer.base.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def directory_name(model_id: ModelId) -> str:
    """`owner/name` → `owner--name`. One to one, since no id has two dashes in a row."""
    return model_id.replace("/", "--")


def publish_directory(source: Path, destination: Path) -> None:
    """Move a finished directory to its place in one step: whole or not at all, also after a power cut."""
    for path in source.iterdir():
        sync(path)
    sync(source)
    source.rename(destination)
    sync(destination.parent)


def require_free(directory: Path, need_bytes: int, what: str) -> None:
    """There is room on the disk for `need_bytes`.

    Raises:
        NoRoom: there is not, with both numbers.
    """
    free_bytes = shutil.disk_usage(directory).free
    if need_bytes > free_bytes:
        raise NoRoom(
            f"{what} needs {format_bytes(need_bytes)} on the disk of {directory}, which has {format_bytes(free_bytes)}",
            do="free some space, or put MESHINFER_HOME on a larger disk",
        )


@contextmanager
def disk_errors(directory: Path) -> Generator[None]:
    """Errors of the disk under `directory` become ones that a person can act on; others pass.

    Raises:
        NoRoom: the disk is full. What was written is kept.
        BadInput: the directory may not be written to.
    """
    try:
        yield
    except MeshinferError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            free_bytes = shutil.disk_usage(directory).free
            raise NoRoom(
                f"the disk of {directory} is full ({format_bytes(free_bytes)} free)",
                do="free some space and pull again: it goes on from here",
            ) from error
        if error.errno in _FORBIDDEN:
            raise BadInput(
                f"cannot write in {directory}: {error}", do="fix its permissions, or set MESHINFER_HOME"
            ) from error
        raise
