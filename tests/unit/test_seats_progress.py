"""A runner that lives and does nothing is found out; one that only slept, or has much to read, is not."""

from dataclasses import replace

import pytest

from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.base.units import MIB
from meshinfer.pipeline.agent_link import HEARTBEAT_SECONDS
from meshinfer.pipeline.patience import FLOOR_SECONDS
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.runner_watch import (
    LOOK_SECONDS,
    OVERDUE_SHARE,
    SILENT_FACTOR,
    SILENT_LOOKS,
    SILENT_SECONDS,
    STUCK_BEATS,
    WAITING_SECONDS,
)
from meshinfer.serving.seats import RebindRunner, SeatLedger, StartRunner, StopRunner
from meshinfer.serving.view import Instance
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import SeatRef
from meshinfer.wire.runner_control import ChannelLost, Heartbeat, Linked, Listening, Loaded, Loading

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
    ledger.runner_said(KEY, Linked(1), 0.0)
    return ledger


def beat(
    busy_seconds: float, *, step_seconds: float = 0.01, busy_tokens: int = 0, prompt: tuple[float, int] = (0.0, 0)
) -> Heartbeat:
    """`prompt`: seconds and tokens of the longest step yet that read of one."""
    beat = Heartbeat(9, busy_seconds, 1, 0, 1000, 0, 1000, step_seconds, 9, busy_tokens)
    return replace(beat, prompt_seconds=prompt[0], prompt_tokens=prompt[1])


@pytest.fixture
def loading() -> SeatLedger:
    """With one seat whose runner was told at 0 s what to load, and has begun with the first of four layers."""
    ledger = SeatLedger(NodeId("a"), 100 * MIB, 15.0, 60.0)
    ledger.lease(KEY, PLACEMENT, 50 * MIB, 0.0)
    ledger.commit(SeatRef(KEY.instance_id, 1, PLACEMENT.placement_id), 0.0)
    ledger.runner_said(KEY, Listening(7, b"certificate"), 0.0)
    ledger.runner_said(KEY, Loading(0, 40 * MIB, 10 * MIB), 0.0)
    return ledger


def states(book: SeatLedger) -> list[str]:
    return [report.state for report in book.reports()]


def beats(book: SeatLedger, start: float, apart: float = HEARTBEAT_SECONDS, count: int = 10) -> float:
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


def test_a_runner_that_says_nothing_is_given_up_before_its_head_gives_a_step_up(book: SeatLedger) -> None:
    last = beats(book, start=1.0)
    given_up = looks(book, last - 0.2, 10.0)
    assert given_up is not None
    assert SILENT_SECONDS <= given_up - last <= FLOOR_SECONDS
    assert states(book) == ["failed"]


def test_on_a_machine_where_all_comes_late_it_may_be_silent_for_longer(book: SeatLedger) -> None:
    last = beats(book, start=1.0, apart=1.5)
    given_up = looks(book, last, 20.0)
    assert given_up is not None
    assert SILENT_FACTOR * 1.5 <= given_up - last <= SILENT_FACTOR * 1.5 + 2 * LOOK_SECONDS


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


def test_a_runner_that_is_frozen_while_it_loads_is_given_up_within_six_seconds(loading: SeatLedger) -> None:
    last = beats(loading, start=0.25)
    given_up = looks(loading, last - 0.2, 20.0)
    assert given_up is not None
    assert 5.0 <= given_up - last <= 6.0
    assert states(loading) == ["failed"]


def loads(book: SeatLedger, start: float, seconds: float) -> float | None:
    """When it is given up though it beats and is looked at in time; None if it is not."""
    for number in range(1, int(seconds / LOOK_SECONDS) + 1):
        now = start + LOOK_SECONDS * number
        book.runner_said(KEY, beat(0.0, step_seconds=0.0), now)
        if book.look_at_runners(now):
            return now
    return None


def test_one_that_beats_and_reads_nothing_is_given_up_by_the_size_of_its_layer(loading: SeatLedger) -> None:
    assert loads(loading, 0.0, 4.0) is None
    loading.runner_said(KEY, Loading(10 * MIB, 40 * MIB, 10 * MIB), 4.0)  # each layer has its own time
    given_up = loads(loading, 4.0, 30.0)
    assert given_up is not None
    assert 5.0 <= given_up - 4.0 <= 8.0
    assert states(loading) == ["failed"]


def test_a_model_of_twenty_gigabytes_is_read_from_a_slow_disk(loading: SeatLedger) -> None:
    layer = 290 * MIB
    for number in range(4):
        loading.runner_said(KEY, Loading(number * layer, 4 * layer, layer), 50.0 * number)
        assert loads(loading, 50.0 * number, 50.0) is None, "6 MB/s"
    assert states(loading) == ["loading"]


def test_a_node_that_slept_blames_no_runner_that_loads(loading: SeatLedger) -> None:
    for number in range(50):  # or its cores are all taken
        assert loading.look_at_runners(1.0 * number) == []
    assert states(loading) == ["loading"]


def test_the_next_epoch_goes_on_with_a_loading_that_was_silent_for_two_seconds(loading: SeatLedger) -> None:
    """It may be so for longer than one that runs steps, also where it is missed."""
    last = beats(loading, start=0.25)
    assert looks(loading, last - 0.2, 2.5) is None
    following = SeatKey(KEY.instance_id, 2, 0)
    now = last + 2.3
    loading.lease(following, PLACEMENT, 50 * MIB, now)
    assert loading.commit(SeatRef(KEY.instance_id, 2, PLACEMENT.placement_id), now) == [
        RebindRunner(KEY, following, PLACEMENT)
    ]


def test_a_step_that_does_not_end_is_given_up_after_some_beats(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    for number in range(STUCK_BEATS - 1):
        assert book.runner_said(KEY, beat(6.0 + number / 4), now := now + HEARTBEAT_SECONDS) == []
    assert book.runner_said(KEY, beat(0.0), now := now + HEARTBEAT_SECONDS) == []  # it went on: the count starts anew
    for number in range(STUCK_BEATS - 1):
        assert book.runner_said(KEY, beat(6.0 + number / 4), now := now + HEARTBEAT_SECONDS) == []
    assert book.runner_said(KEY, beat(8.0), now + HEARTBEAT_SECONDS) == [
        StopRunner(KEY, "its runner has been in one step for 8 s", at_once=True)
    ]


def test_a_beat_that_comes_late_neither_counts_nor_lets_it_off(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    for number in range(2 * STUCK_BEATS - 1):  # on a busy machine every other does
        now += HEARTBEAT_SECONDS if number % 2 else 3 * HEARTBEAT_SECONDS
        assert book.runner_said(KEY, beat(6.0), now) == []
    assert book.runner_said(KEY, beat(6.0), now + HEARTBEAT_SECONDS) != []


def test_reading_a_prompt_that_hangs_is_given_up_by_what_prompts_took(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    hung = beat(11.0, busy_tokens=512, prompt=(2.0, 512), step_seconds=0.1)
    for _ in range(STUCK_BEATS - 1):
        assert book.runner_said(KEY, hung, now := now + HEARTBEAT_SECONDS) == []
    assert book.runner_said(KEY, hung, now + HEARTBEAT_SECONDS) != []


def test_a_step_that_hangs_is_known_before_its_head_gives_it_up(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    hung_at = now + 0.1
    while not book.runner_said(KEY, beat(max(0.0, now - hung_at)), now):
        now += HEARTBEAT_SECONDS
    assert now - hung_at <= FLOOR_SECONDS


@pytest.mark.parametrize("busy_tokens", [0, 512], ids=["first token", "first chunk"])
def test_a_first_step_that_hangs_is_known_after_five_seconds(book: SeatLedger, busy_tokens: int) -> None:
    """Nothing but the rehearsal was done before: sixteen tokens in 20 ms."""
    now = beats(book, start=1.0)
    hung_at = now + 0.1
    while not book.runner_said(
        KEY, beat(max(0.0, now - hung_at), step_seconds=0.0, busy_tokens=busy_tokens, prompt=(0.02, 16)), now
    ):
        now += HEARTBEAT_SECONDS
    assert now - hung_at <= 5.25


@pytest.mark.parametrize(("held_bytes", "seconds"), [(180 * 10**6, 10.5), (300 * 10**6, 17.0)])
def test_a_rehearsal_that_hangs_is_known_by_the_size_of_its_layers(
    book: SeatLedger, held_bytes: int, seconds: float
) -> None:
    now = beats(book, start=1.0)
    hangs = replace(beat(seconds, step_seconds=0.0, busy_tokens=16), active_bytes=held_bytes)
    for _ in range(STUCK_BEATS):
        book.runner_said(KEY, hangs, now := now + HEARTBEAT_SECONDS)
    assert states(book) == ["failed"]


def test_a_runner_that_was_stopped_in_mid_step_is_not_blamed_for_the_time_it_slept(book: SeatLedger) -> None:
    now = beats(book, start=1.0) + 3600.0
    for number in range(STUCK_BEATS):  # it reads its pages back, and is through with the step
        assert book.runner_said(KEY, beat(3600.0 + number / 4), now + number * HEARTBEAT_SECONDS) == []
    assert book.runner_said(KEY, beat(0.0), now + STUCK_BEATS * HEARTBEAT_SECONDS) == []
    assert states(book) == ["ready"]


def test_heartbeats_that_come_late_blame_no_step(book: SeatLedger) -> None:
    now = beats(book, start=1.0)
    for number in range(3 * STUCK_BEATS):
        assert book.runner_said(KEY, beat(6.0 + 1.2 * number), now := now + 1.2) == []
    assert states(book) == ["ready"]


BROKEN = Instance(KEY.instance_id, 1, PLACEMENT, "broken", 1.0, (None,), "seat 0: a step was late")
"""As its head has it that gave a step up."""
LIVE = frozenset((NodeId("a"),))


def hang(book: SeatLedger, start: float, beats: int) -> float:
    """So many heartbeats that say it; when the last came."""
    for number in range(beats):
        assert book.runner_said(KEY, beat(1.0 + number / 4), start + (number + 1) * HEARTBEAT_SECONDS) == []
    return start + beats * HEARTBEAT_SECONDS


def test_a_frozen_runner_whose_head_was_quicker_is_no_help_to_the_repair(book: SeatLedger) -> None:
    last = beats(book, start=1.0)
    assert looks(book, last, SILENT_SECONDS - LOOK_SECONDS) is None
    effects = book.view_changed([BROKEN], LIVE, last + SILENT_SECONDS - LOOK_SECONDS)
    assert [type(effect) for effect in effects] == [StopRunner]
    assert states(book) == ["failed"]


def test_nor_is_one_that_hangs(book: SeatLedger) -> None:
    now = hang(book, beats(book, start=1.0), STUCK_BEATS - 1)
    book.look_at_runners(now)
    assert [type(effect) for effect in book.view_changed([BROKEN], LIVE, now)] == [StopRunner]
    assert states(book) == ["failed"]


def test_one_that_missed_a_heartbeat_stays_warm(book: SeatLedger) -> None:
    last = beats(book, start=1.0)
    silence = OVERDUE_SHARE * SILENT_SECONDS - LOOK_SECONDS
    assert looks(book, last, silence) is None
    assert book.view_changed([BROKEN], LIVE, last + silence) == []
    assert states(book) == ["cut"]


def test_a_node_that_slept_blames_no_runner_for_what_the_others_lost(book: SeatLedger) -> None:
    last = beats(book, start=1.0)
    assert looks(book, last, SILENT_SECONDS - LOOK_SECONDS) is None
    assert book.view_changed([BROKEN], LIVE, last + 3600.0) == []
    assert states(book) == ["cut"]


def test_the_next_epoch_does_not_go_on_with_a_runner_that_is_overdue(book: SeatLedger) -> None:
    """The lease may be quicker than the news that the instance broke."""
    now = hang(book, beats(book, start=1.0), STUCK_BEATS - 1)
    book.look_at_runners(now)
    following = SeatKey(KEY.instance_id, 2, 0)
    book.lease(following, PLACEMENT, 50 * MIB, now)
    assert book.commit(SeatRef(KEY.instance_id, 2, PLACEMENT.placement_id), now) == [
        StopRunner(KEY, "epoch 2 took its place", at_once=True),
        StartRunner(following, PLACEMENT),
    ]


def test_what_hangs_is_found_out_in_the_next_epoch_too_and_as_soon(book: SeatLedger) -> None:
    """A repair may take the warm layers of the one that is to blame: it is the same process."""
    seen = 1
    now = hang(book, beats(book, start=1.0), seen)
    book.runner_said(KEY, ChannelLost(1, "samples", 0, "a step was late"), now)
    following = SeatKey(KEY.instance_id, 2, 0)
    book.lease(following, PLACEMENT, 50 * MIB, now)
    assert book.commit(SeatRef(KEY.instance_id, 2, PLACEMENT.placement_id), now) == [
        RebindRunner(KEY, following, PLACEMENT)
    ]
    for _ in range(STUCK_BEATS - seen - 1):
        now += HEARTBEAT_SECONDS
        assert book.runner_said(following, beat(2.0), now) == []
    assert book.runner_said(following, beat(2.0), now + HEARTBEAT_SECONDS) == [
        StopRunner(following, "its runner has been in one step for 2 s", at_once=True)
    ]


@pytest.mark.parametrize(
    "honest",
    [
        beat(50.0, step_seconds=0.1, busy_tokens=512),  # a chunk of a prompt on a slow machine
        beat(
            9.0, busy_tokens=20, prompt=(2.0, 512), step_seconds=0.1
        ),  # a short one may have as much that is the same for all
        beat(19.0, busy_tokens=1024, prompt=(2.0, 512), step_seconds=0.1),
        beat(9.5, step_seconds=0.0, busy_tokens=16),  # a rehearsal
        replace(beat(16.0, step_seconds=0.0, busy_tokens=16), active_bytes=300 * 10**6),  # of six times the layers
        replace(beat(160.0, step_seconds=0.0, busy_tokens=16), active_bytes=3 * 10**9),
        beat(
            200.0, step_seconds=0.0, busy_tokens=512, prompt=(2.0, 16)
        ),  # a first chunk, with BLAS of the slowest kind
        beat(9.5, step_seconds=0.0, prompt=(2.0, 16)),  # the first step that samples, there
        beat(3.5, step_seconds=0.0, prompt=(0.01, 16)),  # and on a fast machine that swaps
        beat(0.7),  # a machine that swaps, each time anew
    ],
)
def test_a_step_that_has_reason_to_be_long_is_waited_for(book: SeatLedger, honest: Heartbeat) -> None:
    now = beats(book, start=1.0)
    for _ in range(3 * STUCK_BEATS):
        assert book.runner_said(KEY, honest, now := now + HEARTBEAT_SECONDS) == []
    assert states(book) == ["ready"]


@pytest.mark.parametrize(
    ("index", "lost", "blamed"), [(0, "b", ("activations", 1)), (1, "a", ("activations", 0)), (0, "c", ("samples", 2))]
)
def test_a_runner_that_waits_with_a_neighbour_out_of_reach_has_lost_its_channel(
    index: int, lost: str, blamed: tuple[str, int]
) -> None:
    placement = replace(
        PLACEMENT, seats=tuple(Seat(NodeId(node), at, at + 1) for at, node in enumerate("abc")), layer_count=3
    )
    key = SeatKey(KEY.instance_id, 1, index)
    ledger = SeatLedger(NodeId("abc"[index]), 100 * MIB, 15.0, 60.0)
    ledger.lease(key, placement, 50 * MIB, 0.0)
    ledger.commit(SeatRef(key.instance_id, 1, placement.placement_id), 0.0)
    ledger.runner_said(key, Loaded(40 * MIB, 50 * MIB, 1.0), 0.0)
    ledger.runner_said(key, Linked(1), 0.0)
    gone = frozenset({NodeId(lost)})
    found: list[tuple[float, str, int]] = []
    for quarter in range(1, 40):
        now = quarter * HEARTBEAT_SECONDS
        works = now <= 3.0
        ledger.runner_said(key, replace(beat(0.0), steps=quarter if works else 12), now)
        ledger.look_at_runners(now)
        assert ledger.cut_off(frozenset({NodeId("d")}), now) == []
        found += [(now, message.role, message.seat) for _, message in ledger.cut_off(gone, now)]
    first, *_ = found
    assert first == (3.0 + HEARTBEAT_SECONDS + WAITING_SECONDS, *blamed), "not while it works"


def test_a_runner_without_sessions_waits_for_nobody(book: SeatLedger) -> None:
    for quarter in range(1, 40):
        now = quarter * HEARTBEAT_SECONDS
        book.runner_said(KEY, replace(beat(0.0), sessions=0), now)
        book.look_at_runners(now)
        assert book.cut_off(frozenset({NodeId("a")}), now) == []
