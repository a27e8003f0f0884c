"""What an operating system does to a process that it has no memory for.

    refuse_memory(pid)   the next large allocation fails, as on a machine that does not overcommit
    kill_for_memory(pid) the kernel's out-of-memory killer takes it, in a control group that is too small

For the second a glutton joins the process in a group of 16 MiB: pages that a process has already are charged
where it was when it got them, so the group is filled by someone else; and of the two, the kernel takes first the
one that has been named as the first to go (if it is larger than a bare Python, as every runner is). That needs root and the memory controller (of either version).
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

GROUP_BYTES = 16 * 1024**2
GLUTTON_SECONDS = 10.0
_GLUTTON = "held = [bytearray(1 << 20) for _ in range(256)]"
_FIRST_TO_GO = 1000
ROOTS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


class NotHereError(Exception):
    """This machine cannot do that."""


def refuse_memory(pid: int) -> None:
    """`pid` gets no more address space than it has. Raises NotHereError where there is no such limit."""
    limit = getattr(psutil, "RLIMIT_AS", None)
    if limit is None:
        raise NotHereError("limits of other processes are a Linux thing")
    process = psutil.Process(pid)
    process.rlimit(limit, (process.memory_info().vms, resource.RLIM_INFINITY))


def kill_for_memory(pid: int) -> int:
    """Returns once the kernel has killed for want of memory, and `pid` is gone; how many processes it took.

    Raises:
        NotHereError: no control group for memory can be made here.
    """
    group, limit = _group()
    try:
        limit.write_text(str(GROUP_BYTES))
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(_FIRST_TO_GO))
        (group / "cgroup.procs").write_text(str(pid))
        join = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-c", f"{join}; {_GLUTTON}"],
                timeout=GLUTTON_SECONDS,
                check=False,
                capture_output=True,
            )
        return _kills(group)
    finally:
        deadline = time.monotonic() + GLUTTON_SECONDS
        while _lives(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(OSError):  # a process that is still dying: an empty group costs nothing
            group.rmdir()


def kills_for_memory_work() -> bool:
    """Whether `kill_for_memory` can be done here."""
    try:
        group, _ = _group()
    except NotHereError:
        return False
    group.rmdir()
    return True


def _group() -> tuple[Path, Path]:
    """A new control group, and its file with the limit."""
    if os.geteuid() == 0:
        for root, name in ROOTS:
            if not (root / "cgroup.procs").exists():
                continue
            group = root / f"meshinfer-{uuid.uuid4().hex[:8]}"
            with contextlib.suppress(OSError):
                group.mkdir()
                if (group / name).exists():
                    return group, group / name
                group.rmdir()
    raise NotHereError("no control group for memory can be made (it needs root, and the memory controller)")


def _lives(pid: int) -> bool:
    """Without burying it: that is its parent's."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kills(group: Path) -> int:
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(FileNotFoundError):
            for line in (group / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
