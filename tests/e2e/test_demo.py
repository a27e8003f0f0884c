"""The demo is a promise: it runs, and what it shows happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_does_all_that_it_says(tmp_path: Path, model_store: Path):
    del model_store  # skips where no package index can be reached
    figures = tmp_path / "figures.json"

    done = subprocess.run(
        [sys.executable, str(DEMO), "--json", str(figures)], capture_output=True, text=True, timeout=580, check=False
    )

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    told = json.loads(figures.read_text())
    assert [told[part]["stages"] for part in ("split", "whole", "after_kill")] == [3, 1, 2]
    assert "Paris" in told["split"]["text"]
    assert told["split"]["text"] == told["whole"]["text"] == told["after_kill"]["text"]
