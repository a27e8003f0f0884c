"""Who plans: everyone agrees without a word, and a node that goes moves only its own keys."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.ids import NodeId
from meshinfer.serving.election import elect

members = st.sets(st.text(min_size=1, max_size=8).map(NodeId), max_size=12)


@given(st.text(), members, st.randoms(use_true_random=False))
def test_all_who_see_the_same_members_elect_alike(key, ids, rng):
    shuffled = list(ids) * 2
    rng.shuffle(shuffled)
    order = elect(key, shuffled)
    assert order == elect(key, sorted(ids))
    assert set(order) == ids
    assert len(order) == len(ids)


@given(st.text(), members.filter(bool), st.data())
def test_a_member_that_goes_moves_nobody_else(key, ids, data):
    gone = data.draw(st.sampled_from(sorted(ids)))
    assert elect(key, ids - {gone}) == tuple(member for member in elect(key, ids) if member != gone)


def test_keys_spread_over_the_members():
    ids = [NodeId(f"node{i}") for i in range(10)]
    firsts = Counter(elect(f"model{i}", ids)[0] for i in range(2000))
    # 200 each on average; 5 standard deviations are 67.
    assert all(133 <= firsts[node] <= 267 for node in ids)
    seconds = Counter(elect(f"model{i}", ids)[1] for i in range(2000) if elect(f"model{i}", ids)[0] == ids[0])
    assert len(seconds) == 9


def test_key_and_member_are_framed():
    """`ab` + `c` is another pair than `a` + `bc`: the orders of two members do not always agree for both."""
    pairs = [(NodeId(f"c{i}"), NodeId(f"c{i + 1}")) for i in range(64)]
    moved = [(NodeId(f"bc{i}"), NodeId(f"bc{i + 1}")) for i in range(64)]
    same = [elect("ab", a)[0] == a[0] for a in pairs]
    other = [elect("a", b)[0] == b[0] for b in moved]
    assert same != other
