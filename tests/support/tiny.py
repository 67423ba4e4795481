"""Small random models in HF format, written by transformers itself: the independent side of every parity test."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

# The names of transformers' configs; its modules, which are seconds of a core, are loaded where a model is made.
CONFIGS = {
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "ministral3": "Ministral3Config",
    "phi3": "Phi3Config",
    "mixtral": "MixtralConfig",
    "deepseek_v3": "DeepseekV3Config",
    "apertus": "ApertusConfig",
    "deepseek_v2": "DeepseekV2Config",
    "ernie4_5": "Ernie4_5Config",
    "ernie4_5_moe": "Ernie4_5_MoeConfig",
    "hunyuan_v1_dense": "HunYuanDenseV1Config",
    "hunyuan_v1_moe": "HunYuanMoEV1Config",
    "glm4": "Glm4Config",
    "glm4_moe": "Glm4MoeConfig",
    "glm4_moe_lite": "Glm4MoeLiteConfig",
    "granite": "GraniteConfig",
    "granitemoe": "GraniteMoeConfig",
    "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config",
    "exaone4": "Exaone4Config",
    "smollm3": "SmolLM3Config",
    "seed_oss": "SeedOssConfig",
    "olmoe": "OlmoeConfig",
    "minimax_m2": "MiniMaxM2Config",
    "gemma3": "Gemma3TextConfig",
    "gemma4": "Gemma4TextConfig",
    "gpt_oss": "GptOssConfig",
}
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
}
ALPHA: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
GATED: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
# What a family has beside the common sizes; small enough for a CPU, and every feature at work.
OWN: dict[str, dict[str, Any]] = {
    "qwen3_5": LINEAR,
    "qwen3_5_moe": {**LINEAR, **GATED},
    "qwen3_next": {**LINEAR, **GATED, "mlp_only_layers": [1]},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {**GATED, "norm_topk_prob": False, "mlp_only_layers": [1]},
    "mistral": {"sliding_window": None},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8,  # so short that the scale of queries is at work everywhere
            "llama_4_scaling_beta": 0.4,
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "ernie4_5_moe": {
        "moe_intermediate_size": 48,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_dense": {"rope_parameters": ALPHA},
    "hunyuan_v1_moe": {
        "intermediate_size": 48,
        "num_experts": 8,
        "moe_topk": 3,
        "rope_parameters": ALPHA,
    },
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-3,
    },
    "gpt_oss": {
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
    },
    "granitemoe": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 16.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    # RoPE not scaled: transformers 5.12 scales it in local layers too, where no OLMo-3 was trained so.
    "olmo3": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "exaone4": {
        "sliding_window": 8,
        "sliding_window_pattern": "LG",
        "rms_norm_eps": 1e-6,  # that of the norms of queries and keys in SGLang, whatever the config says
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "seed_oss": {"head_dim": 24, "attention_out_bias": True},
    "olmoe": {
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    },
    "minimax_m2": {
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gemma3": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma4": {  # all layers but the last with a window, as where no key says
        "sliding_window": 8,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 0.5,  # so small that it is at work
    },
}
TEMPLATE = (
    "{% if opening is defined %}{{ opening }} {% endif %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson }} {% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
WORDS = (
    "system",
    "user",
    "assistant",
    *"0123456789",
    *"abcdefghijklmnopqrstuvwxyz",
    *"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    *"+-*/=#?!.,:",
)


# RoPE of type llama3, whose first training was so short that every band of its frequencies counts.
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def longrope(share: float = 1.0) -> dict[str, Any]:
    """Phi-3's RoPE of type longrope in a tiny model, over that share of a head; far from none, and another for long sequences."""
    pairs = int(16 * share) // 2
    short = [1.0 + 0.3 * pair for pair in range(pairs)]
    return {
        "partial_rotary_factor": share,
        "original_max_position_embeddings": 512,
        "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": [7.0 * each for each in short]},
    }


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of a small model."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        **OWN.get(family, {}),
        **overrides,
    }
    if family in ("qwen2", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        settings.pop("head_dim")
    if family == "qwen3_5_moe":
        settings.pop("intermediate_size")  # no layer has an MLP without experts
    return getattr(transformers, CONFIGS[family])(**deepcopy(settings))  # transformers writes into what it is given


def write_tiny_model(
    folder: Path, family: str = "qwen3", *, seed: int = 0, tokenizer: bool = True, **overrides: Any
) -> Path:
    """Write a random model of that family and, if asked for, a tokenizer of one token a character; returns the folder."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Norms of one, biases of zero and routers that send all tokens alike would hide mistakes.
            if name.endswith(
                (
                    "router.proj.weight",
                    *("mlp.gate.weight", "shared_expert_gate.weight", "mlp.router.weight", "router.layer.weight"),
                    "gate.wg.weight",
                )
            ):
                tensor.normal_(std=0.3)
            elif name.endswith((".sinks", "gate_up_proj_bias", "down_proj_bias")):
                tensor.normal_()  # experts that answer alike would leave routers gradients of rounding alone
                if "gate_up" in name:
                    tensor[:, ::7] *= 8  # beyond the limits of gate and up
            elif name.endswith("conv1d.weight"):
                tensor.normal_(std=0.5)  # else the epsilon of the norms behind would be all that counts
            elif name.endswith("layer_scalar"):
                tensor.uniform_(0.5, 1.5).copy_(tensor.bfloat16())  # as published ones are
            elif name.endswith("A_log"):
                tensor.uniform_(-4, 1)  # states that last for some tokens, and for one
            elif (tensor.dim() == 1 and isinstance(tensor, torch.nn.Parameter)) or name.endswith("correction_bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


write_tiny_qwen = write_tiny_model


def write_tokenizer(folder: Path) -> None:
    """One token a character, after the special ones."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*SPECIAL, *WORDS]))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<|unk|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
