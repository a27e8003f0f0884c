"""A model's text side is loaded once, and forgotten when others are in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from meshinfer.base.errors import CorruptModel
from meshinfer.serving.text_library import KEPT, TextLibrary
from meshinfer.testing.text import write_tiny_text


async def test_many_at_once_load_it_once(tmp_path: Path):
    directory, library, found = write_tiny_text(tmp_path / "m"), TextLibrary(), []

    async def get() -> None:
        found.append(await library.get(directory))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(get)
    assert len(set(map(id, found))) == 1


async def test_a_model_that_was_pulled_again_is_read_again(tmp_path: Path):
    directory, library = write_tiny_text(tmp_path / "m"), TextLibrary()
    first = await library.get(directory)
    os.utime(directory / "tokenizer.json", ns=(1, 1))
    assert await library.get(directory) is not first


async def test_the_least_recently_used_is_forgotten(tmp_path: Path):
    library = TextLibrary()
    directories = [write_tiny_text(tmp_path / str(index)) for index in range(KEPT + 1)]
    first = [await library.get(directory) for directory in directories[:KEPT]]
    assert await library.get(directories[0]) is first[0]
    await library.get(directories[KEPT])
    assert await library.get(directories[0]) is first[0]
    assert await library.get(directories[1]) is not first[1]


async def test_a_failure_is_not_remembered(tmp_path: Path):
    library = TextLibrary()
    with pytest.raises(CorruptModel):
        await library.get(tmp_path / "m")
    write_tiny_text(tmp_path / "m")
    assert (await library.get(tmp_path / "m")).render_chat([{"role": "user", "content": "x"}])
