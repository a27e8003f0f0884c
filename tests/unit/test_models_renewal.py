"""Models that an older version took in get the card that this one writes; nobody pulls them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshinfer.base.errors import CorruptModel
from meshinfer.base.ids import ModelId
from meshinfer.models.progress import Stopped, Watch
from meshinfer.models.pull import pull
from meshinfer.models.renewal import renew_all
from meshinfer.models.store import ModelStore
from meshinfer.planning.model_card import ModelCard
from meshinfer.testing.tiny_model import describe_tiny, write_tiny_model

OLD, NEW = ModelId("owner/old"), ModelId("owner/new")


def describe_whole(directory: Path, model_id: ModelId, watch: Watch) -> ModelCard:
    return replace(describe_tiny(directory, model_id, watch), weight_kind="float32", head_kind="float32")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    store = ModelStore(tmp_path / "models")
    files = str(write_tiny_model(tmp_path / "tiny"))
    pull(files, store, lambda _: None, OLD, describe=describe_tiny)
    pull(files, store, lambda _: None, NEW, describe=describe_whole)
    return store


def card_of(store: ModelStore, model_id: ModelId) -> ModelCard:
    info = store.info(model_id)
    assert info is not None
    return info.card


def test_what_says_too_little_is_described_anew_once(store: ModelStore) -> None:
    before = card_of(store, OLD)
    held = store.held()
    assert renew_all(store, Watch(), describe_whole) == (OLD,)
    assert card_of(store, OLD) == replace(before, weight_kind="float32", head_kind="float32")
    assert card_of(ModelStore(store.root), OLD).weight_kind == "float32", "it is on disk"
    assert store.held() == held, "the same model to everyone else"
    assert renew_all(store, Watch(), describe_whole) == ()


def test_files_that_are_not_what_they_were_keep_their_card(store: ModelStore) -> None:
    before = card_of(store, OLD)
    write_tiny_model(store.path(OLD), fill=b"\1")
    with pytest.raises(CorruptModel, match="digest"):
        store.renew(OLD, describe_whole, Watch())
    assert renew_all(store, Watch(), describe_whole) == ()
    assert card_of(store, OLD) == before


def test_an_agent_that_ends_stops_it(store: ModelStore) -> None:
    with pytest.raises(Stopped):
        renew_all(store, Watch(should_stop=lambda: True), describe_whole)
    assert card_of(store, OLD).weight_kind == ""
