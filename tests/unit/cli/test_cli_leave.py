"""What `meshinfer leave` waits for."""

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from meshinfer.cli.app import app

AGENT = """
import pathlib, signal, sys, time
from meshinfer.transport.home_lock import one_agent

home = pathlib.Path(sys.argv[1])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
with one_agent(home):
    print("up", flush=True)
    while not told:
        time.sleep(0.01)
time.sleep(1)  # as an interpreter that frees its memory, on a busy machine
(home / "ended").touch()
"""


def test_it_has_left_once_its_process_has_ended_and_not_when_its_home_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], text=True, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "up\n"
        result = CliRunner().invoke(app, ["leave", "--home", str(tmp_path)])
        assert result.exit_code == 0
        assert "Left." in result.stderr
        assert (tmp_path / "ended").exists()
