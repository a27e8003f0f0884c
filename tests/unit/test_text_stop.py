"""Stop strings never leak, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.serving.text_stop import StopScanner


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner, shown, hit = StopScanner(stops), "", None
    for piece in pieces:
        scanned = scanner.push(piece)
        shown += scanned.text
        hit = hit or scanned.stop
    return shown + scanner.flush(), hit


def _whole(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition, character by character: the first end of a stop string, the longest there."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab😀", max_size=12)


@given(
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), max_size=4), pieces=st.lists(letters, max_size=8)
)
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]):
    assert _run(stops, pieces) == _whole(stops, "".join(pieces))


@given(stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4), text=letters)
def test_what_is_shown_is_never_taken_back(stops: list[str], text: str):
    """At each moment, the text shown is a beginning of the answer, and holds nothing that may be a stop string."""
    answer, _ = _whole(stops, text)
    scanner, shown = StopScanner(stops), ""
    for count, char in enumerate(text, start=1):
        scanned = scanner.push(char)
        shown += scanned.text
        assert answer.startswith(shown)
        if scanned.stop is not None:
            break
        assert count - len(shown) <= max(map(len, stops), default=1) - 1, "no more is held back than may be a stop"


def test_nothing_is_held_back_without_need():
    scanner = StopScanner(["END"])
    assert scanner.push("text E").text == "text "
    assert scanner.push("N").text == ""
    assert scanner.push("o").text == "ENo"


def test_after_a_hit_all_is_swallowed():
    scanner = StopScanner(["."])
    assert (scanner.push("a.b").text, scanner.push("c").text, scanner.flush()) == ("a", "", "")


def test_an_empty_stop_string_is_a_mistake():
    with pytest.raises(ValueError, match="empty"):
        StopScanner([""])
