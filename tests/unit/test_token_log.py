"""The token log of a request: each token once and in order, whichever epoch sent it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import PeerLost
from meshinfer.base.ids import ModelId, NodeId, SessionId
from meshinfer.serving.requests import GenerationFailed
from meshinfer.serving.sessions import TokenLog
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.records import Token


def token(index: int) -> Token:
    return Token(SessionId("s"), index, 100 + index, "")


def written_by(version: str) -> Placement:
    seats = (Seat(NodeId("ada"), 0, 4),)
    return Placement(ModelId("tiny"), version * 64, 4, "pipeline", "libp2p", 256, 1, seats)


@given(st.lists(st.integers(0, 8), max_size=60))
def test_whatever_comes_again_is_dropped_and_a_gap_is_noticed(indices: list[int]) -> None:
    log = TokenLog()
    for index in indices:
        before = len(log.emitted)
        if index > before:
            with pytest.raises(PeerLost, match=f"token {before} is missing: {index} came"):
                log.accept(token(index))
        else:
            assert log.accept(token(index)) == (index == before)
        assert log.emitted == [100 + position for position in range(len(log.emitted))]


def test_what_an_old_epoch_sends_late_changes_nothing() -> None:
    """It was computed again and sent to the client meanwhile; the late one may even differ."""
    log = TokenLog()
    for index in range(3):
        assert log.accept(token(index))
    assert not log.accept(Token(SessionId("s"), 1, 999, ""))
    assert log.emitted == [100, 101, 102]


def test_an_answer_is_not_finished_by_other_weights() -> None:
    log = TokenLog()
    log.goes_on_with(written_by("a"))
    log.goes_on_with(written_by("b"))  # nothing is written yet
    assert log.accept(token(0))
    log.goes_on_with(written_by("b"))
    with pytest.raises(GenerationFailed, match=r"version bbbbbbbbbbbb of the model, and .* version aaaaaaaaaaaa"):
        log.goes_on_with(written_by("a"))
