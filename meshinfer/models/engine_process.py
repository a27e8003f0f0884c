"""The engine in a process of its own: how every part of the agent starts one.

Always `python -m meshinfer.runner …`, exec'd afresh (never forked: MLX does not survive a fork), and so that
- it knows no secret: the mesh's code and the API's key are none of its business, and an environment can be
  read by whoever may look at the process;
- it has a session of its own: a Ctrl-C in the agent's terminal reaches the agent, which then ends what it
  started in its own order, and is not answered by an engine that seems to have crashed;
- it does not outlive the wait for it: cancelled, it is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import trio

SECRET_VARIABLES = frozenset({"MESHINFER_JOIN_CODE", "MESHINFER_API_KEY"})


def engine_command(*arguments: str) -> list[str]:
    """What to run for `meshinfer.runner` with these arguments."""
    # -P: a file named mlx.py where the user happens to stand is not what we want to import.
    return [sys.executable, "-P", "-m", "meshinfer.runner", *arguments]


def without_secrets() -> dict[str, str]:
    """This process's environment, for a process that need not know what is secret in it."""
    return {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}


def engine_options() -> dict[str, Any]:
    """For `subprocess.Popen` or trio: what every engine process has in common."""
    return {
        "stdin": subprocess.DEVNULL,
        "env": without_secrets(),
        "start_new_session": True,
    }


async def run_engine(arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[bytes] | None:
    """Run a short job to its end, whatever its exit code; None after `seconds`. Killed then, and when cancelled.

    Raises:
        OSError: it cannot be started.
    """
    with trio.move_on_after(seconds):
        return await trio.run_process(
            engine_command(*arguments),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            deliver_cancel=_kill,
            **engine_options(),
        )
    return None


async def _kill(process: trio.Process) -> None:
    process.kill()
