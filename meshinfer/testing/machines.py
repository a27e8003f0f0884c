"""Where the agents of a room live: what this one machine can be made to look like to each of them.

    OneMachine     loopback; every agent as a person would start it
    CabledMachines a network namespace and a cable of its own for each; a cable can be pulled or made slow,
                   and what one sends to another can be made to vanish
    SkewedClocks   monotonic clocks hours apart, and wall clocks that can be set
    SmallDisks     a home of 4 MiB each, which can be filled
    (BadLines      fault proxies between them: `testing.bad_lines`; BadChannels: between their runners)

All but the first need root, as the kernel has it; `why_not()` says what else is missing here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from meshinfer.base.files import write_atomically

HOUR_SECONDS = 3600
DISK_BYTES = 4 * 1024**2
"""An agent's own files take some 20 KB; what is left must be quick to fill."""
NOBODY = "02:00:00:00:00:01"
"""A hardware address (a locally administered one) that no cable's end has."""
SLOW_BITS_PER_SECOND = 200_000
"""A bad mobile connection: an activation of the small model (2.3 KB) takes a tenth of a second."""


class OneMachine:
    """Loopback. Leaving the context undoes whatever a subclass has done to the machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names: list[str] = []
        """In the order in which they moved in."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def why_not() -> str:
        """Why such machines cannot be had here; empty if they can."""
        return ""

    def move_in(self, name: str) -> Path:
        """The home of agent `name`, made at its first start."""
        home = self.directory / name
        if name not in self.names:
            self.names.append(name)
            home.mkdir()
            self._furnish(name)
        return home

    def prefix(self, name: str) -> tuple[str, ...]:
        """Of its command line."""
        del name
        return ()

    def options(self, name: str) -> tuple[str, ...]:
        """Of `meshinfer up`."""
        del name
        return ("--loopback",)

    def _furnish(self, name: str) -> None:
        """What is done once for a new home."""


class CabledMachines(OneMachine):
    """A bridge, and one cable from it to each agent's namespace."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._tag = uuid.uuid4().hex[:5]

    def __enter__(self) -> Self:
        bridge = f"mi-{self._tag}"
        with ExitStack() as made:  # undone if the next step fails
            _run("ip", "link", "add", "name", bridge, "type", "bridge")
            made.callback(_run, "ip", "link", "delete", bridge)
            _run("ip", "address", "add", "10.78.0.254/24", "dev", bridge)
            _run("ip", "link", "set", bridge, "up")
            self._stack = made.pop_all()
        return self

    @staticmethod
    def why_not() -> str:
        return needs_root("ip", "tc")

    def prefix(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._namespace(name))

    def options(self, name: str) -> tuple[str, ...]:
        return ("--api-host", self._host(name), "--api-without-key")

    def pull(self, *names: str) -> None:
        for name in names:
            _run("ip", "link", "set", self._cable(name), "down")

    def plug(self, *names: str) -> None:
        for name in names:
            _run("ip", "link", "set", self._cable(name), "up")

    def cut(self, *pairs: tuple[str, str]) -> None:
        """What the first of a pair sends to the second vanishes without a word, also on connections that are open.

        Its kernel believes that the other is where nobody is. Only multicast still arrives, so it is found, not reached.
        """
        for sender, receiver in pairs:
            self._neighbour("replace", sender, receiver, "lladdr", NOBODY, "nud", "permanent")

    def mend(self, *pairs: tuple[str, str]) -> None:
        for sender, receiver in pairs:
            self._neighbour("delete", sender, receiver)

    def slow_down(self, name: str) -> None:
        """Both ways; what does not go out within half a second is dropped, as on a full radio link."""
        bucket = ("tbf", "rate", f"{SLOW_BITS_PER_SECOND}bit", "burst", "16kb", "latency", "500ms")
        _run("tc", "qdisc", "replace", "dev", self._cable(name), "root", *bucket)
        _run("tc", "-n", self._namespace(name), "qdisc", "replace", "dev", f"{self._cable(name)}p", "root", *bucket)

    def speed_up(self, name: str) -> None:
        _run("tc", "qdisc", "delete", "dev", self._cable(name), "root")
        _run("tc", "-n", self._namespace(name), "qdisc", "delete", "dev", f"{self._cable(name)}p", "root")

    def _furnish(self, name: str) -> None:
        namespace, ours, theirs = self._namespace(name), self._cable(name), f"{self._cable(name)}p"
        _run("ip", "netns", "add", namespace)
        self._stack.callback(_run, "ip", "netns", "delete", namespace)  # the cable goes with it
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs)
        _run("ip", "link", "set", ours, "master", f"mi-{self._tag}", "up")
        _run("ip", "link", "set", theirs, "netns", namespace)
        _run("ip", "-n", namespace, "address", "add", f"{self._host(name)}/24", "dev", theirs)
        _run("ip", "-n", namespace, "link", "set", theirs, "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _neighbour(self, what: str, sender: str, receiver: str, *how: str) -> None:
        device = f"{self._cable(sender)}p"
        _run("ip", "-n", self._namespace(sender), "neigh", what, self._host(receiver), "dev", device, *how)

    def _namespace(self, name: str) -> str:
        return f"mi-{self._tag}-{name}"

    def _cable(self, name: str) -> str:
        return f"mi{self._tag}{name[:5]}"  # the kernel allows 15 characters

    def _host(self, name: str) -> str:
        return self._host_at(self.names.index(name))

    @staticmethod
    def _host_at(place: int) -> str:
        return f"10.78.0.{place + 1}"


class SkewedClocks(OneMachine):
    """No two agents' monotonic clocks agree, by an hour each, and anybody's wall clock can be set.

    The monotonic clock is that of a time namespace, and its runners' as well; the wall clock that of libfaketime.
    """

    @staticmethod
    def why_not() -> str:
        return needs_root("unshare") or ("" if _faketime() else "it needs libfaketime (apt-get install faketime)")

    def prefix(self, name: str) -> tuple[str, ...]:
        # Neither tool forks: the process that is signalled is the agent. The monotonic clock is left to the namespace.
        file = (f"FAKETIME_TIMESTAMP_FILE={self._clock(name)}", "FAKETIME_CACHE_DURATION=1")
        fake = (*file, "FAKETIME_DONT_FAKE_MONOTONIC=1", "FAKETIME_DISABLE_SHM=1", "NO_FAKE_STAT=1")
        seconds = str(HOUR_SECONDS * self.names.index(name))
        ahead = ("--monotonic", seconds, "--boottime", seconds)
        return ("unshare", "--time", *ahead, "env", f"LD_PRELOAD={_faketime()}", *fake)

    def set_wall_clock(self, name: str, ahead_seconds: float) -> None:
        """Within a second, it and its runners see their wall clocks so far ahead."""
        write_atomically(self._clock(name), f"{ahead_seconds:+.0f}s\n".encode())

    def _furnish(self, name: str) -> None:
        self.set_wall_clock(name, 0.0)

    def _clock(self, name: str) -> Path:
        return self.directory / name / "wall-clock"


class SmallDisks(OneMachine):
    """Each home is a file system of its own, in memory. Models are not on it."""

    @staticmethod
    def why_not() -> str:
        return needs_root("mount", "umount")

    def fill(self, name: str) -> None:
        """To the last byte."""
        with (self.directory / name / "ballast").open("ab", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    def empty(self, name: str) -> None:
        (self.directory / name / "ballast").unlink(missing_ok=True)

    def _furnish(self, name: str) -> None:
        home = str(self.directory / name)
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "meshinfer-chaos", home)
        self._stack.callback(_run, "umount", "--lazy", home)


def _faketime() -> str:
    """Where libfaketime lies; empty if it is not installed."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return str(found[0]) if found else ""


def needs_root(*tools: str) -> str:
    """What is missing for machines that only root can make, with these tools; empty if nothing is."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "it needs root"
    return f"it needs {', '.join(missing)}" if missing else ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
