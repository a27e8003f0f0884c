"""Whether a directory is a model that mlx-lm can run, and that needs no code of its own.

Asked of every model before it enters the store, whatever its source. All questions are answered
from file names, config and tensor headers: milliseconds, also for hundreds of gigabytes.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.models.filenames import (
    CONFIG,
    TOKENIZER,
    WEIGHTS_INDEX,
    WEIGHTS_PATTERN,
    is_model_file,
    is_pickle,
    is_weights,
)
from meshinfer.models.tensors import read_tensor_headers

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Of a config or an index; the largest index known (DeepSeek, 90 000 tensors) has 9 MB."""


def check_model(directory: Path) -> None:
    """Config, tokenizer and weights are there and whole.

    Raises:
        BadInput: another kind of thing than what mlx-lm runs: no config or tokenizer, pickled weights
            only, or a model that needs Python code of its own.
        CorruptModel: a file is damaged or missing.
    """
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    if CONFIG not in names:
        raise BadInput(
            f"{directory} has no {CONFIG}", expected="an mlx-lm directory", do="name the directory that holds it"
        )
    check_config(read_json(directory / CONFIG), where=str(directory))
    check_names(names, where=str(directory))
    _check_weights(directory, [name for name in names if is_weights(name)])


def check_names(names: list[str], where: str) -> None:
    """What can be told from the names alone, so before anything is fetched.

    Raises:
        BadInput: no weights that we load, or no tokenizer.
    """
    if not any(is_weights(name) for name in names):
        pickles = [name for name in names if is_pickle(name)]
        why = f"only pickled weights ({', '.join(pickles[:3])}), which can run code" if pickles else "no weights"
        raise BadInput(
            f"{where} has {why}",
            expected=f"{WEIGHTS_PATTERN} as mlx-lm writes them",
            do="convert it first: `mlx_lm.convert --hf-path … --mlx-path …`",
        )
    if TOKENIZER not in names:
        raise BadInput(f"{where} has no {TOKENIZER}", expected="a fast tokenizer", do="save it with transformers once")


def check_config(config: dict[str, Any], where: str) -> None:
    """The architecture is one that mlx-lm implements.

    Raises:
        BadInput: it needs code from the repository, which we never run, or is unknown to mlx-lm.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput(f"the {CONFIG} of {where} names no model_type", expected="an mlx-lm model")
    if "model_file" in config:
        raise BadInput(
            f"{where} wants to run its own Python file {config['model_file']!r:.80}",
            expected="an architecture that mlx-lm implements; code that comes with a model is never run",
        )
    if not is_supported(model_type):
        remote = " and wants to run Python code of its repository (auto_map)" if config.get("auto_map") else ""
        raise BadInput(
            f"{where} has model_type {model_type[:64]!r}, which mlx-lm does not implement{remote}",
            expected="one of mlx-lm's architectures; code that comes with a model is never run",
            do="`meshinfer models list` shows models that are known to run",
        )


def is_supported(model_type: str) -> bool:
    """Whether the installed mlx-lm has this architecture. Looks at its files; importing it would load MLX."""
    module = _remapped().get(model_type, model_type)
    return module.isidentifier() and any((place / "models" / f"{module}.py").is_file() for place in _mlx_lm())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CorruptModel: not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")  # noqa: TRY301 - one message for all ways to be wrong
        value: Any = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise TypeError("not an object")  # noqa: TRY301
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptModel(
            f"{path.name} in {path.parent} is corrupt: {error}", expected="a JSON object", do="fetch this file again"
        ) from error
    return value


def model_files(directory: Path) -> list[Path]:
    """The files of a directory that belong to a model, by name."""
    return sorted(path for path in directory.iterdir() if is_model_file(path.name) and path.is_file())


def _check_weights(directory: Path, names: list[str]) -> None:
    for name in names:
        read_tensor_headers(directory / name)
    if not (directory / WEIGHTS_INDEX).is_file():
        return
    weight_map = read_json(directory / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptModel(f"{WEIGHTS_INDEX} in {directory} has no weight_map", do="fetch this file again")
    missing = sorted({str(name) for name in weight_map.values()} - set(names))
    if missing:
        raise CorruptModel(
            f"{missing[0][:128]} of {directory} is missing ({len(missing)} in all)",
            expected=f"every file that {WEIGHTS_INDEX} names",
            do="fetch the missing files",
        )


@cache
def _mlx_lm() -> tuple[Path, ...]:
    spec = find_spec("mlx_lm")
    return tuple(Path(place) for place in (spec.submodule_search_locations or ())) if spec else ()


@cache
def _remapped() -> dict[str, str]:
    """mlx-lm's table of model types that another one's code serves, read from its source text."""
    for place in _mlx_lm():
        for node in ast.parse((place / "utils.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and "MODEL_REMAPPING" in [ast.unparse(target) for target in node.targets]:
                return ast.literal_eval(node.value)
    return {}
