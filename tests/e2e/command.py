"""The command line as a person uses it: one command, run to its end. Agents: `meshinfer.testing.agent_process`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def meshinfer(*arguments: str, home: Path | None = None, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [sys.executable, "-m", "meshinfer.cli", *arguments]
    if home is not None:
        command += ["--home", str(home)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
    )
