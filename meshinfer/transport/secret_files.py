"""Small secrets in an agent's home: files that only their owner can read, and that are never seen half-written.

A secret is written aside to a file that is born with mode 0600 and put in its place in one step
(`base.files`), so there is no moment at which another user could open it. Reading refuses a file
whose mode has been widened: a key that others may have read is no longer a secret, and only a person
can decide what to do then.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from meshinfer.base.errors import BadInput
from meshinfer.base.files import write_atomically

MAX_SECRET_BYTES = 4096
"""Keys and join codes take less than 100 bytes; a larger file is not one of ours."""


def read_secret(path: Path) -> bytes | None:
    """The content of `path`; None if there is no such file.

    Raises:
        BadInput: others may read it, or it is no file of a secret's size.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise BadInput(
                    f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o})",
                    expected="mode 0600",
                    do=f"run `chmod 600 {path}` if nobody else had access to this machine; else delete it, "
                    "and a new one is made",
                )
            content = file.read(MAX_SECRET_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read: {error.strerror}", do="check its owner, or choose another home"
        ) from error
    if len(content) > MAX_SECRET_BYTES:
        raise BadInput(f"{path} is larger than {MAX_SECRET_BYTES} bytes", expected="a key", do="delete it")
    return content


def write_secret(path: Path, content: bytes, *, replace: bool) -> bool:
    """Put `content` at `path`, whole or not at all; its directory is made if need be (mode 0700).

    Without `replace`, a file that is there stays, and the answer is False.

    Raises:
        BadInput: the directory cannot be written.
    """
    try:
        return write_atomically(path, content, replace=replace)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written: {error.strerror}",
            do="check the disk and the directory's owner, or name another with --home or MESHINFER_HOME",
        ) from error
