"""A node whose clock is wrong by an hour is a normal node: nothing that two nodes compare comes from the wall clock.

Runs with such nodes are in `tests/sim/test_clocks.py` and `./scripts/chaos` (`--only clocks`, `--machines clocks`);
this names the places that may read it, and sees that what the agent decides goes by trio's clock alone, which is
the one that a simulation can set.
"""

from __future__ import annotations

import re
from pathlib import Path

import meshinfer

MAY_READ_IT = {
    "api/app.py": "when models were created, as OpenAI's clients want to know",
    "api/inference.py": "when a response was created, as OpenAI's clients want to know",
    "serving/text.py": "for chat templates that tell the model today's date",
    "testing/chaos_agents.py": "to read logs",
    "testing/clocks.py": "to show simulated nodes another",
    "testing/repair_story.py": "to read logs",
    "transport/libp2p/hardening.py": "pubsub's numbers need only be others after each start of a node",
}
READS_IT = re.compile(r"\btime\.(time|time_ns|localtime|gmtime|ctime)\b|\b(datetime|date)\.(now|utcnow|today)\b")

READS_ANOTHER = re.compile(r"\btime\.(monotonic|perf_counter|process_time|thread_time)(_ns)?\b")
GO_BY_TRIO = ("base", "topology", "planning", "wire", "mesh", "serving", "api")
"""Rooms of which the agent is made. The others are runners' threads, what blocks a thread for a while, and tools."""


def test_the_wall_clock_is_read_only_where_nobody_compares_it() -> None:
    root = Path(meshinfer.__file__).parent
    found = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if READS_IT.search(path.read_text(encoding="utf-8"))
    }
    assert found == MAY_READ_IT.keys()


def test_the_agent_goes_by_trios_clock() -> None:
    rooms = [Path(meshinfer.__file__).parent / room for room in GO_BY_TRIO]
    paths = [path for room in rooms for path in room.rglob("*.py")]
    assert len(paths) > 50
    assert [str(path) for path in paths if READS_ANOTHER.search(path.read_text(encoding="utf-8"))] == []
