"""Models as large as published ones, of families without a recipe; without weights.

Sizes are transformers' own where they are a published model's (SmolLM3-3B, Qwen3.5-9B and 35B-A3B, Qwen3-Next-80B-A3B), and else
those of OLMoE-1B-7B, EXAONE-4.0-32B, granite-3.1-3b-a800m, Seed-OSS-36B, MiniMax-M2, ERNIE-4.5-0.3B and 21B-A3B, Hunyuan-7B and
A13B, DeepSeek-V2, Apertus-8B, and Gemma-4-26B-A4B.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.families import FAMILIES
from megarl.models.hf_config import parse_model_config
from tests.support.tiny import CONFIGS

# What differs from transformers' own sizes.
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"eos_token_id": 248044},
    "qwen3_5_moe": {"eos_token_id": 248044},
    "qwen3_next": {"eos_token_id": 151645},
    "exaone4": {
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    "smollm3": {},
    "apertus": {"intermediate_size": 21504, "num_key_value_heads": 8},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "gemma4": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "hunyuan_v1_dense": {
        "vocab_size": 128167,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    "hunyuan_v1_moe": {
        "vocab_size": 128167,
        "intermediate_size": 3072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_experts": 64,
        "moe_topk": 8,
    },
    "deepseek_v2": {
        "vocab_size": 102400,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 160,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 16.0,
        "max_position_embeddings": 163840,
    },
    "olmoe": {"intermediate_size": 1024},
    "granitemoe": {
        "vocab_size": 49155,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
    },
    "seed_oss": {
        "vocab_size": 155136,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
    },
    "minimax_m2": {
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 196608,
    },
}
# That cut all they have.
LAYOUTS = {
    "qwen3_5": Layout(tp=4, pp=2, world_size=8),
    "exaone4": Layout(tp=4, pp=2, sequence_parallel=True, world_size=8),
    "apertus": Layout(tp=4, pp=2, sequence_parallel=True, world_size=8),
    "ernie4_5": Layout(tp=2, pp=2, sequence_parallel=True, world_size=4),
    "ernie4_5_moe": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
    "gemma4": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
    "hunyuan_v1_dense": Layout(tp=4, pp=2, sequence_parallel=True, world_size=8),
    "hunyuan_v1_moe": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
    "deepseek_v2": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
    "smollm3": Layout(tp=4, pp=2, sequence_parallel=True, world_size=8),
    "olmoe": Layout(tp=4, pp=2, ep=4, sequence_parallel=True, world_size=8),
    "granitemoe": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
    "qwen3_5_moe": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
    "qwen3_next": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
    "seed_oss": Layout(tp=4, pp=2, sequence_parallel=True, world_size=8),
    "minimax_m2": Layout(tp=4, pp=2, ep=8, sequence_parallel=True, world_size=16),
}
# Transformer Engine has norms neither behind attention or the rotation nor over all heads, no Gated DeltaNet, and no
# activation that learns.
TORCH_ALONE = (
    *("apertus", "gemma4", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "exaone4", "olmoe", "minimax_m2"),
)


def large_config(family: str) -> dict[str, Any]:
    """A config.json."""
    import transformers

    settings: dict[str, Any] = getattr(transformers, CONFIGS[family])(**SIZES.get(family, {})).to_dict()
    [architecture] = [name for name, each in FAMILIES.items() if each.name == family]
    return settings | {"architectures": [architecture], "dtype": "bfloat16"}


def large_model(family: str) -> ModelConfig:
    """What megarl reads of it."""
    return parse_model_config(large_config(family), Path(f"{family}/config.json"))


def write_large(folder: Path, family: str) -> Path:
    """The same as a folder, which is returned."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(large_config(family)))
    return folder
