"""Whether a directory is a model that mlx-lm can run, and that needs no code of its own.

Asked of every model before it enters the store, whatever its source. All questions are answered
from file names, config and tensor headers: milliseconds, also for hundreds of gigabytes.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshinfer.base.errors import BadInput
from meshinfer.models.filenames import (
    CONFIG,
    TOKENIZER,
    WEIGHTS_PATTERN,
    is_model_file,
    is_pickle,
    is_weights,
)
from meshinfer.models.json_file import read_json
from meshinfer.models.tensors import check_index, read_tensor_headers

_MODEL_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""It becomes a file's name."""


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
    if "model_file" in config:
        raise BadInput(
            f"{where} wants to run its own code ({str(config['model_file'])[:80]!r})",
            expected="an architecture that mlx-lm implements; code that comes with a model is never run",
            do="take a conversion of it that needs none",
        )
    if not isinstance(model_type, str):
        raise BadInput(
            f"{where} names no model_type in its {CONFIG} (it names the model type {model_type!r:.80})",
            expected="an mlx-lm model",
        )
    if not is_supported(model_type):
        remote = " and wants to run Python code of its repository (auto_map)" if config.get("auto_map") else ""
        raise BadInput(
            f"{where} names the model type {model_type[:64]!r}, which mlx-lm does not implement{remote}",
            expected="one of mlx-lm's architectures; code that comes with a model is never run",
            do="`meshinfer models list` shows models that are known to run",
        )


def is_supported(model_type: str) -> bool:
    """Whether the installed mlx-lm has this architecture. Looks at its files; importing it would load MLX."""
    module = _remapped().get(model_type, model_type)
    return _MODEL_TYPE.fullmatch(module) is not None and _is_architecture(module)


def model_files(directory: Path) -> list[Path]:
    """The files of a directory that belong to a model, by name."""
    return sorted(path for path in directory.iterdir() if is_model_file(path.name) and path.is_file())


def _check_weights(directory: Path, names: list[str]) -> None:
    check_index(directory, {name: [tensor.name for tensor in read_tensor_headers(directory / name)] for name in names})


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


@cache
def _is_architecture(module: str) -> bool:
    """Whether mlx-lm's file of this name has the two classes that make it one; others hold what models share."""
    for place in _mlx_lm():
        file = place / "models" / f"{module}.py"
        if file.is_file():
            named: set[str] = set()
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    named.add(node.name)
                elif isinstance(node, ast.ImportFrom):
                    named.update(alias.asname or alias.name for alias in node.names)
            return {"Model", "ModelArgs"} <= named
    return False
