"""A process whose thread is refused memory ends, and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshinfer.base.threads import EXIT_CODE

PROGRAM = """
import threading
from meshinfer.base.threads import end_with_a_starved_thread

def work():
    raise {error}

end_with_a_starved_thread()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("MemoryError", EXIT_CODE),
        ('RuntimeError("can\'t start new thread")', EXIT_CODE),
        ("ValueError('a bad frame')", 0),
    ],
)
def test_it_ends_for_want_of_memory_alone(error: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error)], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == code
    assert b"Traceback" in ended.stderr
