"""What a planner remembers of runners that failed. Pure; time is a number."""

from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.serving.failures import (
    FORGOTTEN_SECONDS,
    LONGEST_REST_SECONDS,
    SERVED_SECONDS,
    Failures,
)
from meshinfer.serving.seats import WARM_SECONDS
from meshinfer.serving.view import Instance
from meshinfer.topology.card import SeatReport, SeatState
from meshinfer.topology.placement import Placement, Seat

ADA, BEA = NodeId("ada"), NodeId("bea")
INSTANCE = InstanceId("1f" * 8)
PLACEMENT = Placement(ModelId("tiny"), "d" * 64, 8, "pipeline", "libp2p", 256, 1, (Seat(ADA, 0, 4), Seat(BEA, 4, 8)))


def seen(epoch: int, state: SeatState = "failed", code: str = "", step_seconds: float = 0.0) -> Instance:
    """With ada's seat in `state`."""

    def report(index: int, state: SeatState) -> SeatReport:
        return SeatReport(
            instance_id=INSTANCE,
            epoch=epoch,
            placement_id=PLACEMENT.placement_id,
            seat_index=index,
            state=state,
            progress=1.0,
            promised_bytes=0,
            resident_bytes=0,
            sessions=0,
            step_seconds=step_seconds if index == 0 else 0.0,
            error="killed" if state == "failed" else "",
            error_code=code,
        )

    return Instance(INSTANCE, epoch, PLACEMENT, "broken", 1.0, (report(0, state), report(1, "cut")))


def rests(book: Failures, now: float) -> list[float]:
    return [rest.seconds for rest in book.rests(INSTANCE, now)]


def test_the_first_failure_is_mended_on_the_spot_and_the_next_ones_elsewhere_or_later_and_later() -> None:
    book, now, waits = Failures(), 100.0, []
    for epoch in range(1, 9):
        book.learn(seen(epoch), now)
        book.learn(seen(epoch), now + 0.1)  # looked at twice
        assert book.troubled(INSTANCE, now) == ({ADA} if epoch > 1 else set())
        wait = rests(book, now)
        waits += wait
        now += wait[0] if wait else 0.5
        assert rests(book, now) == [], "it may be tried again"
    assert waits == [2.0, 4.0, 8.0, *[LONGEST_REST_SECONDS] * 4]
    assert LONGEST_REST_SECONDS < WARM_SECONDS, "what is warm on the other nodes outlives each rest"
    assert book.troubled(InstanceId("2e" * 8), now) == set(), "of another instance nothing is known"


def test_the_rest_says_of_whom_and_why() -> None:
    book = Failures()
    book.learn(seen(1), 0.0)
    book.learn(seen(2), 1.0)
    (rest,) = book.rests(INSTANCE, 1.5)
    assert (rest.node_id, rest.failures, rest.error, rest.seconds) == (ADA, 2, "killed", 1.5)


def test_what_has_served_starts_anew() -> None:
    def troubled(later: float, step_seconds: float, state: SeatState) -> bool:
        book = Failures()
        for epoch in (1, 2, 3):
            book.learn(seen(epoch), 0.0)
        book.learn(seen(4, state, step_seconds=step_seconds), later)
        return bool(book.troubled(INSTANCE, later))

    for state in ("cut", "failed"):
        assert not troubled(SERVED_SECONDS, 0.01, state), "it has computed, and lived long enough"
        assert troubled(SERVED_SECONDS - 1, 0.01, state), "it dies young, again and again"
        assert troubled(SERVED_SECONDS, 0.0, state), "it stood idle, and nobody knows"
    assert not troubled(FORGOTTEN_SECONDS, 0.0, "cut")


def test_a_damaged_file_moves_the_seat_at_once_and_never_keeps_anybody_waiting() -> None:
    """Each client is told what is wrong, and it may be mended any moment."""
    book = Failures()
    for epoch in (1, 2, 3):
        book.learn(seen(epoch, code="corrupt_model"), float(epoch))
        assert book.troubled(INSTANCE, float(epoch)) == {ADA}
        assert book.rests(INSTANCE, float(epoch)) == ()


def test_time_alone_forgets() -> None:
    book = Failures()
    for epoch in (1, 2):
        book.learn(seen(epoch), 0.0)
    assert book.troubled(INSTANCE, FORGOTTEN_SECONDS - 1) == {ADA}
    assert book.troubled(INSTANCE, FORGOTTEN_SECONDS) == set(), "though nobody looked at the instance meanwhile"
