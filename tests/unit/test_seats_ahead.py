"""A seat that is loaded ahead of its epoch: warm layers for the next one, and in nobody's way until then."""

from dataclasses import replace

import pytest
from test_seats import INSTANCE, ME, OTHER, ledger, placement

from meshinfer.base.errors import NoRoom, Refused
from meshinfer.base.ids import NodeId
from meshinfer.base.units import MIB
from meshinfer.serving.epochs import DeletedMeanwhile
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.seats import AHEAD_SECONDS, RebindRunner, SeatLedger, StartRunner, StopRunner
from meshinfer.serving.view import AHEAD, Instance
from meshinfer.topology.card import SeatReport, SeatState
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import Deletion, SeatRef
from meshinfer.wire.runner_control import Linked, Listening, Loaded, Loading

LEAVER = NodeId("leaver")
PRESENT = replace(placement(), seats=(Seat(LEAVER, 0, 4), Seat(OTHER, 4, 8)))
"""What serves as epoch 3 meanwhile: our seat is the leaver's still."""
LIVE = frozenset((ME, OTHER, LEAVER))


def present(epoch: int = 3, of: Placement = PRESENT) -> Instance:
    return Instance(INSTANCE, epoch, of, "ready", 1.0, (None, None))


def key(epoch: int = AHEAD) -> SeatKey:
    return SeatKey(INSTANCE, epoch, 0)


def ref(epoch: int = AHEAD) -> SeatRef:
    return SeatRef(INSTANCE, epoch, placement().placement_id)


def loaded_ahead() -> SeatLedger:
    """For epoch 4, at 0."""
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, 0.0, begun_epoch=4)
    assert book.commit(ref(), 0.0) == [StartRunner(key(), placement())]
    book.runner_said(key(), Loaded(50 * MIB, 60 * MIB, 1.0), 1.0)
    assert book.view_changed([present()], LIVE, 1.0) == [], "the present epoch, newer and elsewhere, does not end it"
    return book


def test_the_epoch_that_it_was_loaded_for_goes_on_with_its_layers_in_the_same_memory() -> None:
    book = loaded_ahead()
    book.lease(key(4), placement(), 60 * MIB, 2.0, begun_epoch=4)  # 60 + 60 would not fit side by side
    assert book.commit(ref(4), 2.0) == [RebindRunner(key(), key(4), placement())]
    assert book.promised_bytes == 60 * MIB
    assert [(report.epoch, report.state) for report in book.reports()] == [(4, "linking")]


def test_the_epoch_that_comes_while_it_loads_goes_on_with_the_loading() -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, 0.0, begun_epoch=4)
    book.commit(ref(), 0.0)
    book.runner_said(key(), Listening(7, b"certificate"), 0.5)
    book.runner_said(key(), Loading(30, 60), 1.0)
    book.lease(key(4), placement(), 60 * MIB, 2.0, begun_epoch=4)
    assert book.commit(ref(4), 2.0) == [RebindRunner(key(), key(4), placement())]
    assert [(report.epoch, report.state, report.progress) for report in book.reports()] == [(4, "loading", 0.5)]
    book.runner_said(key(4), Linked(4), 2.5)
    assert book.reports()[0].state == "loading"
    book.runner_said(key(4), Loaded(50 * MIB, 60 * MIB, 1.0), 3.0)
    assert book.reports()[0].state == "ready"


def test_one_whose_runner_is_not_there_yet_is_begun_anew() -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, 0.0, begun_epoch=4)
    book.commit(ref(), 0.0)
    book.lease(key(4), placement(), 60 * MIB, 2.0, begun_epoch=4)
    effects = book.commit(ref(4), 2.0)
    assert effects == [StopRunner(key(), "epoch 4 took its place"), StartRunner(key(4), placement())]


def test_it_lapses_if_no_epoch_wants_it() -> None:
    book = loaded_ahead()
    assert book.next_wakeup() == AHEAD_SECONDS
    assert book.tick(AHEAD_SECONDS - 0.1) == []
    assert [type(effect) for effect in book.tick(AHEAD_SECONDS)] == [StopRunner]
    assert book.promised_bytes == 0


def reports(epoch: int, *states: SeatState) -> tuple[SeatReport, ...]:
    return tuple(
        SeatReport(INSTANCE, epoch, PRESENT.placement_id, index, state, 0.0, MIB, 0, 0)
        for index, state in enumerate(states)
    )


def test_it_ends_when_the_epoch_that_it_was_for_does_without_it() -> None:
    book = loaded_ahead()
    made = replace(present(4), reports=reports(4, "loading", "linking"))
    assert [type(effect) for effect in book.view_changed([made], LIVE, 2.0)] == [StopRunner]


def test_an_epoch_that_is_given_up_before_it_is_made_does_not_end_what_is_loaded_for_the_next_try() -> None:
    book = loaded_ahead()
    tried = replace(present(4), state="loading", reports=reports(4, "leased", "loading"))
    assert book.view_changed([tried], LIVE, 2.0) == []
    assert book.view_changed([replace(tried, reports=(tried.reports[0], None))], LIVE, 2.0) == []


def test_the_loss_of_the_node_that_it_was_loaded_for_leaves_it_to_the_repair() -> None:
    book = loaded_ahead()
    broken = replace(present(), state="broken")
    assert book.view_changed([broken], LIVE - {LEAVER}, 2.0) == []
    book.lease(key(7), placement(), 60 * MIB, 3.0, begun_epoch=4)
    assert book.commit(ref(7), 3.0) == [RebindRunner(key(), key(7), placement())]


def test_a_deletion_ends_it() -> None:
    book = loaded_ahead()
    freed, effects = book.delete(Deletion(INSTANCE, 3))
    assert (freed, [type(effect) for effect in effects]) == (60 * MIB, [StopRunner])
    with pytest.raises(DeletedMeanwhile):
        book.lease(key(), placement(), 60 * MIB, 2.0, begun_epoch=4)


def test_it_takes_memory_that_is_free_and_no_seat_that_another_loads() -> None:
    book = loaded_ahead()
    with pytest.raises(Refused, match="another placement's"):
        book.lease(key(), placement(512), MIB, 2.0, begun_epoch=4)
    turned = replace(placement(), seats=(Seat(OTHER, 0, 4), Seat(ME, 4, 8)))
    with pytest.raises(NoRoom):
        book.lease(SeatKey(INSTANCE, AHEAD, 1), turned, 60 * MIB, 2.0, begun_epoch=4)
