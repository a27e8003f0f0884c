"""What `meshinfer up` says before it can do anything."""

import subprocess
import sys
from pathlib import Path

# The first of its libraries is not to be had: whatever is said was said before.
WITHOUT_LIBRARIES = "import sys; sys.modules['trio'] = None; from meshinfer.cli import main; main()"


def test_it_says_what_it_does_before_it_loads_what_takes_seconds(tmp_path: Path):
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, "up", "--home", str(tmp_path)]

    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    first, *_, last = result.stderr.splitlines()
    assert first == "starting: loading libraries …"
    assert "trio" in last
