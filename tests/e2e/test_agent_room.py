"""The room of real agents that chaos plays in brings back whom it lost, however often it is asked to."""

from __future__ import annotations

from pathlib import Path

from meshinfer.testing.agent_room import AgentRoom
from meshinfer.testing.machines import OneMachine


def test_who_is_on_its_way_back_is_not_started_a_second_time(tmp_path: Path) -> None:
    room = AgentRoom(OneMachine(tmp_path), tmp_path)
    try:
        room.start("n0")
        room.kill("n0")
        room.restart()
        room.restart()
        room.wait_settled()
        assert room.live().keys() == {"n0"}
    finally:
        room.end()
    assert "another agent" not in room.agents["n0"].log()
