"""One agent per home; and its notes there are worth no agent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from meshinfer.base.errors import BadInput
from meshinfer.transport.home_lock import agent_runs, api_of, make_home, note_api, one_agent, pid_of

FULL = Path("/dev/full")
"""Every write to it fails as on a full disk."""


def test_a_second_agent_in_one_home_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    with one_agent(tmp_path):
        pid = pid_of(tmp_path)
        with pytest.raises(BadInput, match=f"pid {pid}"), one_agent(tmp_path):
            pass
    assert pid_of(tmp_path) is None


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is a Linux thing")
def test_a_full_disk_stops_no_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for note in ("agent.pid", "agent.api"):
        (tmp_path / note).symlink_to(FULL)
    with caplog.at_level(logging.WARNING), one_agent(tmp_path):
        (tmp_path / "agent.api").symlink_to(FULL)
        note_api(tmp_path, "http://127.0.0.1:1")
        assert api_of(tmp_path) is None
        with pytest.raises(BadInput), one_agent(tmp_path):
            pass  # the lock itself needs no room
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "agent.pid" in caplog.text
    assert "No space left" in caplog.text


def test_a_home_that_cannot_be_looked_into_is_named(tmp_path: Path) -> None:
    (tmp_path / "agent.lock").mkdir()  # to root, too, unlike one that somebody else locked up
    (tmp_path / "agent.api").write_text("http://127.0.0.1:1")
    for look in (agent_runs, api_of):
        with pytest.raises(BadInput, match=f"{tmp_path} cannot be used.*--home"):
            look(tmp_path)


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot be used.*--home"):
        make_home(tmp_path / "file" / "home")
