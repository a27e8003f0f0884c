"""A runner that lives and does nothing is found out; one that only slept, or has much to read, is not."""

import pytest

from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.base.units import MIB
from meshinfer.serving.seats import (
    LOOK_SECONDS,
    SILENT_LOOKS,
    SILENT_SECONDS,
    STUCK_BEATS,
    RebindRunner,
    SeatKey,
    SeatLedger,
    StopRunner,
)
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import SeatRef
from meshinfer.wire.runner_control import ChannelLost, Heartbeat, Linked, Loaded

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


def beats(book: SeatLedger, start: float, apart: float = 0.5, count: int = 10) -> float:
    """When the last of them came."""
    for number in range(count):
        book.runner_said(KEY, beat(0.0), start + apart * number)
    return start + apart * (count - 1)


def looks(book: SeatLedger, start: float, seconds: float) -> float | None:
    """When looking at it in time, from `start` on, gives the runner up; None if it does not."""
    for number in range(1, int(seconds / LOOK_SECONDS) + 1):
        if book.look_at_runners(start + LOOK_SECONDS * number):
            return start + LOOK_SECONDS * number
    return None


def test_a_runner_that_says_nothing_is_given_up_within_two_and_a_half_seconds(book: SeatLedger) -> None:
    last = beats(book, start=1.0)
    given_up = looks(book, last - 0.2, 10.0)
    assert given_up is not None
    assert SILENT_SECONDS <= given_up - last <= 2.5
    assert states(book) == ["failed"]


def test_on_a_machine_where_all_comes_late_it_may_be_silent_for_longer(book: SeatLedger) -> None:
    last = beats(book, start=1.0, apart=1.5)
    given_up = looks(book, last, 20.0)
    assert given_up is not None
    assert 4 * 1.5 <= given_up - last <= 4 * 1.5 + 2 * LOOK_SECONDS


def test_looks_that_come_late_blame_nobody(book: SeatLedger) -> None:
    last = beats(book, start=1.0)
    for number in range(20):  # the node slept, or its cores are taken
        assert book.look_at_runners(last + 1 + 3.0 * number) == []
    assert states(book) == ["ready"]


def test_a_word_between_two_looks_is_enough_however_much_time_passes(book: SeatLedger) -> None:
    for hour in range(3 * SILENT_LOOKS):
        assert book.look_at_runners(3600.0 * hour) == []
        book.runner_said(KEY, beat(0.0), 3600.0 * hour)
    assert states(book) == ["ready"]


def test_warm_layers_whose_runner_is_frozen_are_no_help_to_a_repair(book: SeatLedger) -> None:
    assert looks(book, beats(book, start=1.0), 10.0) is not None
    assert book.running() == frozenset()
    assert book.promised_bytes == 0


def test_a_step_that_does_not_end_is_given_up_after_some_beats_in_a_row(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    for number in range(STUCK_BEATS - 1):
        assert book.runner_said(KEY, beat(6.0 + number / 2), now := now + 0.5) == []
    assert book.runner_said(KEY, beat(0.0), now := now + 0.5) == []  # it went on: the count starts anew
    for number in range(STUCK_BEATS - 1):
        assert book.runner_said(KEY, beat(6.0 + number / 2), now := now + 0.5) == []
    assert book.runner_said(KEY, beat(8.0), now + 0.5) == [StopRunner(KEY, "its runner has been in one step for 8 s")]


def test_a_step_that_hangs_is_known_after_two_seconds_and_a_quarter(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    hung_at = now + 0.1
    while not book.runner_said(KEY, beat(max(0.0, now - hung_at)), now):
        now += 0.5
    assert now - hung_at <= 2.25


def test_a_runner_that_was_stopped_in_mid_step_is_not_blamed_for_the_time_it_slept(book: SeatLedger) -> None:
    now = beats(book, start=1.0) + 3600.0
    for number in range(STUCK_BEATS):  # it reads its pages back, and is through with the step
        assert book.runner_said(KEY, beat(3600.0 + number / 2), now + number / 2) == []
    assert book.runner_said(KEY, beat(0.0), now + STUCK_BEATS / 2) == []
    assert states(book) == ["ready"]


def test_heartbeats_that_come_late_blame_no_step(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    for number in range(3 * STUCK_BEATS):
        assert book.runner_said(KEY, beat(6.0 + 1.2 * number), now := now + 1.2) == []
    assert states(book) == ["ready"]


def test_what_hangs_is_found_out_in_the_next_epoch_too_and_as_soon(book: SeatLedger) -> None:
    """A repair may take the warm layers of the one that is to blame: it is the same process."""
    now = beats(book, start=1.0)
    for number in range(STUCK_BEATS - 1):
        book.runner_said(KEY, beat(1.0 + number / 2), now := now + 0.5)
    book.runner_said(KEY, ChannelLost("samples", 0, "a step was late"), now)
    following = SeatKey(KEY.instance_id, 2, 0)
    book.lease(following, PLACEMENT, 50 * MIB, now)
    assert book.commit(SeatRef(KEY.instance_id, 2, PLACEMENT.placement_id), now) == [
        RebindRunner(KEY, following, PLACEMENT)
    ]
    assert book.runner_said(following, beat(2.0), now + 0.5) == [
        StopRunner(following, "its runner has been in one step for 2 s")
    ]


@pytest.mark.parametrize(
    "honest",
    [
        beat(50.0, step_seconds=0.1, busy_tokens=512),  # a chunk of a prompt on a slow machine
        beat(200.0, step_seconds=0.0, busy_tokens=512),  # the first one, with BLAS of the slowest kind
        beat(25.0, step_seconds=0.0),  # the first step reads the weights from disk
        beat(0.7),  # a machine that swaps, each time anew
    ],
)
def test_a_step_that_has_reason_to_be_long_is_waited_for(book: SeatLedger, honest: Heartbeat) -> None:
    now = beats(book, start=1.0)
    for _ in range(3 * STUCK_BEATS):
        assert book.runner_said(KEY, honest, now := now + 0.5) == []
    assert states(book) == ["ready"]
