"""What an operating system does to a process that it has no memory for.

    refuse_memory(pid)   the next large allocation fails, as on a machine that does not overcommit
    kill_for_memory(pid) the kernel's out-of-memory killer takes it, in a control group that is too small

And of what a fault of its own may do to it: `hang(pid)` stops the one thread that computes, as a driver does that
never comes back, and all others go on.

For the second a glutton joins the process in a group of 16 MiB: pages that a process has already are charged
where it was when it got them, so the group is filled by someone else; and of the two, the kernel takes first the
one that has been named as the first to go (if it is larger than a bare Python, as every runner is). That needs root and the memory controller (of either version).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

GROUP_BYTES = 16 * 1024**2
GLUTTON_SECONDS = 10.0
_GLUTTON = "held = [bytearray(1 << 20) for _ in range(256)]"
_FIRST_TO_GO = 1000
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
"""Of ptrace(2)."""
_ALL_THREADS = 0x40000000
"""__WALL of waitpid(2): a thread is waited for, not a process."""
LET_GO_SECONDS = 0.01
"""Between two looks whether the thread is to go on, or has died: only then does its process count as dead."""
HANG_SECONDS = 5.0
BUSY_SECONDS = 0.1
"""How long threads are watched for which of them computes. MLX has one for each epoch that its process has served."""
BUSY_SHARE = 0.01
"""Of a core: more than threads take that only wait, and less than the smallest model does while it answers."""
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


def hang(pid: int) -> Callable[[], None]:
    """Stop the thread of `pid` that computes, its first one left out: that builds steps and waits for them.
    Returns once it stands; what is returned lets it go on. It may be killed meanwhile.

    Raises:
        NotHereError: this is not Linux, or its threads may not be stopped, or none but the first does anything.
    """
    if why := why_not_hang():
        raise NotHereError(why)
    busiest = _computing_thread(pid)
    stands, goes_on = threading.Event(), threading.Event()
    failed: list[str] = []

    def hold() -> None:
        """All of it on one thread: to the kernel that is the tracer."""
        try:
            _ptrace(_SEIZE, busiest)
            _ptrace(_INTERRUPT, busiest)
            _, status = os.waitpid(busiest, _ALL_THREADS)
            stands.set()
            while os.WIFSTOPPED(status) and not goes_on.wait(LET_GO_SECONDS):
                done, now = os.waitpid(busiest, _ALL_THREADS | os.WNOHANG)
                status = now if done else status
            if os.WIFSTOPPED(status):
                _ptrace(_DETACH, busiest)
        except OSError as error:
            failed.append(str(error))
        finally:
            stands.set()

    tracer = threading.Thread(target=hold, daemon=True)
    tracer.start()
    if not stands.wait(HANG_SECONDS) or failed:
        goes_on.set()
        raise NotHereError(f"thread {busiest} of {pid} cannot be stopped: {' '.join(failed) or 'it does not stand'}")

    def let_go() -> None:
        goes_on.set()
        tracer.join(HANG_SECONDS)

    return let_go


def why_not_hang() -> str:
    """Why no thread of another process can be stopped here; empty if one can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if not Path("/proc/self/schedstat").exists():
        return "it needs a kernel that counts how long each thread runs"
    return "" if os.geteuid() == 0 else "it needs root"


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


def _computing_thread(pid: int) -> int:
    """The busiest but for the first, as soon as one is busy at all. Raises NotHereError if none is."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        before = _computed(pid)
        time.sleep(BUSY_SECONDS)
        since = {thread: now - before.get(thread, 0) for thread, now in _computed(pid).items() if thread != pid}
        busiest = max(since, key=since.__getitem__, default=pid)
        if since.get(busiest, 0) > BUSY_SHARE * BUSY_SECONDS * 1e9:
            return busiest
    raise NotHereError(f"no thread of process {pid} computes, but perhaps its first")


def _computed(pid: int) -> dict[int, int]:
    """Thread → nanoseconds on a core."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # one that has ended
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found


def _ptrace(request: int, thread_id: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    call.restype = ctypes.c_long
    if call(request, thread_id, None, None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
