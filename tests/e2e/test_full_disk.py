"""A disk without room for one more byte: the agent says so, goes on, and starts again as the node that it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh import FRANCE, ask

from meshinfer.testing import agent_process
from meshinfer.testing.machines import SmallDisks

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(SmallDisks.why_not()), reason=SmallDisks.why_not() or "it can"),
]
OPTIONS = ("--no-discovery", "--memory", "1GiB", "--context", "512", "--concurrency", "1")


def test_a_full_disk_costs_no_answer_and_no_identity(tmp_path: Path, model_store: Path) -> None:
    with SmallDisks(tmp_path) as machines:
        home = machines.move_in("solo")
        (home / "models").symlink_to(model_store)
        log_file = tmp_path / "solo.log"
        first = agent_process.start(home, *OPTIONS, log_file=log_file)
        try:
            machines.fill("solo")
            assert "Paris" in ask(first.url, FRANCE)
        finally:
            first.kill()
        (home / "agent.api").unlink()  # the next start would take it away, and have its room
        machines.fill("solo")
        again = agent_process.start(home, *OPTIONS, log_file=log_file)
        with agent_process.ending(again.process):
            assert again.node_id == first.node_id
            assert again.started["key_source"] == "home"
            assert "Paris" in ask(again.url, FRANCE)
        told = log_file.read_text()
        assert "No space left on device" in told
        assert "Traceback" not in told
