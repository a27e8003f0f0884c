"""A runner that does not react is killed without being asked."""

import signal
import socket
import subprocess
import sys

import pytest
import trio

from meshinfer.serving.runners import RunnerProcess


@pytest.mark.parametrize("at_once", [True, False])
async def test_only_who_may_react_is_asked_to_stop(at_once: bool) -> None:
    ours, theirs = socket.socketpair()
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    process.send_signal(signal.SIGSTOP)  # frozen, as far as the agent can tell
    runner = RunnerProcess(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
    await runner.stop(at_once=at_once)
    assert process.returncode == -signal.SIGKILL
    with theirs:
        assert bool(theirs.recv(4096)) is not at_once
