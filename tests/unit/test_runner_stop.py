"""A runner that does not react is killed without being asked, and one that hangs in the kernel is not waited for."""

import signal
import socket
import subprocess
import sys
from typing import cast

import pytest
import trio
import trio.testing

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


@pytest.mark.parametrize("at_once", [True, False])
async def test_the_seats_do_not_wait_for_a_process_that_the_kernel_does_not_let_go(
    at_once: bool, autojump_clock: trio.testing.MockClock
) -> None:
    class Hanging:
        pid, returncode, killed = 4711, None, False

        def kill(self) -> None:
            self.killed = True

        async def wait(self) -> int:
            await trio.sleep(3600)
            return 0

    process = Hanging()
    ours, theirs = socket.socketpair()
    with theirs:
        runner = RunnerProcess(cast("trio.Process", process), trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        began = trio.current_time()
        await runner.stop(at_once=at_once)
        assert trio.current_time() - began < 60  # of the virtual clock
    assert process.killed
    assert "4711" in runner._obituary()
