"""A node whose clock is wrong by an hour is a normal node: nothing that two nodes compare comes from the wall clock.

The run with such a node is in `./scripts/chaos` (`--machines clocks`); this names the places that may read it.
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
    "transport/libp2p/hardening.py": "pubsub's numbers need only rise from one start of a node to its next",
}
READS_IT = re.compile(r"\btime\.(time|time_ns|localtime|gmtime|ctime)\b|\b(datetime|date)\.(now|utcnow|today)\b")


def test_the_wall_clock_is_read_only_where_nobody_compares_it() -> None:
    root = Path(meshinfer.__file__).parent
    found = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if READS_IT.search(path.read_text(encoding="utf-8"))
    }
    assert found == MAY_READ_IT.keys()
