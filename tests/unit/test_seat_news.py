"""What happens to a seat is announced at once; a load's progress and counters do not crowd it out."""

from dataclasses import replace

from meshinfer.base.ids import InstanceId, NodeId, PlacementId
from meshinfer.serving.seat_news import PROGRESS_SECONDS, SeatNews
from meshinfer.topology.card import SeatReport

LOADING = SeatReport(InstanceId("0" * 16), 1, PlacementId("p" * 16), 0, "loading", promised_bytes=9)


def news_of(*reports: SeatReport) -> SeatNews:
    """At 0 s, of these."""
    news = SeatNews()
    assert news.is_due(reports, (), 0.0)
    news.told(reports, (), 0.0)
    return news


def test_what_happened_is_due_at_once_and_once() -> None:
    news, ready = news_of(LOADING), (replace(LOADING, state="ready", progress=1.0),)
    assert not news.is_due((LOADING,), (), 9.0)
    assert news.is_due(ready, (), 0.01)
    news.told(ready, (), 0.01)
    assert not news.is_due(ready, (), 9.0)


def test_progress_alone_waits() -> None:
    news, further = news_of(LOADING), (replace(LOADING, progress=0.5),)
    assert not news.is_due(further, (), PROGRESS_SECONDS / 2)
    assert news.is_due(further, (), PROGRESS_SECONDS)


def test_what_only_counts_is_due_where_counters_are_asked_for() -> None:
    news, more = news_of(LOADING), (replace(LOADING, resident_bytes=7),)
    assert not news.is_due(more, (), 9.0)
    assert news.is_due(more, (), 9.0, counters=True)
    assert not news.is_due((LOADING,), (), 9.0, counters=True)


def test_that_there_are_no_seats_any_more_is_news() -> None:
    assert news_of(LOADING).is_due((), (), 0.01)


def test_a_way_that_is_blocked_or_is_not_any_more_is_news() -> None:
    news, blocked = news_of(LOADING), (NodeId("n"),)
    assert news.is_due((LOADING,), blocked, 0.01)
    news.told((LOADING,), blocked, 0.01)
    assert not news.is_due((LOADING,), blocked, 9.0)
    assert news.is_due((LOADING,), (), 9.0)
