"""Which files a model consists of: one flat directory, by a closed list of kinds.

The list holds what mlx-lm reads and nothing that runs: safetensors, JSON, templates, vocabularies.
Pickled weights and Python files never enter a store, whoever offers them, and since a name has no
slash and starts with a letter or digit, no name can lead out of the directory it is joined to.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
MANIFEST = "meshinfer.json"

WEIGHTS_PATTERN = "model*.safetensors"
"""What mlx-lm loads. Other safetensors of a repository (`consolidated…`, adapters) hold the same weights twice."""

TEXT_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    CONFIG,
)
"""What an origin needs to turn text into ids and back, without the weights."""

KINDS = (WEIGHTS_PATTERN, "*.json", "*.jinja", "*.txt", "*.tiktoken", "tokenizer.model")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def is_model_file(name: str) -> bool:
    """Whether a file of this name belongs in a model's directory."""
    return (
        _NAME.fullmatch(name) is not None
        and name.casefold() != MANIFEST
        and any(fnmatchcase(name, kind) for kind in KINDS)
    )


def is_weights(name: str) -> bool:
    """Whether the file holds tensors."""
    return fnmatchcase(name, WEIGHTS_PATTERN)


def is_pickle(name: str) -> bool:
    """Whether reading the file as weights would run code that it carries."""
    return any(fnmatchcase(name.casefold(), kind) for kind in _PICKLES)
