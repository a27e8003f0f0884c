"""Machines that talk to each other over fault proxies: the control plane of every pair, both ways.

The machine (a network namespace that the calling thread enters, with whatever it starts from then on) has loopback
and nothing else, and agents do not announce loopback. So the only way from one to another is the proxy that it was
told of with `--peer`, also after a connection broke. Runners find each other without: for what passes between
them see `testing.bad_channels`.

    BadLines(directory).lines.suffer("n1", Faults(delay=0.2))
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from meshinfer.testing.machines import OneMachine, needs_root
from meshinfer.testing.proxied_lines import NEW_NETWORK, Line, Lines, Pair, check, libc

FIRST_PORT = 7000
"""Of the agents. Nobody else is in this network."""


class BadLines(OneMachine):
    """Lines are good until they are to suffer."""

    AGENTS = 5
    """At most: each is told at its first start of the proxies to all."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.lines = Lines(self.names)
        self._ports: dict[Pair, int] = {}
        """Of the proxies."""

    def __enter__(self) -> Self:
        with ExitStack() as made:  # undone if the next step fails
            here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            made.callback(os.close, here)
            check(libc().unshare(NEW_NETWORK))
            made.callback(lambda: check(libc().setns(here, NEW_NETWORK)))
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
            pairs = itertools.permutations(range(self.AGENTS), 2)
            lines = {(near, far): Line(("127.0.0.1", FIRST_PORT + far)) for near, far in pairs}
            self._ports = made.enter_context(self.lines.serving(lines))
            self._stack = made.pop_all()
        return self

    @staticmethod
    def why_not() -> str:
        return needs_root("ip") if sys.platform == "linux" else "it needs Linux"

    def options(self, name: str) -> tuple[str, ...]:
        me = self.names.index(name)
        peers = [f"--peer=127.0.0.1:{port}" for (near, _), port in self._ports.items() if near == me]
        return ("--port", str(FIRST_PORT + me), "--no-discovery", *peers)
