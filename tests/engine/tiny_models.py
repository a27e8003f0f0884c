"""Tiny random models of every structural family that mlx-lm has, for tests on a CPU in seconds.

Each is mlx-lm's own class with sizes of some dozens; what differs is what a split could get wrong: which
caches there are, what masks look at, what crosses from layer to layer.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

VOCABULARY = 97

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 5, "intermediate_size": 64, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5, "rope_theta": 1000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_proj_bias": False, "ssm_state_size": 16, "conv_kernel": 3,
    "n_groups": 2, "use_bias": False, "use_conv_bias": True, "time_step_limit": [0.01, 10.0],
}  # fmt: skip
_WINDOW = 6
"""Shorter than the test's prompts, so that a window that is off by a token shows."""
_SLIDING, _FULL = "sliding_attention", "full_attention"

CONFIGS: dict[str, dict[str, Any]] = {
    # --- dense
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {},
    "gpt2": {"n_ctx": 512, "n_embd": 32, "n_head": 4, "n_layer": 5, "n_positions": 512},
    # --- sliding window
    "llama-sliding": {
        "model_type": "llama", "sliding_window": _WINDOW, "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL, _SLIDING],
    },
    "gemma3_text": {
        "sliding_window": _WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 8, "num_hidden_layers": 7,
    },
    "gpt_oss": {
        **_EXPERTS, "sliding_window": _WINDOW, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
        "num_hidden_layers": 6,
    },
    "cohere2": {"sliding_window": _WINDOW, "sliding_window_pattern": 3, "num_hidden_layers": 6},
    # --- mixture of experts
    "qwen3_moe": {**_EXPERTS},
    "mixtral": {**_EXPERTS},
    # --- state space, alone and mixed with attention
    "mamba2": {
        **_MAMBA, "num_heads": 8, "state_size": 16, "intermediate_size": 64, "tie_word_embeddings": True,
        "time_step_rank": "auto",
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "falcon_h1": {
        "mamba_d_head": 8, "mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_state": 16, "tie_word_embeddings": True,
    },
    "lfm2": {
        "conv_bias": False, "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 64, "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3],
    },
    "nemotron_h": {**_MAMBA, "num_hidden_layers": 6, "hybrid_override_pattern": ["M", "-", "*", "M", "-", "*"]},
    "qwen3_next": {
        **_EXPERTS, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "shared_expert_intermediate_size": 16,
        "partial_rotary_factor": 0.5, "full_attention_interval": 3,
    },
    "recurrent_gemma": {
        "conv1d_width": 3, "logits_soft_cap": 30.0, "attention_window_size": _WINDOW, "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    # --- latent attention
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}},
    "deepseek_v3": {**_LATENT},
    # --- shared keys and values
    "gemma3n": {
        "text_config": {
            **_SIZES, "model_type": "gemma3n", "num_hidden_layers": 6, "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY, "sliding_window": _WINDOW, "rope_local_base_freq": 100.0,
            "final_logit_softcapping": 30.0, "layer_types": [_SLIDING, _FULL] * 3,
            "activation_sparsity_pattern": [0.5] * 6, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
            "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 4,
        },
    },
    "gemma4_text": {
        "num_hidden_layers": 8, "num_kv_shared_layers": 2, "sliding_window": _WINDOW, "sliding_window_pattern": 2,
        "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        "tie_word_embeddings": True,
    },
    "afm7": {"hidden_dim": 32, "num_layers": 6, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "hunyuan": {
        **_EXPERTS, "num_hidden_layers": 6, "moe_topk": 1, "num_shared_expert": 1, "use_mixed_mlp_moe": True,
        "use_qk_norm": True, "use_cla": True, "cla_share_factor": 2, "tie_word_embeddings": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
}  # fmt: skip
"""By name; the name is the model type unless the config says another."""

REFUSED: dict[str, dict[str, Any]] = {
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": 4},
    "nanbeige": {"num_loops": 2},
}  # fmt: skip
"""Models that use their layers more than once: they run whole, but in no stages."""


def config_of(name: str) -> dict[str, Any]:
    own = (CONFIGS | REFUSED)[name]
    return {**_SIZES, "model_type": name, **own}


def make_model(name: str, seed: int = 0) -> nn.Module:
    """A model with random weights, the same for the same seed."""
    config = config_of(name)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    # mlx-lm starts norms at one and some biases at zero, which would hide a missing one.
    model.update(_noisy(model.parameters()))
    mx.eval(model.parameters())
    return model


def write_model(
    directory: Path, name: str = "llama", dtype: mx.Dtype = mx.bfloat16, files: int = 1, **settings: Any
) -> nn.Module:
    """Write a tiny model as mlx-lm would, its tensors spread over `files`; returns it."""
    model = make_model(name)
    model.set_dtype(dtype)
    config = config_of(name) | settings
    if quantization := settings.get("quantization"):
        nn.quantize(model, **quantization)
    flat: Any = tree_flatten(model.parameters())
    tensors: dict[str, mx.array] = dict(flat)
    names = sorted(tensors)
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number * len(names) // files : (number + 1) * len(names) // files]
        mx.save_safetensors(str(directory / file), {key: tensors[key] for key in part}, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))
    return model


def _noisy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _noisy(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_noisy(value) for value in tree]
    return tree + 0.05 * mx.random.normal(tree.shape) if mx.issubdtype(tree.dtype, mx.floating) else tree
