"""Tiny models whose linears are whole blocks of FP8, by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import write_tiny_model

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
OWN: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {"moe_intermediate_size": 128, "mlp_only_layers": []},
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,  # compressed keys and values: one block and a half
        "v_head_dim": 64,
    },
    "deepseek_v2": {
        "rope_parameters": {  # without, SGLang builds none of it on a CPU
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
            **{"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
    "ernie4_5_moe": {"moe_intermediate_size": 128},
    "glm4_moe": {"moe_intermediate_size": 128},
    "glm4_moe_lite": {
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"]},
    "minimax_m2": {
        "rotary_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 64},
}


def write_wide(folder: Path, family: str, **overrides: Any) -> Path:
    """Such a model; returns the folder."""
    return write_tiny_model(folder, family, **{**SIZES, **OWN.get(family, {}), **overrides})
