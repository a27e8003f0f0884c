"""Get a model, whatever it is called: a known alias, a hub repository, a directory, a GGUF file.

One function, for the command line and for the API. It blocks (minutes), so an event loop gives it a
thread; it shows its progress between chunks and can be stopped there, and the next pull goes on.
Peers are not a source here, since asking them is asynchronous: see `sources.peer`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.base.ids import ModelId, parse_model_id
from meshinfer.models.catalogue import SMOLLM2_ID, resolve
from meshinfer.models.engine_jobs import Describe, describe
from meshinfer.models.manifest import Manifest
from meshinfer.models.progress import Progress, Watch
from meshinfer.models.sources import Source
from meshinfer.models.sources.directory import DirectorySource
from meshinfer.models.sources.gguf import GgufSource
from meshinfer.models.sources.wheel import SMOLLM2, WheelSource
from meshinfer.models.store import ModelStore
from meshinfer.wire.messages import ModelInfo


def pull(
    what: str,
    store: ModelStore,
    progress: Callable[[Progress], None],
    as_id: str | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    wheel: Path | None = None,
    local: bool = True,
    describe: Describe = describe,
) -> ModelInfo:
    """The model `what`, complete and verified in `store`.

    `what` is an alias, `owner/name`, or a path (beginning with `/`, `./`, `../`, `~`, or ending in .gguf); `as_id`
    the id that the model is to have here, where `what` suggests none or another; `wheel` a copy of the small model's
    wheel. With `local` false, `what` is no path: for callers from the network, whose files these are not.

    Raises:
        BadInput, UnknownModel: there is no such model, or it cannot run here.
        CorruptModel: a file is damaged. PeerLost: the origin cannot be reached. NoRoom: the disk is full.
        Stopped: `should_stop` said so.
    """
    watch = Watch(progress, should_stop)
    source = source_for(what, store, as_id, wheel, local)
    with store.making(source.model_id, watch) as staging:
        if held := store.manifest(source.model_id):
            store.verify(source.model_id)
            _require_same(source, held)
            return held.info
        try:
            promised = source.fill(staging, watch)
            return store.publish(staging, promised, describe, watch)
        except (BadInput, CorruptModel):
            if isinstance(source, DirectorySource | GgufSource):
                staging.discard()  # what was linked or converted here is cheap to have again, and dear to forget about
            raise


def source_for(
    what: str, store: ModelStore, as_id: str | None = None, wheel: Path | None = None, local: bool = True
) -> Source:
    """Where `what` is to be had. See `pull`."""
    wanted = parse_model_id(as_id) if as_id else None
    if _is_path(what):
        if not local:
            raise BadInput(f"{what[:120]!r} is a path", expected="a name; files of this node are pulled on this node")
        path = Path(what).expanduser().resolve()
        is_gguf = path.suffix.casefold() == ".gguf"
        model_id = wanted or _id_from(path.stem if is_gguf else path.name)
        return GgufSource(model_id, path) if is_gguf else DirectorySource(model_id, path)
    model_id = resolve(what, store)
    if model_id == SMOLLM2_ID:
        return WheelSource(wanted or model_id, SMOLLM2, wheel)
    if wheel is not None:
        raise BadInput(f"a wheel for {model_id}", expected=f"one only for {SMOLLM2_ID}")
    if "/" not in model_id:
        raise BadInput(
            f"{model_id} is here under a name of its own, with no origin to pull it from",
            expected="`owner/name` of the hub, an alias, or a path",
        )
    from meshinfer.models.sources.hub import HubSource  # noqa: PLC0415 - its library takes 0.6 s to import

    return HubSource(wanted or model_id, model_id)


def _is_path(what: str) -> bool:
    """Written as a path. A bare `owner/name` never is one, whatever lies in the current directory."""
    return what.startswith(("/", "./", "../", "~")) or what in {".", ".."} or what.casefold().endswith(".gguf")


def _id_from(name: str) -> ModelId:
    try:
        return parse_model_id(name)
    except BadInput as error:
        raise BadInput(f"{name!r} cannot be the model's id here", do="name it: `--as owner/name`") from error


def _require_same(source: Source, held: Manifest) -> None:
    """Asking for a named path and getting another model would be a surprise."""
    if isinstance(source, DirectorySource | GgufSource):
        path = source.directory if isinstance(source, DirectorySource) else source.file
        if held.source.partition(" of ")[0].partition(" ")[2] != str(path):
            raise BadInput(
                f"{source.model_id} is here already, from {held.source}",
                expected="another id for another model",
                do=f"pull it `--as owner/name`, or `meshinfer models rm {source.model_id}` first",
            )
