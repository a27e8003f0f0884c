"""What a second signal does to an agent that is leaving."""

import signal
import subprocess
import sys

import pytest

LEAVING = """
import sys, trio, trio.testing
from meshinfer.cli.up import _cancel_on_signal

async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
        await trio.testing.wait_all_tasks_blocked()
        print("up", flush=True)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                print("leaving", flush=True)
                await trio.to_thread.run_sync(sys.stdin.readline)
            print("left", flush=True)

trio.run(main)
"""


@pytest.mark.parametrize(
    ("second", "code", "words"),
    [(signal.SIGTERM, 0, "left\n"), (signal.SIGHUP, 0, "left\n"), (signal.SIGINT, 128 + signal.SIGINT, "")],
)
def test_only_a_second_ctrl_c_ends_at_once_what_is_leaving(second: signal.Signals, code: int, words: str):
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LEAVING], text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "leaving\n"
        process.send_signal(second)
        if not code:  # delivered before it is read that nothing is left to be waited for
            said, _ = process.communicate("\n", timeout=60)
        else:
            said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, words)
