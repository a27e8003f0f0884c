"""Two machines on a cable whose two directions are throttled: each is seen as it is, in the direction that it is.

The machines are network namespaces joined by a veth pair; `tc tbf` throttles. What is asserted is attribution, not
precision: the machine may be busy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from meshinfer.transport.probe_channel import BULK_BYTES, LATENCY_BYTES

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
        reason="network namespaces and rate limits need root and iproute2",
    ),
]

DIALLER, ACCEPTOR = "10.78.0.1", "10.78.0.2"
MBIT = 1e6 / 8
"""Bytes per second."""


class Ends:
    """A dialler and an acceptor, each on its machine."""

    def __init__(self, tag: str, dialler: subprocess.Popen[str], acceptor: subprocess.Popen[str]) -> None:
        self.tag, self._dialler, self._acceptor = tag, dialler, acceptor
        self._certificate = self._line(dialler)

    def throttle(self, dialler_mbit: int, acceptor_mbit: int) -> None:
        """What each end may send."""
        for end, mbit in (("a", dialler_mbit), ("b", acceptor_mbit)):
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "100ms")
            _run("tc", "-n", f"mi-{self.tag}-{end}", "qdisc", "replace", "dev", f"v{self.tag}{end}", "root", *limit)

    def measure(self, bulk_bytes: int = BULK_BYTES) -> dict[str, float]:
        self._say(self._acceptor, self._certificate)
        self._say(self._dialler, f"{self._line(self._acceptor)} {bulk_bytes}")
        return json.loads(self._line(self._dialler))

    @staticmethod
    def _say(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, f"{process.args} ended"
        return line


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def ends() -> Iterator[Ends]:
    tag = uuid.uuid4().hex[:6]
    with ExitStack() as stack:
        for end, host in (("a", DIALLER), ("b", ACCEPTOR)):
            _run("ip", "netns", "add", f"mi-{tag}-{end}")
            stack.callback(subprocess.run, ["ip", "netns", "delete", f"mi-{tag}-{end}"], check=False)
            if end == "a":
                _run("ip", "link", "add", f"v{tag}a", "type", "veth", "peer", "name", f"v{tag}b")
            _run("ip", "link", "set", f"v{tag}{end}", "netns", f"mi-{tag}-{end}")
            _run("ip", "-n", f"mi-{tag}-{end}", "address", "add", f"{host}/24", "dev", f"v{tag}{end}")
            _run("ip", "-n", f"mi-{tag}-{end}", "link", "set", f"v{tag}{end}", "up")
        acceptor = stack.enter_context(_process(f"mi-{tag}-b", "accept", ACCEPTOR, str(BULK_BYTES)))
        dialler = stack.enter_context(_process(f"mi-{tag}-a", "dial"))
        yield Ends(tag, dialler, acceptor)


@contextmanager
def _process(namespace: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("probe_process.py"))
    command = ["ip", "netns", "exec", namespace, sys.executable, script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_each_direction_is_seen_as_it_is(ends: Ends) -> None:
    ends.throttle(dialler_mbit=100, acceptor_mbit=10)
    found = ends.measure()
    assert found["out_bytes_per_second"] > 3 * found["in_bytes_per_second"]
    assert found["in_bytes_per_second"] < 2 * 10 * MBIT
    ends.throttle(dialler_mbit=10, acceptor_mbit=100)
    found = ends.measure()
    assert found["in_bytes_per_second"] > 3 * found["out_bytes_per_second"]
    assert found["out_bytes_per_second"] < 2 * 10 * MBIT


def test_a_slow_link_is_probed_with_little(ends: Ends) -> None:
    ends.throttle(dialler_mbit=10, acceptor_mbit=10)
    found = ends.measure()
    for way in ("out_bytes_per_second", "in_bytes_per_second"):
        assert 10 * MBIT / 4 < found[way] < 10 * MBIT * 2
    assert found["spent_bytes"] < LATENCY_BYTES + BULK_BYTES / 8


def test_round_trips_alone_send_no_bursts(ends: Ends) -> None:
    ends.throttle(dialler_mbit=10, acceptor_mbit=10)
    found = ends.measure(0)
    assert found["out_bytes_per_second"] == found["in_bytes_per_second"] == 0
    assert found["spent_bytes"] <= LATENCY_BYTES
    assert found["rtt_seconds"] > 0
