"""The manifest of a held model, `meshinfer.json`: which files it consists of, and what they must be.

It is written last, so its presence says that all the others were verified. It is also what a node
tells its peers of a model (`ModelInfo`), and what they are told is checked here again: a peer may
be mistaken or lie, and its file names end up in paths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from meshinfer.base.bounds import between, sized
from meshinfer.base.errors import CorruptModel, ProtocolError
from meshinfer.base.ids import ModelId, parse_model_id
from meshinfer.models.filenames import CONFIG, TEXT_FILES, TOKENIZER, is_model_file, is_weights
from meshinfer.wire.messages import ModelFile, ModelInfo

FORMAT = 1
MAX_TEXT_BYTES = 256 * 1024 * 1024
"""Of all text files of a model together; the largest tokenizers have 40 MB."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete, verified model."""

    format: Annotated[int, between(1, FORMAT)]
    made_by: Annotated[str, sized(1, 64)]
    """The version of meshinfer that took it in."""
    source: Annotated[str, sized(1, 4096)]
    """Where it came from, with the revision where there is one."""
    info: ModelInfo

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.info.files)


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(text: bytes, where: str) -> Manifest:
    """The manifest in `text`.

    Raises:
        CorruptModel: it is not one, or lists what no manifest may.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest, strict=True)
        check_info(manifest.info, manifest.info.card.model_id)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ProtocolError) as error:
        raise CorruptModel(
            f"the manifest in {where} is damaged: {error}", do=f"delete {where} and pull the model again"
        ) from error
    return manifest


def check_info(info: ModelInfo, model_id: ModelId) -> None:
    """What a peer (or a file on disk) says of a model can be believed enough to fetch it.

    Raises:
        ProtocolError: another model, a name that is no model file, a name twice, a digest that is none.
    """
    if info.card.model_id != model_id:
        raise ProtocolError(f"the description of model {info.card.model_id!r:.200}", expected=f"that of {model_id!r}")
    parse_model_id(info.card.model_id)
    names = [file.name for file in info.files]
    for file in info.files:
        if not is_model_file(file.name):
            raise ProtocolError(f"{file.name!r} among the files of {model_id}", expected="a plain name of a model file")
        if not _SHA256.fullmatch(file.sha256):
            raise ProtocolError(f"{file.sha256!r} as the sha256 of {file.name}", expected="64 hex digits")
    # Compared without case: on a Mac's disk `A.json` and `a.json` are one file.
    if len({name.casefold() for name in names}) != len(names):
        raise ProtocolError(f"a file listed twice for {model_id}", expected="each once")
    if CONFIG not in names or TOKENIZER not in names or not any(is_weights(name) for name in names):
        raise ProtocolError(f"the files {names[:8]} for {model_id}", expected=f"{CONFIG}, {TOKENIZER} and weights")
    text_bytes = sum(file.size_bytes for file in text_files(info))
    if text_bytes > MAX_TEXT_BYTES:
        raise ProtocolError(f"{text_bytes} bytes of text files for {model_id}", expected=f"at most {MAX_TEXT_BYTES}")


def text_files(info: ModelInfo) -> tuple[ModelFile, ...]:
    """The files that an origin needs, without the weights."""
    return tuple(file for file in info.files if file.name in TEXT_FILES)
