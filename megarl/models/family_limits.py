"""What configs of a family may say, where megarl's model stands for one answer: tables for `families`. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Key -> the one value that megarl's model stands for, and what another value would ask for.
Only = Mapping[str, tuple[Any, str]]

A_LAYER = "attn_type_list"  # says it of each layer: a list

COMMON: Only = MappingProxyType(
    {
        "attention_bias": (False, "biases in attention"),
        "mlp_bias": (False, "biases in the MLP"),
        "hidden_act": ("silu", "another activation"),
        "partial_rotary_factor": (1.0, "RoPE over a part of each head"),
        "is_causal": (True, "attention to later tokens"),
        # SGLang caps logits of any family, and transformers Gemma's.
        "final_logit_softcapping": (None, "soft-capped logits"),
    }
)

QWEN2_ONLY: Only = MappingProxyType({key: value for key, value in COMMON.items() if key != "attention_bias"})
DEEPSEEK_ONLY: Only = MappingProxyType(
    {
        **COMMON,
        "rope_interleave": (True, "RoPE over halves"),
        "scoring_func": ("sigmoid", "another score of the experts"),
        "topk_method": ("noaux_tc", "another choice of the experts"),
        "moe_layer_freq": (1, "experts in some layers only"),
    }
)
PHI3_ONLY: Only = MappingProxyType(
    {key: value for key, value in COMMON.items() if key not in ("attention_bias", "mlp_bias", "partial_rotary_factor")}
)
GLM4_ONLY: Only = MappingProxyType(
    {key: value for key, value in COMMON.items() if key not in ("attention_bias", "partial_rotary_factor")}
)
GPT_OSS_ONLY: Only = MappingProxyType(
    {
        **COMMON,
        "attention_bias": (True, "attention without biases"),
        "swiglu_limit": (7.0, "another limit of the gate"),  # transformers knows one, and SGLang asks for the key
        "hidden_act_alpha": (1.702, "another slope of the gate"),  # SGLang's alone
        "sliding_window_pattern": (2, "other layers with windows"),
    }
)
GEMMA3_ONLY: Only = MappingProxyType(
    {
        **{key: value for key, value in COMMON.items() if key != "hidden_act"},
        "hidden_activation": ("gelu_pytorch_tanh", "another activation"),
        "attn_logit_softcapping": (None, "soft-capped attention"),
        "use_bidirectional_attention": (False, "attention to later tokens"),
    }
)
OLMOE_ONLY: Only = MappingProxyType({**COMMON, "clip_qkv": (None, "clipped queries, keys and values")})
MINIMAX_M2_ONLY: Only = MappingProxyType(
    {
        **{key: value for key, value in COMMON.items() if key != "partial_rotary_factor"},
        "scoring_func": ("sigmoid", "another score of the experts"),
        "use_routing_bias": (True, "a choice of the experts by their scores alone"),
        "use_qk_norm": (True, "queries and keys without norms"),
        "qk_norm_type": ("per_layer", "other norms of queries and keys"),
        "shared_intermediate_size": (0, "shared experts"),
        A_LAYER: (1, "linear attention"),
        "sliding_window": (None, "sliding-window attention"),
    }
)
OLMO3_ONLY: Only = MappingProxyType({**COMMON, "sliding_window_pattern": (4, "other layers with windows")})
QWEN3_5_ONLY: Only = MappingProxyType(
    {
        **{key: value for key, value in COMMON.items() if key != "partial_rotary_factor"},
        "attn_output_gate": (True, "attention without a gate"),  # SGLang's alone
        "sliding_window": (None, "sliding-window attention"),
        "use_sliding_window": (False, "sliding-window attention"),
    }
)
QWEN3_5_MOE_ONLY: Only = MappingProxyType(
    {
        **QWEN3_5_ONLY,
        # Which transformers reads of none of these models.
        "norm_topk_prob": (True, "scores that are not divided by their sum"),
        "mlp_only_layers": ([], "layers without experts"),
        "decoder_sparse_step": (1, "layers without experts"),
    }
)
