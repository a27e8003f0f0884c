"""Where models come from: one file per source.

A source has `fill(staging, watch)`: it calls `staging.begin` with its own name and revision, brings
the model's files into `staging.files`, goes on from what an earlier attempt left there, and returns
the sha256 by file name where its origin promises one. What it brought is checked by the store.
"""

from __future__ import annotations

from typing import Protocol

from meshinfer.base.ids import ModelId
from meshinfer.models.progress import Watch
from meshinfer.models.store import Staging


class Source(Protocol):
    """One model at one origin."""

    @property
    def model_id(self) -> ModelId: ...

    def fill(self, staging: Staging, watch: Watch) -> dict[str, str]: ...
