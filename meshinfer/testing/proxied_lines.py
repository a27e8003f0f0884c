"""The lines between the agents of a room, each over a fault proxy of its own, and what is done to them.

    lines = Lines(machines.names)
    with lines.serving({(0, 1): Line(target)}) as ports:    # from who moved in first to who moved in second
        lines.suffer("n1", Faults(delay=0.2))

Proxies run in a thread, which may be in another network than ours. Where they are and how connections come to them is
for the machines to say: `testing.bad_lines`, `testing.bad_channels`.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import trio
import trio.from_thread

from meshinfer.testing.fault_proxy import DIRECTIONS, FaultProxy, Faults

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET; the standard library knows it from Python 3.12 on."""
PROXY_SECONDS = 10.0

Pair = tuple[int, int]
"""(who dials, who is dialled), by their places among the names."""


class Line(NamedTuple):
    """Over which proxy it goes."""

    target: tuple[str, int] | None
    """Where that passes things on to; None: where they were going when the kernel redirected them."""
    port: int = 0
    """Of the proxy; 0 for any."""


class Lines:
    """Good until they are to suffer."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._proxies: dict[Pair, tuple[FaultProxy, trio.lowlevel.TrioToken]] = {}

    @contextmanager
    def serving(
        self, lines: Mapping[Pair, Line], host: str = "127.0.0.1", network: Path | None = None
    ) -> Generator[dict[Pair, int]]:
        """Inside, proxies run; yields the port of each.

        Args:
            lines: that are to be.
            host: on which their proxies listen.
            network: a namespace's; the caller's if None.
        """
        ports: dict[Pair, int] = {}
        started = threading.Event()

        async def serve() -> None:
            token = trio.lowlevel.current_trio_token()
            async with trio.open_nursery() as nursery:
                for (near, far), (target, port) in lines.items():
                    proxy = FaultProxy(target, random.Random(f"{near} {far}"))  # noqa: S311 - it replays
                    ports[near, far] = await nursery.start(proxy.run, host, port)
                    self._proxies[near, far] = proxy, token
                ends.append(lambda: _call(token, nursery.cancel_scope.cancel))
                started.set()

        def run() -> None:
            if network is not None:
                enter_network(network)
            trio.run(serve)

        ends: list[Callable[[], None]] = []
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        if not started.wait(PROXY_SECONDS):
            raise OSError("the fault proxies did not start")
        try:
            yield ports
        finally:
            for end in ends:
                end()
            thread.join(PROXY_SECONDS)

    def suffer(self, name: str, faults: Faults) -> None:
        """Every line from and to agent `name`, from now on."""
        self._do(name, lambda proxy: proxy.set(faults))

    def reset(self, name: str) -> None:
        """Every connection from and to it."""
        self._do(name, lambda proxy: proxy.reset())

    def half_close(self, name: str) -> None:
        """It sends on, and nobody hears: every receiver of it reads the end."""
        for way in DIRECTIONS:
            self._do(name, lambda proxy, way=way: proxy.half_close(way))

    def _do(self, name: str, what: Callable[[FaultProxy], None]) -> None:
        me = self._names.index(name)
        for pair, (proxy, token) in self._proxies.items():
            if me in pair:
                _call(token, lambda proxy=proxy: what(proxy))


def enter_network(network: Path) -> None:
    """The calling thread is in that namespace from now on, and whatever it starts."""
    opened = os.open(network, os.O_RDONLY)
    try:
        check(libc().setns(opened, NEW_NETWORK))
    finally:
        os.close(opened)


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    """Raises OSError if a call of the C library failed."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _call(token: trio.lowlevel.TrioToken, what: Callable[[], None]) -> None:
    """In the proxies' own thread."""
    with suppress(trio.RunFinishedError):
        trio.from_thread.run_sync(what, trio_token=token)
