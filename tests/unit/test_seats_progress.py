"""A runner that lives and does nothing is found out; one that only slept, or has much to read, is not."""

import pytest

from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.base.units import MIB
from meshinfer.serving.seats import SILENT_LOOKS, STUCK_BEATS, SeatKey, SeatLedger, StopRunner
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import SeatRef
from meshinfer.wire.runner_control import Heartbeat, Linked, Loaded

PLACEMENT = Placement(
    ModelId("org/model"),
    "d" * 64,
    layer_count=4,
    strategy="pipeline",
    channel="libp2p",
    context_tokens=256,
    concurrency=1,
    seats=(Seat(NodeId("a"), 0, 4),),
)
KEY = SeatKey(InstanceId("0" * 16), 1, 0)


@pytest.fixture
def book() -> SeatLedger:
    """With one seat, that is ready."""
    ledger = SeatLedger(NodeId("a"), 100 * MIB, 15.0, 60.0)
    ledger.lease(KEY, PLACEMENT, 50 * MIB, 0.0)
    ledger.commit(SeatRef(KEY.instance_id, 1, PLACEMENT.placement_id), 0.0)
    ledger.runner_said(KEY, Loaded(40 * MIB, 50 * MIB, 1.0), 0.0)
    ledger.runner_said(KEY, Linked(), 0.0)
    return ledger


def beat(busy_seconds: float, *, step_seconds: float = 0.01, busy_tokens: int = 1) -> Heartbeat:
    return Heartbeat(9, busy_seconds, 1, 0, 1000, 0, 1000, step_seconds, 9, busy_tokens)


def states(book: SeatLedger) -> list[str]:
    return [report.state for report in book.reports()]


def test_a_runner_that_says_nothing_is_given_up(book: SeatLedger) -> None:
    for _ in range(SILENT_LOOKS):
        assert book.look_at_runners(1.0) == []
    assert book.look_at_runners(1.0) == [StopRunner(KEY, "its runner lives and says nothing")]
    assert states(book) == ["failed"]


def test_a_word_between_two_looks_is_enough_however_much_time_passes(book: SeatLedger) -> None:
    for hour in range(3 * SILENT_LOOKS):
        assert book.look_at_runners(3600.0 * hour) == []
        book.runner_said(KEY, beat(0.0), 3600.0 * hour)
    assert states(book) == ["ready"]


def test_warm_layers_whose_runner_is_frozen_are_no_help_to_a_repair(book: SeatLedger) -> None:
    for _ in range(SILENT_LOOKS + 1):
        book.look_at_runners(1.0)
    assert book.running() == frozenset()
    assert book.promised_bytes == 0


def test_a_step_that_does_not_end_is_given_up_after_some_beats_in_a_row(book: SeatLedger) -> None:
    for number in range(STUCK_BEATS - 1):
        assert book.runner_said(KEY, beat(6.0 + number / 2), 10.0) == []
    assert book.runner_said(KEY, beat(0.0), 11.0) == []  # it went on: the count starts anew
    for number in range(STUCK_BEATS - 1):
        assert book.runner_said(KEY, beat(6.0 + number / 2), 20.0) == []
    assert book.runner_said(KEY, beat(8.0), 22.0) == [StopRunner(KEY, "its runner has been in one step for 8 s")]


@pytest.mark.parametrize(
    "honest",
    [
        beat(50.0, step_seconds=0.1, busy_tokens=512),  # a chunk of a prompt on a slow machine
        beat(200.0, step_seconds=0.0, busy_tokens=512),  # the first one, with BLAS of the slowest kind
        beat(25.0, step_seconds=0.0),  # the first step reads the weights from disk
        beat(4.0),  # a machine that swaps
    ],
)
def test_a_step_that_has_reason_to_be_long_is_waited_for(book: SeatLedger, honest: Heartbeat) -> None:
    for _ in range(3 * STUCK_BEATS):
        assert book.runner_said(KEY, honest, 100.0) == []
    assert states(book) == ["ready"]
