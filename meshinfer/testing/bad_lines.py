"""Machines that talk to each other over fault proxies: the control plane of every pair, both ways.

The machine (a network namespace that the calling thread enters, with whatever it starts from then on) has loopback
and nothing else, and agents do not announce loopback. So the only way from one to another is the proxy that it was
told of with `--peer`, also after a connection broke. Runners find each other without: activations take no part.

    BadLines(directory).suffer("n1", Faults(delay=0.2))
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import trio
import trio.from_thread

from meshinfer.testing.fault_proxy import DIRECTIONS, FaultProxy, Faults
from meshinfer.testing.machines import OneMachine, needs_root

_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET; the standard library knows it from Python 3.12 on."""
FIRST_PORT = 7000
"""Of the agents. Nobody else is in this network."""
PROXY_SECONDS = 10.0


class BadLines(OneMachine):
    """Lines are good until `suffer`."""

    AGENTS = 5
    """At most: each is told at its first start of the proxies to all."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._proxies: dict[tuple[int, int], tuple[FaultProxy, int]] = {}
        """(who dials, who is dialled) → the proxy between them, and its port."""

    def __enter__(self) -> Self:
        with ExitStack() as made:  # undone if the next step fails
            here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            made.callback(os.close, here)
            _check(_libc().unshare(_NEW_NETWORK))
            made.callback(lambda: _check(_libc().setns(here, _NEW_NETWORK)))
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
            ready = threading.Event()
            thread = threading.Thread(target=trio.run, args=(self._serve, ready), daemon=True)
            thread.start()
            if not ready.wait(PROXY_SECONDS):
                raise OSError("the fault proxies did not start")
            made.callback(thread.join, PROXY_SECONDS)
            made.callback(lambda: self._call(self._scope.cancel))
            self._stack = made.pop_all()
        return self

    @staticmethod
    def why_not() -> str:
        return needs_root("ip") if sys.platform == "linux" else "it needs Linux"

    def options(self, name: str) -> tuple[str, ...]:
        me = self.names.index(name)
        peers = [f"--peer=127.0.0.1:{port}" for (near, _), (_, port) in self._proxies.items() if near == me]
        return ("--port", str(FIRST_PORT + me), "--no-discovery", *peers)

    def suffer(self, name: str, faults: Faults) -> None:
        """Every line from and to agent `name`, from now on."""
        self._call(lambda: [proxy.set(faults) for proxy in self._of(name)])

    def reset(self, name: str) -> None:
        """Every connection from and to it."""
        self._call(lambda: [proxy.reset() for proxy in self._of(name)])

    def half_close(self, name: str) -> None:
        """It sends on, and nobody hears: every receiver of it reads the end."""
        self._call(lambda: [proxy.half_close(way) for proxy in self._of(name) for way in DIRECTIONS])

    def _of(self, name: str) -> list[FaultProxy]:
        me = self.names.index(name)
        return [proxy for pair, (proxy, _) in self._proxies.items() if me in pair]

    def _call(self, what: Callable[[], object]) -> None:
        with suppress(trio.RunFinishedError):
            trio.from_thread.run_sync(what, trio_token=self._token)

    async def _serve(self, ready: threading.Event) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                for near, far in itertools.permutations(range(self.AGENTS), 2):
                    proxy = FaultProxy(("127.0.0.1", FIRST_PORT + far), random.Random(f"{near} {far}"))  # noqa: S311 - it replays
                    self._proxies[near, far] = proxy, await nursery.start(proxy.run, "127.0.0.1", 0)
                ready.set()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
