"""The ledger of seats: promises, epochs, lapses. Pure; time is a number."""

from dataclasses import replace

import pytest

from meshinfer.base.errors import BadInput, NoRoom, Refused
from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.base.units import MIB
from meshinfer.serving.epochs import DeletedMeanwhile, StaleEpoch
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.seats import (
    FAILED_LINGER_SECONDS,
    MISSING_GRACE_SECONDS,
    WARM_SECONDS,
    RebindRunner,
    SeatLedger,
    StartRunner,
    StopRunner,
)
from meshinfer.serving.view import Instance
from meshinfer.topology.card import SeatReport, SeatState
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import Deletion, SeatRef
from meshinfer.wire.runner_control import ChannelLost, Linked, Listening, Loaded, Loading, RunnerFailed

ME, OTHER = NodeId("me"), NodeId("other")
INSTANCE = InstanceId("1f" * 8)


def placement(context: int = 256) -> Placement:
    seats = (Seat(ME, 0, 4), Seat(OTHER, 4, 8))
    return Placement(ModelId("tiny"), "d" * 64, 8, "pipeline", "libp2p", context, 1, seats)


def ledger(usable: int = 100 * MIB) -> SeatLedger:
    return SeatLedger(ME, usable, lease_seconds=10.0, load_stall_seconds=30.0)


def key(epoch: int = 1) -> SeatKey:
    return SeatKey(INSTANCE, epoch, 0)


def ref(epoch: int = 1, of: Placement | None = None) -> SeatRef:
    return SeatRef(INSTANCE, epoch, (of or placement()).placement_id)


def ready(book: SeatLedger, epoch: int = 1, now: float = 0.0) -> None:
    book.lease(key(epoch), placement(), 60 * MIB, now)
    assert book.commit(ref(epoch), now)[-1] == StartRunner(key(epoch), placement())
    book.runner_said(key(epoch), Loaded(50 * MIB, 60 * MIB, 1.0), now)
    book.runner_said(key(epoch), Linked(epoch), now)
    assert book.reports()[0].state == "ready"


def test_a_lease_that_is_not_committed_lapses() -> None:
    book = ledger()
    assert book.lease(key(), placement(), 60 * MIB, now=0.0) == 10.0
    assert book.promised_bytes == 60 * MIB
    assert book.next_wakeup() == 10.0
    assert book.tick(9.9) == []
    assert book.promised_bytes == 60 * MIB
    assert book.tick(10.0) == []
    assert book.promised_bytes == 0
    with pytest.raises(Refused, match="nothing is leased"):
        book.commit(ref(), now=11.0)


def test_leasing_twice_promises_once() -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, now=0.0)
    book.lease(key(), placement(), 60 * MIB, now=5.0)
    assert book.promised_bytes == 60 * MIB
    assert book.next_wakeup() == 15.0


def test_memory_is_promised_once_and_the_refusal_has_the_numbers() -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, now=0.0)
    with pytest.raises(NoRoom, match=r"needs 60\.0 MiB and 40\.0 MiB are free here \(20\.0 MiB short\)"):
        book.lease(SeatKey(InstanceId("other"), 1, 0), placement(512), 60 * MIB, now=0.0)
    assert book.promised_bytes == 60 * MIB
    book.bound(50 * MIB)  # less than is promised already
    with pytest.raises(NoRoom, match=r"needs 60\.0 MiB and 0 B are free here \(60\.0 MiB short\)"):
        book.lease(SeatKey(InstanceId("other"), 1, 0), placement(512), 60 * MIB, now=0.0)


def test_a_newer_epoch_takes_the_memory_of_the_older() -> None:
    book = ledger()
    ready(book)
    wider = placement(512)
    book.lease(key(2), wider, 90 * MIB, now=1.0)  # 60 + 90 would not fit side by side
    effects = book.commit(ref(2, wider), now=1.0)
    assert effects == [StopRunner(key(1), "epoch 2 took its place"), StartRunner(key(2), wider)]
    assert [report.epoch for report in book.reports()] == [2]
    assert book.promised_bytes == 90 * MIB


def test_a_stale_epoch_is_refused_with_the_current_one() -> None:
    book = ledger()
    ready(book, epoch=3)
    with pytest.raises(StaleEpoch) as refused:
        book.lease(key(2), placement(), MIB, now=1.0)
    assert refused.value.newest == 3
    with pytest.raises(StaleEpoch):  # same epoch, another placement
        book.lease(key(3), placement(512), MIB, now=1.0)
    assert book.reports()[0].state == "ready"
    book.release(ref(3), now=1.0)
    with pytest.raises(StaleEpoch):  # also after it is gone
        book.lease(key(3), placement(), MIB, now=2.0)
    assert book.next_epoch(INSTANCE) == 4


def test_release_stops_the_runner_and_says_what_it_freed() -> None:
    book = ledger()
    ready(book)
    freed, effects = book.release(ref(), now=1.0)
    assert freed == 60 * MIB
    assert [type(effect) for effect in effects] == [StopRunner]
    assert book.reports() == ()
    assert book.release(ref(), now=1.0) == (0, [])


def test_commands_of_an_old_epoch_do_nothing_to_the_new_one() -> None:
    """A planner, an origin or a runner that slept, and speaks of what was."""
    book = ledger()
    ready(book)
    book.lease(key(2), placement(512), 60 * MIB, now=1.0)
    book.commit(ref(2, placement(512)), now=1.0)
    before = book.reports()
    with pytest.raises(Refused, match=r"nothing is leased here for instance .* epoch 1"):
        book.commit(ref(1), now=2.0)
    assert book.release(ref(1), now=2.0) == (0, [])
    assert book.runner_said(key(1), ChannelLost(1, "samples", 1, "late"), 2.0) == []
    assert book.runner_said(key(1), RunnerFailed("internal", "late"), 2.0) == []
    assert book.fail(key(1), "its runner was stopped", 2.0) == []
    assert book.reports() == before


def test_a_half_made_repair_lapses_and_leaves_what_is_warm_to_the_next() -> None:
    """Its planner died between the leases and the commits."""
    book = ledger()
    ready(book)
    book.runner_said(key(1), ChannelLost(1, "samples", 1, "node other is gone"), 1.0)
    lapses = book.lease(key(2), placement(), 60 * MIB, now=2.0)
    assert [(report.epoch, report.state) for report in book.reports()] == [(1, "cut"), (2, "leased")]
    assert book.tick(2.0 + lapses) == []
    assert [(report.epoch, report.state) for report in book.reports()] == [(1, "cut")]
    with pytest.raises(StaleEpoch):  # nobody knows who saw it, so it is not used twice
        book.lease(key(2), placement(512), 60 * MIB, now=13.0)
    book.lease(key(3), placement(), 60 * MIB, now=13.0)
    assert book.commit(ref(3), now=13.1) == [RebindRunner(key(1), key(3), placement())]


def test_a_deletion_outranks_the_repair_that_began_before_it_and_nothing_that_begins_after() -> None:
    book = ledger()
    ready(book)
    book.lease(key(2), placement(512), 60 * MIB, now=1.0, begun_epoch=2)
    freed, effects = book.delete(Deletion(INSTANCE, 1))  # whoever deletes has not heard of the repair
    assert freed == 120 * MIB
    assert effects == [StopRunner(key(1), "deleted")]
    assert book.reports() == ()
    with pytest.raises(Refused, match="nothing is leased"):
        book.commit(ref(2, placement(512)), now=1.1)
    for epoch in (2, 3, 9):  # however often it tries again
        with pytest.raises(DeletedMeanwhile, match="was deleted while it was being placed"):
            book.lease(key(epoch), placement(), 60 * MIB, now=1.2, begun_epoch=2)
    begins = book.next_epoch(INSTANCE)
    assert begins > 9
    assert book.lease(key(begins), placement(), 60 * MIB, now=1.3, begun_epoch=begins) == 10.0
    assert book.delete(Deletion(INSTANCE, 1)) == (0, [])  # the same again, late: what began since stays
    assert len(book.reports()) == 1


def test_what_a_node_that_heard_of_no_deletion_made_of_it_is_not_repaired_either() -> None:
    book = ledger()
    book.delete(Deletion(INSTANCE, 1))
    with pytest.raises(DeletedMeanwhile):
        book.lease(key(2), placement(), 60 * MIB, now=0.0)
    with pytest.raises(DeletedMeanwhile):  # epoch 2 lives on the other node, cut; this would be its repair
        book.lease(key(3), placement(), 60 * MIB, now=0.1)


def test_who_has_not_heard_of_the_deletion_does_not_void_what_began_after_it() -> None:
    book = ledger()
    book.delete(Deletion(INSTANCE, 5))
    book.lease(key(7), placement(), 60 * MIB, now=0.0, begun_epoch=7)
    with pytest.raises(DeletedMeanwhile) as refused:
        book.lease(key(1), placement(512), 60 * MIB, now=0.1)
    assert book.lease(key(7), placement(), 60 * MIB, now=0.2, begun_epoch=7) == 10.0
    assert book.delete(refused.value.deletion) == (0, [])  # what the planner who is refused tells its own node
    assert book.commit(ref(7), now=0.3) == [StartRunner(key(7), placement())]


def test_a_deletion_that_comes_late_does_not_void_what_began_after_it() -> None:
    book = ledger()
    ready(book)
    book.lease(key(3), placement(512), 60 * MIB, now=1.0, begun_epoch=3)  # its planner knows of the deletion
    freed, effects = book.delete(Deletion(INSTANCE, 1))
    assert (freed, [type(effect) for effect in effects]) == (60 * MIB, [StopRunner])
    assert book.lease(key(3), placement(512), 60 * MIB, now=1.1, begun_epoch=3) == 10.0
    assert not book.is_deleted(INSTANCE, 3)


def test_a_failed_seat_frees_its_memory_at_once_and_says_why_for_a_while() -> None:
    book = ledger()
    ready(book)
    message = RunnerFailed("corrupt_model", "file x is cut short")
    effects = book.runner_said(key(), message, now=5.0)
    assert [type(effect) for effect in effects] == [StopRunner]
    assert book.promised_bytes == 0
    (report,) = book.reports()
    assert report.state == "failed"
    assert report.error
    book.tick(5.0 + FAILED_LINGER_SECONDS)
    assert book.reports() == ()


def test_loading_without_progress_is_given_up_and_with_progress_is_not() -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, now=0.0)
    book.commit(ref(), now=0.0)
    book.runner_said(key(), Loading(10, 100), now=29.0)
    assert book.tick(31.0) == []
    book.runner_said(key(), Loading(10, 100), now=40.0)  # the same bytes again are no progress
    effects = book.tick(59.0)
    assert [type(effect) for effect in effects] == [StopRunner]
    assert "no progress for 30 s" in book.reports()[0].error


def test_linked_before_loaded_is_not_ready_yet() -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, now=0.0)
    book.commit(ref(), now=0.0)
    book.runner_said(key(), Linked(1), now=1.0)
    assert book.reports()[0].state == "loading"
    book.runner_said(key(), Loaded(1, 1, 1.0), now=2.0)
    assert book.reports()[0].state == "ready"


def instance(book: SeatLedger, state: str, epoch: int = 1, of: Placement | None = None, error: str = "") -> Instance:
    mine = book.reports()[0]
    beside = mine if state == "ready" else None
    return Instance(INSTANCE, epoch, of or placement(), state, 1.0, (mine, beside), error)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["its channel broke", "its node is gone", "it failed"])
def test_layers_stay_warm_when_the_seat_beside_is_lost_and_the_next_epoch_takes_them_up(how: str) -> None:
    book = ledger()
    ready(book)
    if how == "its channel broke":
        effects = book.runner_said(key(), ChannelLost(1, "activations", 1, "reset by peer"), now=1.0)
    else:
        live = frozenset({ME}) if how == "its node is gone" else frozenset({ME, OTHER})
        effects = book.view_changed([instance(book, "broken", error="out of memory")], live, now=1.0)
    assert effects == []
    (report,) = book.reports()
    assert report.state == "cut"
    assert report.error
    assert book.promised_bytes == 0

    other_last = Placement(
        ModelId("tiny"), "d" * 64, 8, "pipeline", "libp2p", 256, 1, (Seat(ME, 0, 4), Seat(NodeId("new"), 4, 8))
    )
    book.lease(key(2), other_last, 60 * MIB, now=2.0)
    assert book.commit(ref(2, other_last), now=2.0) == [RebindRunner(key(1), key(2), other_last)]
    (report,) = book.reports()
    assert (report.epoch, report.state, report.progress) == (2, "linking", 1.0)
    assert book.promised_bytes == 60 * MIB
    book.runner_said(key(2), Linked(2), now=3.0)
    assert book.reports()[0].state == "ready"


def test_warm_layers_are_given_up_after_a_while() -> None:
    book = ledger()
    ready(book)
    book.runner_said(key(), ChannelLost(1, "activations", 1, "reset by peer"), now=1.0)
    assert book.next_wakeup() == 1.0 + WARM_SECONDS
    assert [type(effect) for effect in book.tick(1.0 + WARM_SECONDS)] == [StopRunner]
    assert book.reports() == ()


def test_warm_layers_are_given_up_for_whoever_needs_their_memory() -> None:
    book = ledger()
    ready(book)
    book.runner_said(key(), ChannelLost(1, "activations", 1, "reset by peer"), now=1.0)
    other = SeatKey(InstanceId("other"), 1, 0)
    book.lease(other, placement(512), 90 * MIB, now=2.0)
    effects = book.commit(SeatRef(other.instance_id, 1, placement(512).placement_id), now=2.0)
    assert effects == [StopRunner(key(), "its memory is needed"), StartRunner(other, placement(512))]


def test_other_layers_or_another_reservation_are_loaded_anew() -> None:
    for changed in (
        placement(512),
        Placement(ModelId("tiny"), "d" * 64, 8, "pipeline", "libp2p", 256, 1, (Seat(ME, 0, 8),)),
    ):
        book = ledger()
        ready(book)
        book.lease(key(2), changed, 60 * MIB, now=2.0)
        effects = book.commit(ref(2, changed), now=2.0)
        assert [type(effect) for effect in effects] == [StopRunner, StartRunner]


def test_a_seat_that_is_not_in_the_view_yet_has_a_grace() -> None:
    book = ledger()
    ready(book)
    live = frozenset({ME, OTHER})
    assert book.view_changed([instance(book, "placing")], live, now=1.0) == []
    assert book.view_changed([instance(book, "ready")], live, now=2.0) == []
    assert book.view_changed([instance(book, "placing")], live, now=3.0) == []
    assert book.tick(3.0 + MISSING_GRACE_SECONDS - 0.1) == []
    assert book.tick(3.0 + MISSING_GRACE_SECONDS) == []
    assert book.reports()[0].state == "cut"


def test_a_newer_epoch_or_a_winning_rival_in_the_view_frees_ours() -> None:
    live = frozenset({ME, OTHER})
    for newer in ({"epoch": 2}, {"of": placement(512)}):
        book = ledger()
        ready(book)
        effects = book.view_changed([instance(book, "ready", **newer)], live, now=1.0)  # type: ignore[arg-type]
        assert [type(effect) for effect in effects] == [StopRunner], newer


def test_the_news_of_a_lease_does_not_cost_the_layers_that_it_is_for() -> None:
    """Gossip may be quicker than the planner's commit, and shows the next epoch as soon as one seat of it is leased."""
    book = ledger()
    ready(book)
    book.lease(key(2), placement(), 60 * MIB, now=1.0)
    leased = Instance(INSTANCE, 2, placement(), "placing", 0.0, (None, None))
    assert book.view_changed([leased], frozenset({ME, OTHER}), now=1.0) == []
    assert [(report.epoch, report.state) for report in book.reports()] == [(1, "cut"), (2, "leased")]
    assert book.commit(ref(2), now=1.1) == [RebindRunner(key(1), key(2), placement())]


def the_other_side(book: SeatLedger, *, serves: bool) -> Instance:
    """Has won; what is here still serves, or has nothing to do."""
    won = replace(placement(), seats=(Seat(OTHER, 0, 8),))
    outlived = frozenset({(1, placement().placement_id)}) if serves else frozenset[tuple[int, str]]()
    return replace(instance(book, "ready", 2, won), outlived=outlived)


def test_what_has_lost_to_the_other_side_goes_on_until_it_has_nothing_to_do() -> None:
    book, live = ledger(), frozenset({ME, OTHER})
    ready(book)
    for now in (1.0, 1.0 + WARM_SECONDS, 1000.0):
        assert book.view_changed([the_other_side(book, serves=True)], live, now) == []
        assert (book.reports()[0].state, book.promised_bytes) == ("ready", 0)
        assert book.is_outliving
    gone = StopRunner(key(), "epoch 2 took its place")
    assert book.view_changed([the_other_side(book, serves=False)], live, now=1001.0) == [gone]
    assert not book.is_outliving


def test_what_has_lost_to_the_other_side_is_given_up_for_whoever_needs_its_memory() -> None:
    book, live = ledger(), frozenset({ME, OTHER})
    ready(book)
    book.view_changed([the_other_side(book, serves=True)], live, now=1.0)
    other = SeatKey(InstanceId("2f" * 8), 1, 0)
    book.lease(other, placement(512), 60 * MIB, now=2.0)
    wanted = SeatRef(other.instance_id, 1, placement(512).placement_id)
    effects = book.commit(wanted, now=2.0)
    assert effects == [StopRunner(key(), "its memory is needed"), StartRunner(other, placement(512))]


def test_what_had_lost_is_promised_again_when_who_won_is_gone() -> None:
    book, live = ledger(), frozenset({ME, OTHER})
    ready(book)
    book.view_changed([the_other_side(book, serves=True)], live, now=1.0)
    assert book.view_changed([instance(book, "ready")], live, now=2.0) == []
    assert (book.promised_bytes, book.is_outliving) == (60 * MIB, False)


def test_what_had_lost_is_not_promised_again_while_its_memory_is_another_s() -> None:
    book, live = ledger(), frozenset({ME, OTHER})
    ready(book)
    book.view_changed([the_other_side(book, serves=True)], live, now=1.0)
    other = SeatKey(InstanceId("2f" * 8), 1, 0)
    book.lease(other, placement(512), 90 * MIB, now=2.0)
    assert book.view_changed([instance(book, "ready")], live, now=3.0) == []
    assert (book.promised_bytes, book.is_outliving) == (90 * MIB, True)
    assert book.view_changed([instance(book, "ready")], live, now=12.0) == []  # the lease has lapsed
    assert book.view_changed([instance(book, "ready")], live, now=14.0) == []
    assert (book.promised_bytes, book.is_outliving) == (60 * MIB, False)


def test_layers_that_a_lease_was_for_are_given_up_if_it_is_never_committed() -> None:
    book = ledger()
    ready(book)
    book.lease(key(2), placement(), 60 * MIB, now=1.0)
    leased = Instance(INSTANCE, 2, placement(), "placing", 0.0, (None, None))
    book.view_changed([leased], frozenset({ME, OTHER}), now=1.0)
    assert book.tick(11.0) == []  # the lease has lapsed
    assert [effect.key for effect in book.tick(1.0 + WARM_SECONDS)] == [key(1)]


def test_a_lease_lapses_with_its_planner_and_leaves_what_is_warm_to_the_next() -> None:
    planner = NodeId("planner")
    everyone, left = frozenset({ME, OTHER, planner}), frozenset({ME, OTHER})
    book = ledger()
    ready(book)
    book.lease(key(2), placement(), 60 * MIB, 1.0, planner=planner)
    leased = Instance(INSTANCE, 2, placement(), "placing", 0.0, (None, None))
    assert book.view_changed([leased], everyone, now=1.0) == []
    assert [(report.epoch, report.state) for report in book.reports()] == [(1, "cut"), (2, "leased")]
    assert book.view_changed([leased], left, now=1.5) == [], "others may still hold leases of it, which end as well"
    assert [(report.epoch, report.state) for report in book.reports()] == [(1, "cut")]
    book.lease(key(3), placement(), 60 * MIB, now=2.0)
    assert book.commit(ref(3), now=2.1) == [RebindRunner(key(1), key(3), placement())]


def test_what_was_committed_beside_a_lapsed_lease_does_not_wait_for_it() -> None:
    planner = NodeId("planner")
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, 1.0, planner=planner)
    book.commit(ref(), now=1.0)
    book.runner_said(key(), Loaded(50 * MIB, 60 * MIB, 1.0), now=1.2)
    mine = book.reports()[0]
    beside = replace(mine, seat_index=1, state="leased")
    half = Instance(INSTANCE, 1, placement(), "loading", 0.5, (mine, beside))
    book.view_changed([half], frozenset({ME, OTHER, planner}), now=1.3)
    assert book.reports()[0].state == "linking"
    book.view_changed([half], frozenset({ME, OTHER}), now=1.4)
    assert book.reports()[0].state == "cut"


def test_a_planner_whose_work_is_done_may_go() -> None:
    planner = NodeId("planner")
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, 1.0, planner=planner)
    book.commit(ref(), now=1.0)
    book.runner_said(key(), Loaded(50 * MIB, 60 * MIB, 1.0), now=1.2)
    mine = book.reports()[0]
    loading = Instance(INSTANCE, 1, placement(), "loading", 0.5, (mine, replace(mine, seat_index=1)))
    book.view_changed([loading], frozenset({ME, OTHER, planner}), now=1.3)
    unseen = Instance(INSTANCE, 1, placement(), "placing", 0.5, (mine, None))
    book.view_changed([unseen], frozenset({ME, OTHER}), now=1.4)
    assert book.reports()[0].state == "linking", "the other's report is late, and no more"


def test_seats_that_are_not_ours_are_refused() -> None:
    with pytest.raises(BadInput, match="not this node's"):
        ledger().lease(SeatKey(INSTANCE, 1, 1), placement(), 1, now=0.0)
    with pytest.raises(BadInput, match="not this node's"):
        ledger().lease(SeatKey(INSTANCE, 1, 7), placement(), 1, now=0.0)


def beside(other: SeatState, epoch: int = 1) -> Instance:
    """While ours is loaded and waits."""
    states: tuple[SeatState, ...] = ("linking", other)
    reports = tuple(
        SeatReport(INSTANCE, epoch, placement().placement_id, index, state, 0.5, MIB, 0, 0)
        for index, state in enumerate(states)
    )
    return Instance(INSTANCE, epoch, placement(), "loading", 0.5, reports)


@pytest.mark.parametrize("state", ["leased", "loading"])
def test_a_loaded_seat_waits_for_as_long_as_another_loads_and_is_to_be_linked_in_time_from_then_on(
    state: SeatState,
) -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, 0.0)
    book.commit(ref(), 0.0)
    assert book.view_changed([beside(state)], frozenset((ME, OTHER)), 1.0) == []
    book.runner_said(key(), Loaded(50 * MIB, 60 * MIB, 1.0), 2.0)
    assert book.next_wakeup() is None
    assert book.tick(3600.0) == []
    assert book.view_changed([beside("loading")], frozenset((ME, OTHER)), 3600.0) == []
    assert book.view_changed([beside("linking")], frozenset((ME, OTHER)), 3601.0) == []
    assert book.next_wakeup() == 3631.0
    assert book.tick(3630.9) == []
    assert [type(effect) for effect in book.tick(3631.0)] == [StopRunner]
    assert "while linking" in book.reports()[0].error


def test_one_that_loads_has_its_own_time_whatever_the_others_do() -> None:
    book = ledger()
    book.lease(key(), placement(), 60 * MIB, 0.0)
    book.commit(ref(), 0.0)
    assert book.view_changed([beside("loading")], frozenset((ME, OTHER)), 1.0) == []
    assert book.view_changed([beside("linking")], frozenset((ME, OTHER)), 20.0) == []
    assert [type(effect) for effect in book.tick(30.0)] == [StopRunner]
    assert "while loading" in book.reports()[0].error


def test_what_a_runner_says_of_an_epoch_that_it_is_no_more_comes_too_late() -> None:
    """In the middle of a long step it hears of a channel's end after its agent has given it to the next epoch."""
    book = ledger()
    ready(book)
    book.runner_said(key(1), ChannelLost(1, "samples", 1, "the peer closed it"), now=1.0)
    book.lease(key(2), placement(), 60 * MIB, now=1.1)
    assert book.commit(ref(2), now=1.1) == [RebindRunner(key(1), key(2), placement())]
    for late in (ChannelLost(1, "activations", 1, "the peer closed it"), Linked(1)):
        assert book.runner_said(key(2), late, now=1.2) == []
        assert book.reports()[0].state == "linking"
    book.runner_said(key(2), Linked(2), now=1.3)
    assert book.reports()[0].state == "ready"
    book.runner_said(key(2), ChannelLost(2, "activations", 1, "the peer closed it"), now=1.4)
    assert book.reports()[0].state == "cut"


def test_the_next_epoch_goes_on_with_what_still_loads_for_the_one_before() -> None:
    """Two planners, or one that had not heard of its first: what has begun is not begun again."""
    book = ledger()
    book.lease(key(1), placement(), 60 * MIB, now=0.0)
    book.commit(ref(1), now=0.0)
    book.runner_said(key(1), Listening(7, b"certificate"), 0.5)
    book.runner_said(key(1), Loading(30, 60), 0.6)
    assert book.view_changed([instance(book, "placing", epoch=2)], frozenset({ME, OTHER}), now=0.7) == []
    assert book.lease(key(2), placement(), 60 * MIB, now=0.8) > 0
    assert book.commit(ref(2), now=0.9) == [RebindRunner(key(1), key(2), placement())]
    (report,) = book.reports()
    assert (report.epoch, report.state, report.progress) == (2, "loading", 0.5)
    assert book.promised_bytes == 60 * MIB
    stalls = book.next_wakeup()
    book.lease(key(3), placement(), 60 * MIB, now=5.0)
    book.commit(ref(3), now=5.0)
    assert book.next_wakeup() == stalls, "a loading that hangs is given no new time by each epoch"


def loading(book: SeatLedger) -> None:
    """From 0 on; half of it is read at 0.6."""
    book.lease(key(1), placement(), 60 * MIB, now=0.0)
    book.commit(ref(1), now=0.0)
    book.runner_said(key(1), Listening(7, b"certificate"), 0.5)
    book.runner_said(key(1), Loading(30, 60), 0.6)


def test_what_was_fetched_is_not_loaded_yet() -> None:
    book = ledger()
    book.lease(key(1), placement(), 60 * MIB, now=0.0)
    book.commit(ref(1), now=0.0)
    book.runner_said(key(1), Loading(60, 60), 0.4)  # of its files, from a peer
    book.runner_said(key(1), Listening(7, b"certificate"), 0.5)
    assert book.reports()[0].progress == 0.0
    lose_the_other(book, now=1.0)
    assert book.reports()[0].loads


def lose_the_other(book: SeatLedger, now: float) -> None:
    assert book.view_changed([instance(book, "broken")], frozenset({ME}), now) == []
    assert [report.state for report in book.reports()] == ["cut"]


@pytest.mark.parametrize("is_through", [False, True])
def test_what_still_loads_when_the_seat_beside_is_lost_goes_on_loading_and_the_next_epoch_takes_it_up(
    is_through: bool,
) -> None:
    book = ledger()
    loading(book)
    lose_the_other(book, now=1.0)
    assert (book.reports()[0].loads, book.promised_bytes) == (True, 0)
    if is_through:
        book.runner_said(key(1), Loaded(50 * MIB, 60 * MIB, 1.0), 1.5)
        book.runner_said(key(1), Linked(1), 1.6)  # with those that are left
        assert (book.reports()[0].state, book.reports()[0].loads) == ("cut", False)
    else:
        book.runner_said(key(1), Loading(45, 60), 1.5)
        assert book.reports()[0].progress == 0.75
    book.lease(key(2), placement(), 60 * MIB, now=2.0)
    assert book.commit(ref(2), now=2.0) == [RebindRunner(key(1), key(2), placement())]
    assert (book.reports()[0].state, book.promised_bytes) == ("linking" if is_through else "loading", 60 * MIB)
    book.runner_said(key(2), Loaded(50 * MIB, 60 * MIB, 1.0), 3.0)
    assert book.reports()[0].state == "linking"
    book.runner_said(key(2), Linked(2), 3.0)
    assert book.reports()[0].state == "ready"


def test_one_that_loads_for_an_epoch_that_is_lost_and_comes_no_further_is_given_up() -> None:
    book = ledger()
    loading(book)
    lose_the_other(book, now=15.0)
    assert book.next_wakeup() == 30.6, "before the end of the time that it would be kept for"
    assert [type(effect) for effect in book.tick(30.6)] == [StopRunner]
    assert (book.reports()[0].state, book.reports()[0].error) == ("failed", "no progress for 30 s while cut")


def test_what_its_runner_says_of_a_loading_that_fails_is_heard_though_the_seat_beside_is_lost() -> None:
    book = ledger()
    loading(book)
    lose_the_other(book, now=1.0)
    effects = book.runner_said(key(1), RunnerFailed("corrupt_model", "file x is cut short"), 2.0)
    assert [type(effect) for effect in effects] == [StopRunner]
    assert (book.reports()[0].state, book.reports()[0].error_code) == ("failed", "corrupt_model")


def test_one_that_still_loads_is_given_up_for_whoever_needs_its_memory_and_after_a_while() -> None:
    for needs_memory in (True, False):
        book = ledger()
        loading(book)
        lose_the_other(book, now=1.0)
        if needs_memory:
            other = SeatKey(InstanceId("other"), 1, 0)
            book.lease(other, placement(512), 90 * MIB, now=2.0)
            effects = book.commit(SeatRef(other.instance_id, 1, placement(512).placement_id), now=2.0)
            assert effects == [StopRunner(key(), "its memory is needed"), StartRunner(other, placement(512))]
        else:
            assert book.next_wakeup() == 1.0 + WARM_SECONDS
            assert [type(effect) for effect in book.tick(1.0 + WARM_SECONDS)] == [StopRunner]
            assert book.reports() == ()


def test_one_whose_process_is_not_there_yet_has_nothing_to_keep() -> None:
    book = ledger()
    book.lease(key(1), placement(), 60 * MIB, now=0.0)
    book.commit(ref(1), now=0.0)
    effects = book.view_changed([instance(book, "broken")], frozenset({ME}), 1.0)
    assert [type(effect) for effect in effects] == [StopRunner]
    assert book.reports() == ()


def test_a_repair_that_fails_after_its_commit_leaves_what_it_had_taken_over_to_the_next() -> None:
    book = ledger()
    ready(book)
    book.runner_said(key(1), ChannelLost(1, "activations", 1, "reset by peer"), now=1.0)
    book.lease(key(2), placement(), 60 * MIB, now=2.0)
    book.commit(ref(2), now=2.0)
    failed = replace(ref(2), keeps_layers=True)
    assert book.release(failed, now=3.0) == (60 * MIB, [])
    assert ([(report.epoch, report.state) for report in book.reports()], book.promised_bytes) == ([(2, "cut")], 0)
    book.lease(key(3), placement(), 60 * MIB, now=4.0)
    assert book.commit(ref(3), now=4.0) == [RebindRunner(key(2), key(3), placement())]
    book.release(replace(ref(3), keeps_layers=True), now=5.0)
    assert [effect.key for effect in book.tick(5.0 + WARM_SECONDS)] == [key(3)], "no longer than any other"


def test_of_a_repair_that_fails_before_its_commit_nothing_is_kept() -> None:
    book = ledger()
    ready(book)
    book.runner_said(key(1), ChannelLost(1, "activations", 1, "reset by peer"), now=1.0)
    book.lease(key(2), placement(), 60 * MIB, now=2.0)
    assert book.release(replace(ref(2), keeps_layers=True), now=3.0) == (60 * MIB, [])
    assert [(report.epoch, report.state) for report in book.reports()] == [(1, "cut")]
