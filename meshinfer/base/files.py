"""Files that are whole or not there, also after a power cut.

The content is written to a file aside, flushed to the disk, and put in its place in one step; then the
directory is flushed too, so that the name is as durable as the bytes. A crash leaves the old file, or
none, or the new one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, replace: bool = True) -> bool:
    """Put `content` at `path`, readable by this user only; its directory is made if need be (mode 0700). Blocks.

    Without `replace`, a file that is there stays, and the answer is False.

    Raises:
        OSError: the disk is full, or the directory cannot be written; nothing is left behind.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkstemp opens with O_EXCL and mode 0600: there is no moment at which another user could open a secret.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            aside.replace(path)
        else:
            # A hard link, unlike a rename, fails if the name is taken: of two first starts, one wins.
            path.hardlink_to(aside)
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)
    return True


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's entries, on the disk itself before going on. Blocks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
