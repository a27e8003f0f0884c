"""A file is whole or not there, its owner's alone, and nothing is left beside it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from meshinfer.base.files import write_atomically


def test_a_file_and_its_directory_are_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "file"
    assert write_atomically(path, b"one")
    assert write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]
    assert list(path.parent.iterdir()) == [path]


def test_what_is_there_stays_if_it_is_not_to_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert write_atomically(path, b"one", replace=False)
    assert not write_atomically(path, b"two", replace=False)
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_is_raised_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="file"):
        write_atomically(path, b"one")
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_where_the_directory_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "plain" / "file", b"", replace=False)
