"""How much memory runners may take now: what the system says is available, or what a control group leaves of it.

A container or a systemd unit with a limit sees the whole machine in `/proc/meminfo`; what counts is its
control group, and every group above it. A group over its limit does not refuse, it kills; so its limit
must be known before anything is allocated. Both versions of Linux's control groups are read; elsewhere
there are none.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_UNLIMITED = 2**60
"""Version 1 says "no limit" as a number near 2**63."""


def available_bytes() -> int:
    """What can be allocated without swapping or being killed, as far as the system knows."""
    headroom = group_headroom_bytes()
    available = psutil.virtual_memory().available
    return available if headroom is None else min(available, headroom)


def group_headroom_bytes(
    own_groups: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What is left to this process's control groups; None if nothing limits them."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return None  # no Linux, or no control groups
    left: list[int] = []
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "", "")[:3]
        if number == "0" and not controllers:
            left += _levels(mounts, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left += _levels(mounts / "memory", path, names)
    return min(left, default=None)


def _levels(root: Path, path: str, names: tuple[str, str, str]) -> list[int]:
    """Headroom at each level from the process's group up to the root, where a limit is set."""
    parts = [part for part in path.split("/") if part not in {"", "..", "."}]
    levels = (root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
    return [left for level in levels if (left := _headroom(level, *names)) is not None]


def _headroom(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        allowed = int((group / limit).read_text())
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Pages of files that nobody has read for a while are given back before anything is refused.
        used -= int(stat.get(reclaimable, 0))
    except (OSError, ValueError):
        return None  # "max", or no such level in this container's view
    return max(0, allowed - used) if allowed < _UNLIMITED else None
