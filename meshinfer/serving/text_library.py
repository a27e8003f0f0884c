"""The text sides of the models in use, loaded once each."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path

import trio

from meshinfer.base.errors import DeadlineExceeded
from meshinfer.serving.text import TextModel

# A tokenizer of 256 k tokens takes ~100 MB; few nodes talk to more models at a time.
KEPT = 4

# Reading the largest tokenizer takes 1.5 s here; a busy old laptop may take ten times as long.
LOAD_SECONDS = 60.0


class TextLibrary:
    """`get` a model's text side; the least recently used ones are forgotten."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[Path, int], TextModel] = OrderedDict()
        """At most KEPT, most recently used last, by directory and the time its tokenizer was written."""
        self._loading = trio.Lock()
        """One at a time: two requests for one model load it once, and two models do not double the peak."""

    async def get(self, directory: Path) -> TextModel:
        """The text side of the model in `directory`.

        Raises:
            CorruptModel: see `TextModel.load`.
            DeadlineExceeded: the disk does not answer.
        """
        try:
            with trio.fail_after(LOAD_SECONDS):
                key = (directory, await trio.to_thread.run_sync(_written_ns, directory))
                async with self._loading:
                    if key not in self._models:
                        load = partial(TextModel.load, directory)
                        self._models[key] = await trio.to_thread.run_sync(load, abandon_on_cancel=True)
        except trio.TooSlowError:
            raise DeadlineExceeded(
                f"the tokenizer in {directory} was not read within {LOAD_SECONDS:.0f} s", do="look after the disk"
            ) from None
        self._models.move_to_end(key)
        found = self._models[key]
        while len(self._models) > KEPT:
            self._models.popitem(last=False)
        return found


def _written_ns(directory: Path) -> int:
    try:
        return (directory / "tokenizer.json").stat().st_mtime_ns
    except OSError:  # `load` says what is wrong
        return 0
