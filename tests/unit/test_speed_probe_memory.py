"""What a control group leaves is what counts, at every level and in both versions."""

from __future__ import annotations

from pathlib import Path

from meshinfer.serving.available_memory import available_bytes, group_headroom_bytes

GIB = 2**30


def group(path: Path, limit: str, used: int, inactive: int = 0, *, version: int = 2) -> None:
    path.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\n")


def headroom(tmp_path: Path, own: str) -> int | None:
    (tmp_path / "own").write_text(own)
    return group_headroom_bytes(tmp_path / "own", tmp_path / "mounts")


def test_the_tightest_level_counts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    group(mounts / "user", str(8 * GIB), 7 * GIB, inactive=GIB)
    group(mounts / "user" / "app", str(4 * GIB), GIB)
    assert headroom(tmp_path, "0::/user/app\n") == 2 * GIB
    group(mounts / "user" / "app", "max", GIB)
    assert headroom(tmp_path, "0::/user/app\n") == 2 * GIB
    group(mounts / "user", "max", GIB)
    assert headroom(tmp_path, "0::/user/app\n") is None


def test_a_container_sees_its_group_at_the_root(tmp_path: Path) -> None:
    """Docker names the host's path where only the root of it is mounted."""
    group(tmp_path / "mounts", str(2 * GIB), GIB)
    assert headroom(tmp_path, "0::/../../docker/abc\n") == GIB


def test_version_one(tmp_path: Path) -> None:
    group(tmp_path / "mounts" / "memory" / "app", str(3 * GIB), GIB, version=1)
    group(tmp_path / "mounts" / "memory", str(2**63 - 4096), GIB, version=1)
    assert headroom(tmp_path, "5:devices:/\n4:memory:/app\n0::/\n") == 2 * GIB


def test_over_the_limit_nothing_is_left(tmp_path: Path) -> None:
    group(tmp_path / "mounts", str(GIB), 2 * GIB)
    assert headroom(tmp_path, "0::/\n") == 0


def test_no_groups_no_limit(tmp_path: Path) -> None:
    assert headroom(tmp_path, "") is None
    assert headroom(tmp_path, "nonsense\n0::\n") is None
    assert group_headroom_bytes(tmp_path / "missing") is None


def test_something_is_available_here() -> None:
    assert available_bytes() > 0
