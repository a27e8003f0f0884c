"""A model's card, from its files alone: no weight is read.

Three things are asked of the lazily loaded model, none of them by name:
- its structure: where it can be cut, what crosses a cut (`engine.structure`);
- which parameters the first, a middle and the last stage would read (`engine.graph`): what is not of a
  layer is the embedding, the head, both (tied), or needed by every stage (embeddings fed to each layer);
- what its caches hold after three tokens, lazily: their shapes tell what a token costs in each layer, and
  what a session costs however long it is.
The modules of a layer then tell which of its weights a token visits: all, or some experts of many.
Whether a tensor is packed or float, and how large, is what the model itself has after mlx-lm renamed,
merged and quantised, so the card speaks of what will be resident.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from meshinfer.base.errors import BadInput
from meshinfer.base.ids import ModelId
from meshinfer.engine.headers import checked_weight_files
from meshinfer.engine.loader import names_by_layer, open_model, parameters_read_by, vocabulary_of
from meshinfer.engine.stage import Stage
from meshinfer.engine.structure import Structure, arrays_in, dtype_name, layers_of
from meshinfer.models.digests import sha256_of
from meshinfer.models.progress import Watch
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes

_PROBE_TOKENS = 3
_SCAN_FLOPS = 6
"""Of a state-space scan, per element of its state and token: decay, input and output, each a product and a sum."""
# State-space models have no limit of their own; a card needs a number.
_UNBOUNDED_CONTEXT = 2**20


def describe_model(directory: Path, model_id: ModelId) -> ModelCard:
    """The card of the model in `directory`.

    Args:
        directory: with config.json and safetensors files.
        model_id: what the model is called.

    Raises:
        CorruptModel: a file is missing, cut short or not what it should be; it is named.
        NotSplittable: the model cannot be followed, so it cannot even be one stage.
    """
    files = checked_weight_files(directory)
    model, config = open_model(directory)
    structure = Structure.probe(model)
    shares = _shares(model, structure)
    boundaries = [structure.carried_arrays[cut] for cut in structure.cut_points]
    text = _text_config(config)
    hidden = _integer(text, "hidden_size", "n_embd", "d_model", "hidden_dim", "dim", "model_dim")
    vocabulary = vocabulary_of(model, structure)
    return ModelCard(
        model_id=model_id,
        digest=digest_of(directory, files),
        model_type=str(config["model_type"]),
        hidden_size=hidden,
        vocab_size=vocabulary,
        max_context_tokens=_integer(
            text, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx", "block_size"
        )
        or _UNBOUNDED_CONTEXT,
        layers=_layer_cards(model, structure, shares.layers, text),
        cut_points=structure.cut_points,
        embedding=_bytes(shares.first),
        head=_bytes(shares.last),
        tied_embeddings=shares.tied,
        activation_elements_per_token=max(
            (sum(math.prod(axis for axis in array.axes if isinstance(axis, int)) for array in b) for b in boundaries),
            default=0,
        ),
        float_bytes_per_element=structure.float_dtype.size,
        intermediate_size=_visited_width(text),
        attention_heads=_integer(text, "num_attention_heads", "n_head", "n_heads", "num_heads"),
        every_stage=_bytes(shares.everywhere),
        weight_kind=_kind(model, itertools.chain(*shares.layers)),
        # Tied output weights are the embedding; else the head is by far the larger part of what only the last stage has.
        head_kind=_kind(model, shares.first if shares.tied or not shares.last else shares.last),
        head_flops_per_token=2 * structure.logits_size * hidden,
        embedding_row=_per(_bytes(shares.first), vocabulary),
        tensor_degrees=tensor_degrees(model, text),
    )


def digest_of(directory: Path, files: Iterable[Path]) -> str:
    """SHA-256 in hex over config.json and the SHA-256 of each tensor file, in the order given."""
    state = hashlib.sha256((directory / "config.json").read_bytes())
    for file in files:
        state.update(f"\n{file.name} {sha256_of(file, Watch())}".encode())
    return state.hexdigest()


# --- who holds what -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shares:
    """Parameters by who needs them; each stands in one place."""

    layers: tuple[tuple[mx.array, ...], ...]
    first: tuple[mx.array, ...]
    last: tuple[mx.array, ...]
    everywhere: tuple[mx.array, ...]
    tied: bool


def _shares(model: nn.Module, structure: Structure) -> _Shares:
    cuts = structure.cut_points
    # Three stages (first, middle, last), or fewer where the model allows no more.
    bounds = [0, *sorted({cuts[0], cuts[-1]}), structure.layer_count] if cuts else [0, structure.layer_count]
    read: list[dict[str, mx.array]] = []
    for start, end in itertools.pairwise(bounds):
        stage = Stage(model, start, end, structure)
        try:
            read.append(parameters_read_by(stage))
        finally:
            stage.release()
    used = {name: array for stage in read for name, array in stage.items()}
    names = names_by_layer(model)
    layers = tuple(tuple(array for name, array in used.items() if name in own) for own in names)
    inside: frozenset[str] = frozenset().union(*names)
    outside = [stage.keys() - inside for stage in read]
    everywhere: set[str] = set().union(*outside[1:-1])
    first, last = outside[0] - everywhere, (outside[-1] - everywhere if cuts else set[str]())
    return _Shares(
        layers,
        first=tuple(used[name] for name in sorted(first)),
        last=tuple(used[name] for name in sorted(last - first)),
        everywhere=tuple(used[name] for name in sorted(everywhere)),
        tied=bool(first & last),
    )


def _bytes(arrays: Iterable[mx.array]) -> TensorBytes:
    packed = elements = float_bytes = 0
    for array in arrays:
        if mx.issubdtype(array.dtype, mx.floating):
            elements, float_bytes = elements + array.size, float_bytes + array.nbytes
        else:
            packed += array.nbytes
    return TensorBytes(packed, elements, float_bytes)


def _kind(model: nn.Module, arrays: Iterable[mx.array]) -> str:
    """How most bytes of `arrays` are stored; scales count with what they belong to. Empty if there are none."""
    packed: dict[int, str] = {}
    for module in model.modules():
        mode, bits, group = (getattr(module, name, None) for name in ("mode", "bits", "group_size"))
        if isinstance(mode, str) and bits and group:
            kind = f"q{bits}g{group}" if mode == "affine" else mode
            packed.update((id(module[name]), kind) for name in ("weight", "scales", "biases") if name in module)
    totals: dict[str, int] = {}
    for array in arrays:
        kind = packed.get(id(array)) or dtype_name(array.dtype)
        totals[kind] = totals.get(kind, 0) + array.nbytes
    return max(totals, key=lambda kind: (totals[kind], kind), default="")[:32]


# --- what a session costs -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CacheCost:
    """Elements, for one sequence."""

    per_token: int = 0
    tokens_limit: int = 0
    """0: none."""
    state: int = 0
    widths: int = 0
    """Of one head's key and value together."""

    def __add__(self, other: _CacheCost) -> _CacheCost:
        # A layer whose caches have different limits is held to none: too much rather than too little.
        limits = {cost.tokens_limit for cost in (self, other) if cost.per_token}
        limit = max(limits) if 0 not in limits and limits else 0
        return _CacheCost(self.per_token + other.per_token, limit, self.state + other.state, self.widths + other.widths)


def _layer_cards(
    model: nn.Module, structure: Structure, weights: Iterable[tuple[mx.array, ...]], text: Mapping[str, Any]
) -> tuple[LayerCard, ...]:
    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=cache)
    heads = _integer(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    # Latent attention (deepseek) scores against latent and rotary part, and sums up latents: the latent counts twice.
    latent = _integer(text, "kv_lora_rank")
    charged: set[int] = set()
    cards: list[LayerCard] = []
    for wiring, layer, arrays in zip(structure.layers, layers_of(model), weights, strict=True):
        # A cache that several layers share is charged to the first; no cut falls between them.
        new = [index for index in wiring.cache_indices if index not in charged]
        charged.update(new)
        cost = sum((_cost(cache[index]) for index in new), start=_CacheCost())
        seen = sum((_cost(cache[index]) for index in wiring.cache_indices), start=_CacheCost())
        work = _work(layer, _visited_experts(text))
        cards.append(
            LayerCard(
                _bytes(arrays),
                cost.per_token,
                cost.tokens_limit,
                cost.state,
                flops_per_token=2 * work.visited_elements + _SCAN_FLOPS * seen.state,
                attention_flops_per_pair=2 * heads * (seen.widths + latent) if seen.widths else 0,
                experts=work.experts,
                experts_per_token=work.experts_per_token,
                expert=work.expert,
            )
        )
    return tuple(cards)


@dataclass(frozen=True, slots=True)
class _Work:
    """A layer's weights, as a token meets them."""

    visited_elements: int
    experts: int = 0
    experts_per_token: int = 0
    expert: TensorBytes = field(default_factory=TensorBytes)


def _work(layer: nn.Module, visited: int) -> _Work:
    """Of one layer; `visited` experts per token, as the config has it, 0 where it does not say."""
    elements = experts = chosen = 0
    of_experts: list[mx.array] = []
    for module in layer.modules():
        if "weight" not in module or (weight := module["weight"]).ndim < 2:
            continue  # norms and biases: a thousandth of the work
        # A packed weight has as many elements as its scales have groups of them.
        count = module["scales"].size * module.group_size if "scales" in module else weight.size
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            experts = int(weight.shape[0])
            # Where nothing says how many are visited, all are: too slow rather than too fast.
            chosen = min(visited or experts, experts)
            elements += count // experts * chosen
            of_experts += [module[name] for name in ("weight", "scales", "biases", "bias") if name in module]
        else:
            elements += count
    return _Work(elements, experts, chosen, _per(_bytes(of_experts), experts))


def _per(whole: TensorBytes, parts: int) -> TensorBytes:
    parts = max(1, parts)
    return TensorBytes(whole.packed_bytes // parts, whole.float_elements // parts, whole.float_bytes // parts)


def tensor_degrees(model: nn.Module, text: Mapping[str, Any]) -> tuple[int, ...]:
    """Ranks into which mlx-lm can shard the model's layers: they divide heads, widths, and groups of packed weights."""
    if not hasattr(model, "shard"):
        return ()
    heads = _integer(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _integer(text, "num_key_value_heads") or heads
    hidden = _integer(text, "hidden_size", "n_embd", "d_model")
    widths = [
        _integer(text, "intermediate_size", "ffn_hidden_size", "ffn_dim"),
        _integer(text, "moe_intermediate_size", "expert_ffn_hidden_size"),
        heads * (_integer(text, "v_head_dim", "head_dim") or hidden // max(1, heads)),
    ]
    group = max((module.group_size for module in model.modules() if "scales" in module), default=1)
    return tuple(
        ranks
        for ranks in range(2, 65)
        if heads
        and heads % ranks == kv_heads % ranks == 0
        and all(width % (ranks * group) == 0 for width in widths if width)
    )


def _cost(entry: Any) -> _CacheCost:
    if isinstance(entry, caches.CacheList):
        return sum((_cost(part) for part in entry.caches), start=_CacheCost())
    if isinstance(entry, caches.ArraysCache):
        return _CacheCost(state=sum(array.size for array in arrays_in(entry.cache)))
    if hasattr(entry, "keys") and hasattr(entry, "values"):
        limit = getattr(entry, "max_size", None) or getattr(entry, "chunk_size", None) or 0
        # [batch, heads, tokens, width]; the token axis is allocated in blocks.
        arrays = list(arrays_in([entry.keys, entry.values]))
        return _CacheCost(
            sum(array.size // array.shape[2] for array in arrays),
            int(limit),
            widths=sum(array.shape[3] for array in arrays),
        )
    raise BadInput(
        f"a cache of the kind {type(entry).__name__}",
        expected="one of mlx-lm's key-value or state caches",
        do="report the model: its memory cannot be planned",
    )


# --- the config -----------------------------------------------------------------------------------


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the config that speaks of the language model; models that also see keep it apart."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _integer(config: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is a positive whole number; 0 if none is."""
    return next((value for name in names if type(value := config.get(name)) is int and value > 0), 0)


def _visited_width(config: Mapping[str, Any]) -> int:
    """Width that one token has inside the widest MLP, over all experts that it visits; 0 if the config does not say."""
    dense = _integer(config, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
    expert = _integer(config, "moe_intermediate_size", "expert_ffn_hidden_size") or dense
    visited = _visited_experts(config)
    shared = _integer(config, "n_shared_experts", "num_shared_experts")
    return max(dense, expert * (visited + shared))


def _visited_experts(config: Mapping[str, Any]) -> int:
    return _integer(
        config,
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    )
