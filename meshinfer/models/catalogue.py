"""What can be run: the models that are here, and some that are known to run and can be pulled.

The list of known ones is short on purpose: one to try with, and for each size of room a model or two
that people ask for. Any other repository of the hub in mlx-lm's format is pulled by its full name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from meshinfer.base.errors import UnknownModel
from meshinfer.base.ids import ModelId, parse_model_id
from meshinfer.models.store import ModelStore

NAMED_MODELS = 8
"""In an error; more are no help."""
SMOLLM2_ID = ModelId("smollm2-135m")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be pulled by a short name."""

    alias: str
    model_id: ModelId
    size_bytes: int
    """About; the exact size is known once it is here."""
    about: str


KNOWN = (
    KnownModel("smollm2-135m", SMOLLM2_ID, 117_000_000, "for a first try; from the package index, no hub needed"),
    KnownModel("qwen3-0.6b", ModelId("mlx-community/Qwen3-0.6B-4bit"), 343_000_000, "small, thinks, uses tools"),
    KnownModel(
        "llama-3.2-3b", ModelId("mlx-community/Llama-3.2-3B-Instruct-4bit"), 1_860_000_000, "for one laptop of 8 GB"
    ),
    KnownModel(
        "llama-3.1-8b", ModelId("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"), 4_640_000_000, "for one of 16 GB"
    ),
    KnownModel(
        "qwen3-30b-a3b",
        ModelId("mlx-community/Qwen3-30B-A3B-4bit"),
        17_600_000_000,
        "fast for its size (3B active); one of 32 GB, or three of 16",
    ),
    KnownModel(
        "llama-3.3-70b", ModelId("mlx-community/Llama-3.3-70B-Instruct-4bit"), 40_700_000_000, "four laptops of 16 GB"
    ),
    KnownModel(
        "qwen3-235b-a22b",
        ModelId("mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit"),
        142_000_000_000,
        "a room of them (22B active)",
    ),
)

_BY_NAME = {name.casefold(): known for known in KNOWN for name in (known.alias, known.model_id)}


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One line of `meshinfer models list`."""

    model_id: ModelId
    alias: str
    """Empty if there is none."""
    held: bool
    """Whole and verified on this node; else it can be pulled."""
    size_bytes: int
    """About, where it is not held; 0 where it is not known."""
    about: str
    partial_bytes: int = 0
    """On disk of a pull that runs or was broken off; pulling again goes on, `rm` frees them."""


def catalogue(store: ModelStore) -> tuple[CatalogueEntry, ...]:
    """The models of this node, then those half here, then others that it could pull, smallest first."""
    held, partial = {model.model_id: model for model in store.held()}, store.unfinished()
    here: list[CatalogueEntry] = []
    for model_id, model in held.items():
        known = _BY_NAME.get(model_id.casefold())
        alias, about = (known.alias, known.about) if known else ("", _origin(store, model_id))
        here.append(CatalogueEntry(model_id, alias, held=True, size_bytes=model.file_bytes, about=about))
    could = [
        CatalogueEntry(
            known.model_id,
            known.alias,
            held=False,
            size_bytes=known.size_bytes,
            about=known.about,
            partial_bytes=partial.pop(known.model_id, 0),
        )
        for known in KNOWN
        if known.model_id not in held
    ]
    others = [
        CatalogueEntry(model_id, "", held=False, size_bytes=0, about="half pulled", partial_bytes=partial_bytes)
        for model_id, partial_bytes in partial.items()
        if model_id not in held
    ]
    return (*here, *others, *could)


def parse_model_name(text: str) -> ModelId:
    """The id of the model that a person or a client names: by a short name of the list above, or by its id.

    Raises:
        BadInput: not a model id.
    """
    known = _BY_NAME.get(text.casefold())
    return known.model_id if known else parse_model_id(text)


def resolve(text: str, store: ModelStore | None = None) -> ModelId:
    """The model that a person means: an alias, a model held here, or a full `owner/name`.

    Raises:
        BadInput: not a model id.
        UnknownModel: a short name that is none of ours, with the nearest ones.
    """
    model_id = parse_model_name(text)
    held = [model.model_id for model in store.held()] if store else []
    if model_id in held or "/" in model_id or text.casefold() in _BY_NAME:
        return model_id
    names = {name.casefold(): name for name in (*held, *(known.alias for known in KNOWN))}
    near = [names[match] for match in get_close_matches(text.casefold(), list(names), n=3, cutoff=0.4)]
    raise UnknownModel(
        f"no model is called {text!r}",
        expected=f"perhaps {' or '.join(near)}" if near else "`owner/name` of the hub, or a name of the list",
        do="`meshinfer models list` shows the names",
    )


def not_in_mesh(model_id: ModelId, held: Iterable[ModelId]) -> UnknownModel:
    """For whoever asks for a model that no live node holds: which ones are `held`, and how this one would come here."""
    names = sorted(set(held))
    more = f" or {len(names) - NAMED_MODELS} more" if len(names) > NAMED_MODELS else ""
    can_be_pulled = "/" in model_id or model_id.casefold() in _BY_NAME
    return UnknownModel(
        f"no live node holds the model {model_id!r}",
        expected=f"one that is here: {', '.join(names[:NAMED_MODELS])}{more}" if names else "",
        do=f"run `meshinfer models pull {model_id}` on a node"
        if can_be_pulled
        else "`meshinfer models list` shows what there is and what can be pulled",
    )


def _origin(store: ModelStore, model_id: ModelId) -> str:
    manifest = store.manifest(model_id)
    return f"from {manifest.source}" if manifest else ""
