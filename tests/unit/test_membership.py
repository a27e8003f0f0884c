"""The membership machine: what kills, what does not, who is believed, and that its table is whole.

The edge cases are those that memberlist's own tests name: dogpile, refute, replay of an old word, awareness that
degrades and improves, missed answers of relays, a name that comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.ids import NodeId
from meshinfer.mesh.membership import MAX_ACCUSERS, MAX_MEMBERS, TRANSITIONS, Membership, Timing
from meshinfer.mesh.membership_events import (
    Accused,
    AskOthers,
    Blamed,
    CardHeard,
    Connected,
    Disconnected,
    Effect,
    Event,
    Late,
    LinkDoubted,
    MemberState,
    OthersDoNot,
    OthersReach,
    PingAnswered,
    PingSent,
    Probe,
    Redial,
    RedialFailed,
    StateChanged,
    SuspectedOurselves,
    TimePassed,
)
from meshinfer.mesh.view import Bounds

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")
TIMING = Timing()


def connected(*others: NodeId) -> Membership:
    """A machine with `A`, and `others`, as neighbours."""
    machine = Membership()
    for node in (A, *others):
        machine.handle(Connected(node), 0.0)
        machine.handle(CardHeard(node, 1, leaving=False), 0.0)
    return machine


def run_until(machine: Membership, now: float) -> list[Effect]:
    """Wake the machine whenever it wants, up to `now`."""
    effects: list[Effect] = []
    while (wakeup := machine.next_wakeup()) is not None and wakeup <= now:
        effects += machine.handle(TimePassed(), wakeup)
    return effects


def silence(machine: Membership, since: float, until: float, answering: tuple[NodeId, ...] = ()) -> list[Effect]:
    """`A` is pinged every half second from `since` and does not answer; `answering` do."""
    effects: list[Effect] = []
    sent = since
    while sent <= until:
        effects += run_until(machine, sent)
        effects += machine.handle(PingSent(A), sent)
        for node in answering:
            effects += machine.handle(PingSent(node), sent)
            effects += machine.handle(PingAnswered(node), sent)
        sent += 0.5
    return effects + run_until(machine, until)


def died_after(machine: Membership, since: float, answering: tuple[NodeId, ...] = ()) -> float:
    """Seconds of silence until `A` is dead."""
    for tenths in range(1, 200):
        silence_until = since + tenths / 10
        if (tenths - 1) % 5 == 0:
            machine.handle(PingSent(A), silence_until - 0.1)
            for node in answering:
                machine.handle(PingSent(node), silence_until - 0.1)
                machine.handle(PingAnswered(node), silence_until - 0.1)
        run_until(machine, silence_until)
        if machine.state(A) == "dead":
            return tenths / 10
    raise AssertionError("it never died")


def buried_after(answer_seconds: float, quick_ones_since: int = 0, *, stopped_seconds: float = 0.0) -> float:
    """Seconds of silence until `A` is dead, after one answer that took `answer_seconds`, our own stop at its end."""
    room = Membership(TIMING)
    room.handle(Connected(A), 0.0)
    now = 0.0
    for number, seconds in enumerate((answer_seconds, *(0.002 for _ in range(quick_ones_since)))):
        room.handle(PingSent(A), now)
        now += seconds
        if number == 0 and stopped_seconds:
            room.handle(Late(stopped_seconds), now)
        room.handle(PingAnswered(A, seconds), now)
    start = now + 60.0  # long enough for all doubt of ourselves to have gone
    for number in range(40):
        room.handle(PingSent(A), start + 0.5 * number)
        while (due := room.next_wakeup()) is not None and due <= start + 0.5 * (number + 1):
            room.handle(TimePassed(), due)
            if room.state(A) == "dead":
                return due - start
    return math.inf


# --- silence --------------------------------------------------------------------------------------


def test_whoever_connects_is_alive() -> None:
    machine = Membership()
    assert machine.handle(Connected(A), 1.0) == [StateChanged(A, None, "alive", "connected")]
    assert machine.vouched() == {A}


def test_a_single_lost_ping_removes_nobody() -> None:
    machine = connected()
    machine.handle(PingSent(A), 1.0)
    assert run_until(machine, 100.0) == []
    assert machine.state(A) == "alive"


def test_silence_is_in_doubt_within_a_second_and_dead_within_the_promise() -> None:
    machine = connected(B, C)
    machine.handle(PingSent(A), 0.0)
    machine.handle(PingAnswered(A), 0.01)  # the stop comes right after this answer
    effects = silence(machine, 0.5, 1.0, (B, C))
    assert AskOthers(A) in effects
    assert machine.doubtful() == {A}
    assert A in machine.vouched(), "a suspect is still a member"
    machine.handle(OthersDoNot(A, 0), 1.3)
    silence(machine, 1.5, 2.5, (B, C))
    assert machine.state(A) == "dead"
    assert list(machine.dead()) == [A]
    assert not machine.doubtful()


def test_a_late_answer_clears_the_suspicion() -> None:
    machine = connected()
    silence(machine, 0.5, 1.5)
    assert machine.state(A) == "suspect"
    assert machine.handle(PingAnswered(A), 1.6) == [StateChanged(A, "suspect", "alive", "answers pings")]


def test_confirmations_shorten_the_wait_and_each_less_than_the_one_before() -> None:
    waits: list[float] = []
    for accusers in ((), (B,), (B, C), (B, C, D)):
        machine = connected(B, C, D)
        for accuser in accusers:
            machine.handle(Accused(accuser, ((A, 1),)), 0.0)
        waits.append(died_after(machine, 1.0, (B, C, D)))
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == pytest.approx(TIMING.dead_max_seconds, abs=0.1)
    assert waits[-1] == pytest.approx(TIMING.dead_min_seconds, abs=0.1)


def test_one_accuser_counts_once_however_often_it_says_so() -> None:
    waits: list[float] = []
    for times in (1, 10):
        machine = connected(B, C, D)
        for _ in range(times):
            machine.handle(Accused(B, ((A, 1),)), 0.0)
        waits.append(died_after(machine, 1.0, (B, C, D)))
    assert waits[0] == waits[1]


def test_where_nobody_could_confirm_the_wait_is_the_shortest() -> None:
    assert died_after(connected(), 1.0) == pytest.approx(TIMING.dead_min_seconds, abs=0.1)


def test_a_rumour_alone_suspects_nobody_but_makes_us_look() -> None:
    machine = connected(B)
    assert machine.handle(Accused(B, ((A, 1), (NodeId("unheard of"), 3))), 1.0) == [Probe(A)]
    assert machine.handle(Accused(B, ((A, 1),)), 2.0) == [], "said once is enough"
    assert run_until(machine, 100.0) == []
    assert machine.state(A) == "alive"


def test_an_accusation_that_was_refuted_or_taken_back_counts_no_more() -> None:
    machine = connected(B, C, D)
    machine.handle(Accused(B, ((A, 1),)), 0.0)
    machine.handle(Accused(B, ()), 0.1)
    machine.handle(Accused(C, ((A, 1),)), 0.2)
    machine.handle(CardHeard(A, 2, leaving=False), 0.3)
    machine.handle(Accused(D, ((A, 1),)), 0.4)  # an old word, come late
    assert died_after(machine, 1.0, (B, C, D)) == pytest.approx(TIMING.dead_max_seconds, abs=0.1)


def test_accusers_are_bounded() -> None:
    machine = connected()
    probes = [machine.handle(Accused(NodeId(f"n{index}"), ((A, 1),)), 1.0) for index in range(1000)]
    assert sum(map(len, probes)) == MAX_ACCUSERS


# --- the data path --------------------------------------------------------------------------------


def test_blame_is_looked_into_at_once_and_clears_with_an_answer() -> None:
    machine = connected(B)
    assert machine.handle(Blamed(A), 1.0) == [Probe(A)]
    assert machine.handle(Blamed(A), 1.0) == [], "a hundred sessions lose it at once: one ping"
    machine.handle(PingSent(A), 1.0)
    machine.handle(PingAnswered(A), 1.01)
    assert run_until(machine, 10.0) == []
    assert machine.handle(Blamed(A), 11.0) == [Probe(A)]


def test_who_is_blamed_and_silent_is_suspect_sooner_and_dead_sooner() -> None:
    machine = connected(B, C)
    machine.handle(Blamed(A), 1.0)
    machine.handle(PingSent(A), 1.0)
    run_until(machine, 1.25)
    assert machine.state(A) == "suspect"
    blamed = connected(B, C)
    blamed.handle(Blamed(A), 1.0)
    assert died_after(blamed, 1.0, (B, C)) < died_after(connected(B, C), 1.0, (B, C))


def test_blame_of_nobody_is_nothing() -> None:
    machine = connected()
    assert machine.handle(Blamed(B), 1.0) == []
    machine.handle(Disconnected(A), 1.0)
    assert machine.handle(Blamed(A), 1.0) == []


# --- what others see ------------------------------------------------------------------------------


def test_whom_others_reach_is_distant_and_not_dead() -> None:
    machine = connected(B)
    silence(machine, 0.5, 1.0, (B,))
    assert machine.handle(OthersReach(A, B), 1.1) == [LinkDoubted(A)]
    assert machine.handle(OthersReach(A, C), 1.2) == [], "once is enough"
    assert machine.state(A) == "suspect", "it may still answer"
    assert A in machine.out_of_reach()
    silence(machine, 1.5, 3.0, (B,))
    assert machine.state(A) == "distant"
    assert A not in machine.vouched(), "we have no link to it"
    assert A not in machine.dead(), "but others' links to it count"
    machine.handle(PingAnswered(A), 9.0)
    assert machine.state(A) == "alive"


def test_a_lost_connection_waits_for_the_others_word() -> None:
    machine = connected(B)
    machine.handle(Disconnected(A), 5.0)
    machine.handle(RedialFailed(A), 5.01)
    assert machine.state(A) == "suspect"
    machine.handle(OthersReach(A, B), 5.02)
    assert machine.state(A) == "distant"
    machine = connected(B)
    machine.handle(Disconnected(A), 5.0)
    machine.handle(OthersDoNot(A, 0), 5.01)
    assert machine.state(A) == "suspect", "the re-dial may work"
    machine.handle(RedialFailed(A), 5.02)
    assert machine.state(A) == "dead", "nobody listens there: no need to wait"


def test_the_others_word_comes_too_late() -> None:
    machine = connected(B)
    machine.handle(Disconnected(A), 5.0)
    run_until(machine, 5.5)
    assert machine.state(A) == "dead"
    assert machine.handle(OthersReach(A, B), 5.6) == []


def test_an_answer_about_an_earlier_suspicion_does_not_outlive_it() -> None:
    machine = connected(B)
    silence(machine, 0.5, 1.0, (B,))
    machine.handle(OthersReach(A, B), 1.1)
    machine.handle(PingAnswered(A), 1.2)
    silence(machine, 2.0, 5.0, (B,))
    assert machine.state(A) == "dead"


def test_a_refutation_saves_the_suspect_and_brings_back_the_dead() -> None:
    machine = connected(B)
    silence(machine, 0.5, 1.0, (B,))
    assert machine.suspects(1.0) == ((A, 1),)
    machine.handle(CardHeard(A, 2, leaving=False), 1.1)
    silence(machine, 1.5, 3.0, (B,))
    assert machine.state(A) == "distant"
    machine = connected(B)
    silence(machine, 0.5, 3.0, (B,))
    assert machine.state(A) == "dead"
    machine.handle(CardHeard(A, 1, leaving=False), 3.1)
    assert machine.state(A) == "dead", "an old word, come late"
    machine.handle(CardHeard(A, 2, leaving=False), 3.2)
    assert machine.state(A) == "distant"


def test_whom_we_never_heard_of_before_refutes_nothing() -> None:
    machine = Membership()
    machine.handle(Connected(A), 0.0)
    machine.handle(Connected(B), 0.0)
    silence(machine, 0.5, 1.0, (B,))
    machine.handle(CardHeard(A, 7, leaving=False), 1.1)  # the first card we see of it, of unknown age
    silence(machine, 1.5, 3.0, (B,))
    assert machine.state(A) == "dead"


def test_the_dead_are_accused_for_a_while_and_lost_connections_are_not() -> None:
    machine = connected(B)
    machine.handle(Disconnected(A), 5.0)
    assert machine.suspects(5.0) == (), "all its neighbours see for themselves"
    run_until(machine, 5.5)
    assert machine.suspects(6.0) == ((A, 1),)
    assert machine.suspects(16.0) == ()


# --- ourselves ------------------------------------------------------------------------------------


def test_our_own_stop_is_not_the_others_silence() -> None:
    machine = connected()
    machine.handle(PingSent(A), 0.5)
    # SIGSTOP for a minute, in the middle of a ping; then the loop runs its timers before it reads its sockets.
    assert machine.handle(TimePassed(), 60.0) == []
    machine.handle(PingSent(A), 60.0)
    machine.handle(PingAnswered(A), 60.01)
    run_until(machine, 70.0)
    assert machine.state(A) == "alive"


def test_time_in_which_our_loop_stood_still_is_nobodys_silence() -> None:
    machine = connected(B)
    silence(machine, 0.5, 1.5, (B,))
    assert machine.state(A) == "suspect"
    machine.handle(Late(30.0), 31.6)
    run_until(machine, 31.7)
    assert machine.state(A) == "suspect", "three pings under way, but only a second and a half of our own time"


def test_a_standstill_does_not_eat_the_grace_of_a_lost_connection() -> None:
    machine = connected(B)
    machine.handle(Disconnected(A), 5.0)
    machine.handle(Late(10.0), 15.1)
    assert machine.state(A) == "suspect"
    machine.handle(Connected(A), 15.2)
    assert machine.state(A) == "alive"


@pytest.mark.parametrize("doubt", [Late(0.3), SuspectedOurselves()])
def test_awareness_degrades_and_improves(doubt: Event) -> None:
    machine = connected(B, C)
    for _ in range(20):
        machine.handle(doubt, 1.0)
    assert machine.self_doubt(1.0) == TIMING.self_doubt_max
    degraded = died_after(machine, 1.0, (B, C))
    assert TIMING.dead_max_seconds < degraded <= TIMING.dead_max_seconds * (1 + TIMING.self_doubt_max / 2)
    healed = connected(B, C)
    healed.handle(doubt, 1.0)
    assert healed.self_doubt(30.0) == 0
    assert died_after(healed, 30.0, (B, C)) <= TIMING.dead_max_seconds + 0.1


def test_relays_that_say_nothing_are_a_hint_at_our_own_link() -> None:
    """Lifeguard's missed nack: confirmations do not count then."""
    waits: list[float] = []
    for unanswered in (0, 2):
        machine = connected(B, C, D)
        for accuser in (B, C, D):
            machine.handle(Accused(accuser, ((A, 1),)), 0.0)
        silence(machine, 1.0, 1.5, (B, C, D))
        assert machine.state(A) == "suspect"
        machine.handle(OthersDoNot(A, unanswered), 1.6)
        silence(machine, 2.0, 2.0, (B, C, D))
        run_until(machine, 1.0 + TIMING.dead_min_seconds + 0.2)
        waits.append(machine.state(A) == "dead")
    assert waits == [True, False]


def test_when_most_fall_silent_at_once_nothing_shortens_the_wait() -> None:
    machine = connected(B, C)
    for accuser in (B, C):
        machine.handle(Accused(accuser, ((A, 1),)), 0.0)
    for sent in (1.0, 1.5, 2.0):
        for node in (A, B, C):
            machine.handle(PingSent(node), sent)
    run_until(machine, 2.9)
    assert {machine.state(node) for node in (A, B, C)} == {"suspect"}
    run_until(machine, 1.0 + TIMING.dead_max_seconds)
    assert {machine.state(node) for node in (A, B, C)} == {"dead"}, "yet within the promise, for we may be cut off"


# --- connections ----------------------------------------------------------------------------------


def test_a_lost_connection_is_dialled_again_and_its_return_is_no_death() -> None:
    machine = connected()
    assert machine.handle(Disconnected(A), 5.0) == [
        StateChanged(A, "alive", "suspect", "connection lost"),
        AskOthers(A),
        Redial(A),
    ]
    assert machine.handle(Connected(A), 5.3) == [StateChanged(A, "suspect", "alive", "connected")]
    assert run_until(machine, 100.0) == []


def test_a_lost_connection_that_stays_lost_is_a_death() -> None:
    machine = connected()
    machine.handle(Disconnected(A), 5.0)
    run_until(machine, 5.5)
    assert machine.state(A) == "dead"


def test_a_failed_dial_beside_a_living_connection_means_nothing() -> None:
    machine = connected()
    assert machine.handle(RedialFailed(A), 5.0) == []


def test_the_dead_come_back_by_answering_or_connecting() -> None:
    machine = connected()
    silence(machine, 0.5, 3.0)
    assert machine.state(A) == "dead"
    machine.handle(PingAnswered(A), 9.0)  # continued after a stop: the socket was open all the time
    assert machine.state(A) == "alive"
    machine.handle(Disconnected(A), 10.0)
    run_until(machine, 11.0)
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
    run_until(machine, 5.0 + TIMING.forget_after_seconds + 1)
    assert machine.members() == ()
    assert machine.next_wakeup() is None


def test_the_list_is_bounded() -> None:
    machine = Membership()
    for index in range(MAX_MEMBERS + 50):
        node = NodeId(f"n{index}")
        machine.handle(Connected(node), index * 0.01)
        machine.handle(Disconnected(node), index * 0.01)
        machine.handle(OthersDoNot(node, 0), index * 0.01)
        machine.handle(RedialFailed(node), index * 0.01)
    assert len(machine.members()) <= MAX_MEMBERS


# --- the whole ------------------------------------------------------------------------------------


def test_every_state_can_be_reached_and_left() -> None:
    states: set[MemberState] = {"alive", "suspect", "distant", "dead", "left"}
    assert set(TRANSITIONS.values()) == states
    assert {before for before, _ in TRANSITIONS} == {None, *states}


EVENTS: list[Callable[[NodeId], Event]] = [
    Connected,
    Disconnected,
    RedialFailed,
    PingSent,
    PingAnswered,
    Blamed,
    lambda node: OthersReach(node, C),
    lambda node: OthersDoNot(node, 0),
    lambda node: OthersDoNot(node, 2),
    lambda node: CardHeard(node, 1, leaving=False),
    lambda node: CardHeard(node, 1, leaving=True),
    lambda node: CardHeard(node, 2, leaving=False),
    lambda node: Accused(C, ((node, 1),)),
    lambda node: Accused(node, ((A, 1), (B, 2))),
    lambda node: Accused(node, ()),
    lambda node: SuspectedOurselves(),
    lambda node: Late(0.7),
    lambda node: TimePassed(),
]
TALES = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from([A, B]), st.floats(0, 3)), max_size=80)


@given(TALES)
def test_any_sequence_of_events_keeps_the_invariants(
    tale: list[tuple[Callable[[NodeId], Event], NodeId, float]],
) -> None:
    machine = Membership()
    now = 0.0
    states: dict[NodeId, MemberState | None] = {}
    connections: set[NodeId] = set()
    for event_of, node, later in tale:
        now += later
        event = event_of(node)
        connections = connections | {node} if isinstance(event, Connected) else connections
        connections = connections - {node} if isinstance(event, Disconnected) else connections
        for effect in machine.handle(event, now):
            if isinstance(effect, StateChanged):
                assert effect.before == states.get(effect.node)
                assert (effect.before, effect.after) in {(before, after) for (before, _), after in TRANSITIONS.items()}
                states[effect.node] = effect.after
            elif isinstance(effect, Probe):
                assert effect.node in connections
            else:
                assert states[effect.node] in ("suspect", "distant", "dead"), "later in the same breath, perhaps"
        wakeup = machine.next_wakeup()
        assert wakeup is None or wakeup > now, "nothing that is due is left undone"
        for member in machine.members():
            assert member.state == states[member.node]
            assert member.state != "alive" or member.connected
            assert member.connected == (member.node in connections)
            assert member.since <= now
        assert not machine.vouched() & machine.dead().keys()
        assert machine.doubtful() <= machine.vouched()
        assert 0 <= machine.self_doubt(now) <= TIMING.self_doubt_max


@given(TALES, st.floats(0, 1e9))
def test_only_differences_of_the_own_clock_matter(
    tale: list[tuple[Callable[[NodeId], Event], NodeId, float]], whole: float
) -> None:
    """A clock that began elsewhere leads to the same states."""
    epoch = float(int(whole))  # so that sums stay exact enough to compare
    here, there = Membership(), Membership()
    now = 0.0
    for event_of, node, later in tale:
        now += round(later * 8) / 8
        mine, theirs = here.handle(event_of(node), now), there.handle(event_of(node), epoch + now)
        assert [type(effect) for effect in mine] == [type(effect) for effect in theirs]
    assert [(m.node, m.state) for m in here.members()] == [(m.node, m.state) for m in there.members()]


def test_who_answers_slowly_of_late_may_be_silent_for_longer() -> None:
    """Its cores are taken. Whoever answers in milliseconds is held to what the mesh promises."""

    quick, slow = buried_after(0.002, 0), buried_after(0.8, 0)
    assert slow == pytest.approx(4 * 0.8)
    assert slow > quick
    assert buried_after(0.8, 12) == pytest.approx(quick), "it has recovered"
    assert buried_after(30.0, 0) == TIMING.slow_max_seconds, "within bounds"
    assert buried_after(30.0, 5) < TIMING.dead_max_seconds, (
        "however slow it was, five quick answers later it is forgiven"
    )


def test_an_answer_that_our_own_stop_held_up_makes_nobody_slow() -> None:
    # SIGSTOP for 1.2 s with a ping under way: the answer lay there all the time.
    assert buried_after(1.22, stopped_seconds=1.2) == pytest.approx(buried_after(0.02))
    # … the stop began a minute before the ping, as far as the clock tells.
    assert buried_after(1.0, stopped_seconds=60.0) == pytest.approx(buried_after(0.002))
    # A neighbour that is slow beside it is slow.
    assert buried_after(1.4, stopped_seconds=0.6) == pytest.approx(4 * 0.8)


def test_a_view_doubts_the_dead_until_the_last_have_noticed() -> None:
    slow = buried_after(2.0)
    doubting = connected(B, C)
    for _ in range(20):
        doubting.handle(SuspectedOurselves(), 1.0)
    before_the_first_ping, gossip = 0.5, 0.5
    last = before_the_first_ping + max(slow, died_after(doubting, 1.0, (B, C))) + gossip
    assert last <= Bounds().doubt_seconds


def test_a_loop_that_comes_a_little_late_again_and_again_doubts_itself_too() -> None:
    room = Membership(TIMING)
    now = 0.0
    for _ in range(20):
        room.handle(Late(0.12), now := now + 0.3)
    assert room.self_doubt(now) > 2
