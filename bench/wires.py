"""Machines made of network namespaces, and the cables between them: plain, slow, or long. Needs root, Linux, iproute2.

Every pair of machines has a cable of its own, in a network of its own, so what one of them suffers no other does:

    plain   a veth pair
    slow    the same, with `tc tbf` at both ends: a token bucket that lets small messages through at full speed
    long    a pair of taps and a thread here that hands each Ethernet frame over after a delay

The fault proxy of `meshinfer.testing` delays connections that it is told of. A runner chooses its port itself and says
it to nobody but its neighbour, inside of the mesh; so runners' frames are delayed one layer lower, and with them
everything else between those two machines, as on a real long cable. Kernels here have no `tc netem`.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65536
_BURST = "32kb"
"""What the token bucket saves: a decode step passes at once, a chunk does not."""


@dataclass(frozen=True)
class Cable:
    """Between two machines."""

    rate: str = ""
    """As tc has it (`20mbit`); empty: as fast as memory."""
    delay_seconds: float = 0.0
    """Each way."""

    def __str__(self) -> str:
        words = [self.rate, f"{1e3 * self.delay_seconds:g} ms" if self.delay_seconds else ""]
        return " ".join(word for word in words if word) or "plain"


Pair = tuple[str, str]


@contextmanager
def machines(names: Sequence[str], cables: Mapping[Pair, Cable]) -> Generator[dict[str, str]]:
    """A namespace for each of `names`, by name; pairs that `cables` does not have get plain ones."""
    tag = uuid.uuid4().hex[:6]
    spaces = {name: f"mp-{tag}-{name}" for name in names}
    relays: list[_Relay] = []
    try:
        for space in spaces.values():
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
        for number, pair in enumerate(combinations(names, 2)):
            cable = cables.get(pair) or cables.get((pair[1], pair[0])) or Cable()
            # No name that meshinfer takes for a container's bridge (veth…, vnet…).
            ends = (f"w{tag}{number}a", f"w{tag}{number}b")
            if cable.delay_seconds:
                relays.append(_Relay(ends, cable.delay_seconds))
            else:
                _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for index, (name, end) in enumerate(zip(pair, ends, strict=True)):
                space = spaces[name]
                _run("ip", "link", "set", end, "netns", space)
                _run("ip", "-n", space, "address", "add", f"10.78.{number}.{index + 1}/24", "dev", end)
                _run("ip", "-n", space, "link", "set", end, "up")
                # What laptops have, wherever this runs: servers' bbr does not begin slowly again after a pause.
                _run("ip", "-n", space, "route", "change", f"10.78.{number}.0/24", "dev", end, "congctl", "cubic")
                if cable.rate:
                    shape = ["root", "tbf", "rate", cable.rate, "burst", _BURST, "latency", "2s"]
                    _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", end, *shape)
        yield spaces
    finally:
        for relay in relays:
            relay.end()
        for space in spaces.values():  # the cables go with them
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


class _Relay:
    """Two taps, and a thread between them that is as late as it should be."""

    def __init__(self, ends: Pair, delay_seconds: float) -> None:
        self._taps = [_tap(end) for end in ends]
        self._delay_seconds = delay_seconds
        self._wake, self._woken = os.pipe()[::-1]
        self._thread = threading.Thread(target=self._work, name=f"cable {ends[0]}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        os.write(self._wake, b".")
        self._thread.join(5.0)
        for each in (*self._taps, self._wake, self._woken):
            os.close(each)

    def _work(self) -> None:
        under_way: deque[tuple[float, int, bytes]] = (
            deque()
        )  # (due, tap, frame), in order: the delay is always the same
        while True:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([*self._taps, self._woken], [], [], wait)
            if self._woken in ready:
                return
            for tap in ready:
                other = self._taps[1 - self._taps.index(tap)]
                # All that is there: one look costs as much as one frame.
                while (frame := _read(tap)) is not None:
                    under_way.append((time.monotonic() + self._delay_seconds, other, frame))
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, tap, frame = under_way.popleft()
                try:
                    os.write(tap, frame)
                except OSError:  # that end is not up yet, or no more: the frame is lost, as on a cable
                    continue


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return tap


def _read(tap: int) -> bytes | None:
    try:
        return os.read(tap, _FRAME_BYTES)
    except OSError:  # nothing there, or that end is down
        return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
