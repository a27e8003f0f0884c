"""One answer on its way from tokens to what a client may see: characters whole, stop strings cut. Pure.

`push` a token, get the text that may go out now with the tokens that it is made of; `finish` at the
end gives the rest. Both lag behind the tokens: a character may not be whole yet, or may be the start
of a stop string. The tokens of `TextDelta` lag likewise, so that log-probabilities do not show what the
text must not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from meshinfer.serving.requests import Generated
from meshinfer.serving.text import TextModel
from meshinfer.serving.text_stop import StopScanner


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of an answer."""

    text: str
    tokens: tuple[Generated, ...] = ()
    """The tokens that came out with it; none of them touches a stop string."""

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class TextAnswer:
    """One answer's state at the origin."""

    def __init__(self, model: TextModel, stops: Sequence[str]) -> None:
        self._detokeniser = model.detokeniser()
        self._scanner = StopScanner(stops)
        self._stop_token_ids = frozenset(model.stop_token_ids)
        self._waiting: deque[tuple[int, Generated]] = deque()
        """Tokens not yet out, each with the count of characters that must be out before it may be."""
        self._characters = 0
        """Characters that the tokens so far have completed."""
        self._shown = 0
        """Characters that are out."""
        self.stop: str | None = None
        """The stop string that ended the answer; nothing comes out after it."""

    def push(self, token: Generated) -> TextDelta:
        """What `token` lets out. A stop token is the end's sign and no part of the answer."""
        if self.stop is not None or token.token_id in self._stop_token_ids:
            return TextDelta("")
        text = self._detokeniser.push(token.token_id)
        self._characters += len(text)
        self._waiting.append((self._characters + self._detokeniser.unfinished, token))
        scanned = self._scanner.push(text)
        self.stop = scanned.stop
        return self._let_out(scanned.text)

    def finish(self) -> TextDelta:
        """The answer ended by itself: what was held back."""
        if self.stop is not None:
            return TextDelta("")
        text = self._detokeniser.flush()
        self._characters += len(text)
        scanned = self._scanner.push(text)
        self.stop = scanned.stop
        return self._let_out(scanned.text + ("" if scanned.stop else self._scanner.flush()))

    def _let_out(self, text: str) -> TextDelta:
        self._shown += len(text)
        out: list[Generated] = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            out.append(self._waiting.popleft()[1])
        return TextDelta(text, tuple(out))
