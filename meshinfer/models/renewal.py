"""Models that an older version took in are described anew by this one: their files are fine, only the card says less.

A card without a kind of weights was written before planners asked for one; no measured speed applies to it, so plans
for it rest on guesses. The engine reads the headers once more (and all bytes, for the digest, which must come out the
same), in a process of its own and in the background: the model serves meanwhile with the card that it has.
"""

from __future__ import annotations

import logging
import threading

import trio

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import ModelId
from meshinfer.models.engine_jobs import Describe, describe
from meshinfer.models.progress import Stopped, Watch
from meshinfer.models.store import ModelStore
from meshinfer.planning.model_card import ModelCard

log = logging.getLogger(__name__)


def is_outdated(card: ModelCard) -> bool:
    return not card.weight_kind


def renew_all(store: ModelStore, watch: Watch, describe: Describe = describe) -> tuple[ModelId, ...]:
    """Describe whatever is outdated in `store`; returns what now has a new card. Blocks. Raises Stopped."""
    renewed: list[ModelId] = []
    for model in store.held():
        try:
            manifest = store.manifest(model.model_id)
            if manifest is None or not is_outdated(manifest.info.card):
                continue
            log.info("%s was taken in by %s; describing it anew", model.model_id, manifest.made_by)
            store.renew(model.model_id, describe, watch)
        except Stopped:
            raise
        except (MeshinferError, OSError) as error:
            log.warning("%s keeps its old description: %s", model.model_id, error)
        else:
            renewed.append(model.model_id)
    return tuple(renewed)


async def keep_renewed(store: ModelStore) -> None:
    """`renew_all` in a thread that ends soon after this is cancelled."""
    over = threading.Event()
    try:
        await trio.to_thread.run_sync(renew_all, store, Watch(should_stop=over.is_set), abandon_on_cancel=True)
    finally:
        over.set()
