"""A model file that is not what it was: said clearly, not tried for ever, and mended by pulling again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from mesh import FRANCE, MODEL, Room, ask, get, instances, room, wait_until


@pytest.fixture
def mesh(tmp_path: Path, model_store: Path) -> Iterator[Room]:
    own_store = tmp_path / "store"
    shutil.copytree(model_store, own_store)
    with room(tmp_path, own_store, ("solo",), "--memory", "1GiB", "--no-discovery") as here:
        yield here


def test_a_truncated_file_is_named_with_what_to_do(mesh: Room) -> None:
    weights = next((mesh.directory / "store").glob("*/model.safetensors"))
    whole = weights.stat().st_size
    os.truncate(weights, whole // 2)

    with pytest.raises(openai.APIStatusError) as refused:
        ask(mesh.url("solo"), FRANCE)

    assert refused.value.status_code == 500
    said = str(refused.value)
    assert "model.safetensors" in said
    assert str(whole // 2) in said
    assert f"meshinfer models rm {MODEL}" in said
    assert get(mesh.url("solo"), "/healthz")
    wait_until(lambda: not mesh.runners("solo"), 20, "no runner is left")
    node = next(iter(get(mesh.url("solo"), "/topology")["nodes"].values()))
    assert node["memory_free_bytes"] == node["memory_bytes"]
    wait_until(lambda: all(i["state"] == "broken" for i in instances(mesh.url("solo"))), 20, "nothing is served")


def test_nonsense_in_a_header_is_no_crash(mesh: Room) -> None:
    weights = next((mesh.directory / "store").glob("*/model.safetensors"))
    with weights.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 64)

    with pytest.raises(openai.APIStatusError, match="safetensors"):
        ask(mesh.url("solo"), FRANCE)
