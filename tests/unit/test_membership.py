"""The membership machine: what kills, what does not, and that its table is whole."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.ids import NodeId
from meshinfer.mesh.membership import (
    MAX_MEMBERS,
    TRANSITIONS,
    CardHeard,
    Connected,
    Disconnected,
    Event,
    Membership,
    MemberState,
    PingAnswered,
    PingSent,
    Redial,
    RedialFailed,
    StateChanged,
    TimePassed,
    Timing,
)

A = NodeId("a")


def connected() -> Membership:
    machine = Membership()
    machine.handle(Connected(A), 0.0)
    machine.handle(CardHeard(A, 1, leaving=False), 0.0)
    return machine


def run_until(machine: Membership, now: float) -> list[object]:
    """Wake the machine whenever it wants, up to `now`."""
    effects: list[object] = []
    while (wakeup := machine.next_wakeup()) is not None and wakeup <= now:
        effects += machine.handle(TimePassed(), wakeup)
    return effects


def test_whoever_connects_is_alive() -> None:
    machine = Membership()
    assert machine.handle(Connected(A), 1.0) == [StateChanged(A, None, "alive", "connected")]
    assert machine.vouched() == {A}


def test_a_single_lost_ping_removes_nobody() -> None:
    machine = connected()
    machine.handle(PingSent(A), 1.0)
    assert run_until(machine, 100.0) == []
    assert machine.state(A) == "alive"


def test_silence_makes_suspect_then_dead_within_the_promise() -> None:
    machine = connected()
    machine.handle(PingSent(A), 0.4)
    machine.handle(PingAnswered(A), 0.41)  # the stop comes right after this answer
    for sent in (0.9, 1.4, 1.9):
        machine.handle(PingSent(A), sent)
        run_until(machine, sent)
    run_until(machine, 2.0)
    assert machine.state(A) == "suspect"
    assert machine.vouched() == {A}, "a suspect is still a member"
    machine.handle(PingSent(A), 2.4)
    run_until(machine, 3.0)
    assert machine.state(A) == "dead"
    assert list(machine.dead()) == [A]


def test_a_late_answer_clears_the_suspicion() -> None:
    machine = connected()
    for sent in (0.5, 1.0, 1.5, 2.0):
        machine.handle(PingSent(A), sent)
    assert machine.state(A) == "suspect"
    assert machine.handle(PingAnswered(A), 2.1) == [StateChanged(A, "suspect", "alive", "answers pings")]


def test_our_own_stop_is_not_the_others_silence() -> None:
    machine = connected()
    machine.handle(PingSent(A), 0.5)
    # SIGSTOP for a minute, in the middle of a ping; then the loop runs its timers before it reads its sockets.
    assert machine.handle(TimePassed(), 60.0) == []
    machine.handle(PingSent(A), 60.0)
    machine.handle(PingAnswered(A), 60.01)
    run_until(machine, 70.0)
    assert machine.state(A) == "alive"


def test_a_lost_connection_is_dialled_again_and_its_return_is_no_death() -> None:
    machine = connected()
    assert machine.handle(Disconnected(A), 5.0) == [
        StateChanged(A, "alive", "suspect", "connection lost"),
        Redial(A),
    ]
    assert machine.handle(Connected(A), 5.3) == [StateChanged(A, "suspect", "alive", "connected")]
    assert run_until(machine, 100.0) == []


def test_a_lost_connection_that_stays_lost_is_a_death() -> None:
    machine = connected()
    machine.handle(Disconnected(A), 5.0)
    run_until(machine, 5.5)
    assert machine.state(A) == "dead"
    machine = connected()
    machine.handle(Disconnected(A), 5.0)
    machine.handle(RedialFailed(A), 5.01)
    assert machine.state(A) == "dead", "nobody listens there: no need to wait"


def test_a_failed_dial_beside_a_living_connection_means_nothing() -> None:
    machine = connected()
    assert machine.handle(RedialFailed(A), 5.0) == []


def test_the_dead_come_back_by_answering_or_connecting() -> None:
    machine = connected()
    for sent in (0.5, 1.0, 1.5, 2.0):
        machine.handle(PingSent(A), sent)
    run_until(machine, 3.0)
    assert machine.state(A) == "dead"
    machine.handle(PingAnswered(A), 9.0)  # continued after a stop: the socket was open all the time
    assert machine.state(A) == "alive"
    machine.handle(Disconnected(A), 10.0)
    machine.handle(RedialFailed(A), 10.0)
    machine.handle(Connected(A), 20.0)
    assert machine.state(A) == "alive"


def test_who_left_stays_away_until_a_higher_incarnation() -> None:
    machine = connected()
    machine.handle(CardHeard(A, 1, leaving=True), 1.0)
    assert machine.state(A) == "left"
    machine.handle(PingAnswered(A), 1.1)
    machine.handle(CardHeard(A, 1, leaving=False), 1.2)  # an older card, come late
    machine.handle(Disconnected(A), 1.3)
    machine.handle(Connected(A), 1.4)
    assert machine.state(A) == "left"
    machine.handle(CardHeard(A, 2, leaving=False), 1.5)
    assert machine.state(A) == "alive"


def test_who_left_may_be_heard_of_before_it_connects() -> None:
    machine = connected()
    machine.handle(CardHeard(A, 1, leaving=True), 1.0)
    machine.handle(Disconnected(A), 1.1)
    machine.handle(CardHeard(A, 2, leaving=False), 5.0)
    assert machine.state(A) == "left", "hearsay is no connection"
    machine.handle(Connected(A), 5.1)
    assert machine.state(A) == "alive"


def test_the_dead_are_forgotten_in_time() -> None:
    machine = connected()
    machine.handle(Disconnected(A), 5.0)
    run_until(machine, 5.0 + Timing().forget_after_seconds + 1)
    assert machine.members() == ()
    assert machine.next_wakeup() is None


def test_the_list_is_bounded() -> None:
    machine = Membership()
    for index in range(MAX_MEMBERS + 50):
        node = NodeId(f"n{index}")
        machine.handle(Connected(node), index * 0.01)
        machine.handle(Disconnected(node), index * 0.01)
        machine.handle(RedialFailed(node), index * 0.01)
    assert len(machine.members()) <= MAX_MEMBERS


def test_every_state_can_be_reached_and_left() -> None:
    states: set[MemberState] = {"alive", "suspect", "dead", "left"}
    assert set(TRANSITIONS.values()) == states
    assert {before for before, _ in TRANSITIONS} == {None, *states}


EVENTS: list[Callable[[NodeId], Event]] = [
    Connected,
    Disconnected,
    RedialFailed,
    PingSent,
    PingAnswered,
    lambda node: CardHeard(node, 1, leaving=False),
    lambda node: CardHeard(node, 1, leaving=True),
    lambda node: CardHeard(node, 2, leaving=False),
    lambda node: TimePassed(),
]


@given(
    st.lists(
        st.tuples(st.sampled_from(EVENTS), st.sampled_from([NodeId("a"), NodeId("b")]), st.floats(0, 3)), max_size=60
    )
)
def test_any_sequence_of_events_keeps_the_invariants(
    tale: list[tuple[Callable[[NodeId], Event], NodeId, float]],
) -> None:
    machine = Membership()
    now = 0.0
    states: dict[NodeId, MemberState | None] = {}
    for event_of, node, later in tale:
        now += later
        for effect in machine.handle(event_of(node), now):
            if isinstance(effect, StateChanged):
                assert effect.before == states.get(effect.node)
                assert effect.before != effect.after
                states[effect.node] = effect.after
            else:
                assert machine.state(effect.node) == "suspect"
        wakeup = machine.next_wakeup()
        assert wakeup is None or wakeup > now, "nothing that is due is left undone"
        for member in machine.members():
            assert member.state == states[member.node]
            assert member.state != "alive" or member.connected
        assert not machine.vouched() & machine.dead().keys()
