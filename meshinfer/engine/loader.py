"""From a directory to a seat: the model lazily, its layers resident, one warm-up step.

1. The headers of all files are checked (`engine.headers`); nothing of MLX has run yet.
2. mlx-lm builds the model with lazy parameters; files that are not here are holes.
3. On a CPU float parameters, quantisation scales too, become float32, lazily; packed products of many
   rows get BLAS (`engine.unpacking`).
4. The model becomes a `Stage`, and the graph of one step tells which parameters it reads: its layers',
   the embedding on the first stage, norm and head on the last (`engine.graph`).
5. Exactly those become resident, layer by layer, with progress reported; the rest is never read.
6. On a GPU one warm-up step runs, so that the first request does not pay for the kernels that are compiled then.
   A CPU compiles none: a first step takes as long as a second one there (measured: 0.38 and 0.43 s on a busy machine),
   and a lost seat is back 0.2 s sooner without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from meshinfer.base.errors import BadInput, CorruptModel
from meshinfer.engine.graph import LazyGraph
from meshinfer.engine.headers import checked_weight_files
from meshinfer.engine.stage import Stage
from meshinfer.engine.structure import Structure, arrays_in, layers_of
from meshinfer.engine.unpacking import unpack_for_many_rows
from meshinfer.models.filenames import CONFIG
from meshinfer.models.json_file import read_json
from meshinfer.models.soundness import check_config

Progress = Callable[[int, int, int], None]
"""Called with (loaded bytes, total bytes, bytes of the next layer) before the first one and after each."""

_WARM_UP_TOKENS = 2
"""More than one, so that the prefill's path is taken."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A stage that is ready to run."""

    stage: Stage
    model_type: str
    vocab_size: int
    """Ids below it may go in and come out; MLX checks none."""
    weight_bytes: int
    """Of the parameters that are resident."""


def load_seat(
    directory: Path,
    start: int,
    end: int | None,
    *,
    computes_float32: bool,
    progress: Progress = lambda _loaded, _total, _next: None,
) -> Seat:
    """Load layers `[start, end)` (to the last one, if None) of the model in `directory`.

    Raises:
        CorruptModel: a file is missing, cut short or not what it should be; it is named.
        NotSplittable: the model cannot be cut there.
    """
    model, config = open_model(directory)
    if computes_float32:
        model.set_dtype(mx.float32)
        unpack_for_many_rows(model)
    structure = Structure.probe(model)
    stage = Stage(model, start, structure.layer_count if end is None else end, structure)
    by_layer = _by_layer(model, parameters_read_by(stage))
    sizes = [sum(array.nbytes for array in group) for group in by_layer]
    total = sum(sizes)
    loaded, ahead = 0, [*sizes, 0]
    progress(loaded, total, ahead[0])
    for group, (size, following) in zip(by_layer, pairwise(ahead), strict=True):
        _read(directory, group)
        loaded += size
        progress(loaded, total, following)
    if not computes_float32:
        _warm_up(stage)
    # The float16 that the float32 came from, and the warm-up's buffers.
    mx.clear_cache()
    return Seat(stage, str(config["model_type"]), vocabulary_of(model, structure), total)


def open_model(directory: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model in `directory` with lazy parameters, as they are stored, and its config. Reads no tensor.

    Raises:
        CorruptModel: files or config are not a model that mlx-lm knows.
    """
    config = read_json(directory / CONFIG)
    _check_config(directory, config)
    checked_weight_files(directory)
    try:
        model, config = load_model(directory, lazy=True, strict=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ZeroDivisionError) as error:
        # mlx-lm reports whatever its code stumbles over when config and tensors do not fit together.
        reason = f"{type(error).__name__}: {str(error)[:400]}"
        raise CorruptModel(
            f"the model in {directory} cannot be built from its config and tensors ({reason})",
            expected=f"a model that mlx-lm {mlx_lm.__version__} can load",
            do="pull the model again, or take a conversion made for this version of mlx-lm",
        ) from error
    return model, config


def parameters_of(model: nn.Module) -> dict[str, mx.array]:
    """The model's parameters by path: `model.layers.3.mlp.up_proj.weight`."""
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def names_by_layer(model: nn.Module) -> list[frozenset[str]]:
    """Paths of each layer's parameters. Names, since some models replace a parameter while they run (gemma3n)."""
    name_of = {id(array): name for name, array in parameters_of(model).items()}
    return [frozenset(name_of[id(array)] for array in parameters_of(layer).values()) for layer in layers_of(model)]


def parameters_read_by(stage: Stage) -> dict[str, mx.array]:
    """Those of the model's parameters that a step of `stage` reads, learnt from the graph of one."""
    parameters = parameters_of(stage.model)
    cache = stage.make_cache()
    carried = [mx.zeros(spec.shape, getattr(mx, spec.dtype)) for spec in stage.carried_shapes(1, _WARM_UP_TOKENS)]
    outputs = stage(mx.zeros((1, _WARM_UP_TOKENS), mx.int32), carried, cache)
    results = [*arrays_in(outputs), *stage.state_arrays(cache)]
    read = LazyGraph(parameters, results).read_by(range(len(results)))
    return {name: array for name, array in parameters.items() if name in read}


def vocabulary_of(model: nn.Module, structure: Structure) -> int:
    """How many ids are safe both to look up in the embedding and to come out of the head."""
    modules: Any = model.modules()
    rows = [int(m.weight.shape[0]) for m in modules if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    # Models with several embeddings (per layer ones) guard the smaller ones themselves.
    return min(structure.logits_size, max(rows, default=structure.logits_size))


def _check_config(directory: Path, config: dict[str, Any]) -> None:
    try:
        check_config(config, where=str(directory))
    except BadInput as error:
        # The store refused such a model; one that has become it was changed, or is of another version's mlx-lm.
        raise CorruptModel(
            error.what,
            expected=f"a model that mlx-lm {mlx_lm.__version__} knows",
            do=error.do or "take another model, or a newer meshinfer",
        ) from error


def _by_layer(model: nn.Module, wanted: Mapping[str, mx.array]) -> list[list[mx.array]]:
    """The wanted parameters: first those that are of no layer, then one group per layer."""
    names = names_by_layer(model)
    inside: frozenset[str] = frozenset().union(*names)
    groups = [[array for name, array in wanted.items() if name not in inside]]
    groups += [[array for name, array in wanted.items() if name in own] for own in names]
    return [group for group in groups if group]


def _read(directory: Path, arrays: list[mx.array]) -> None:
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        # MLX's readers throw when a file changed or vanished since its header was checked.
        raise CorruptModel(
            f"the tensors in {directory} cannot be read ({error})", expected="files that do not change", do="try again"
        ) from error


def _warm_up(stage: Stage) -> None:
    cache = stage.make_cache()
    for length in (_WARM_UP_TOKENS, 1):
        stage.rehearse(length, cache)
