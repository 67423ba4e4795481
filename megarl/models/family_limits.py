"""What configs of a family may say, where megarl's model stands for one answer: tables for `families`. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Key -> the one value that megarl's model stands for, and what another value would ask for.
Only = Mapping[str, tuple[Any, str]]

A_LAYER, SHARED = "attn_type_list", "num_shared_expert"
OF_LAYERS = (A_LAYER, SHARED)  # may say it of each layer: a list

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
APERTUS_ONLY: Only = MappingProxyType(
    {
        **COMMON,
        "hidden_act": ("xielu", "another activation"),
        "bias": (False, "biases in attention"),  # SGLang's alone, as what follows
        "qkv_bias": (False, "biases in attention"),
        "rope_is_neox_style": (True, "RoPE over neighbours"),
        "qk_norm": (True, "queries and keys without norms"),
        "post_norm": (False, "norms behind attention and MLP"),
    }
)
DEEPSEEK_V2_ONLY: Only = MappingProxyType(
    {
        **{key: value for key, value in DEEPSEEK_ONLY.items() if key != "topk_method"},
        "scoring_func": ("softmax", "another score of the experts"),
        "norm_topk_prob": (False, "scores that are divided by their sum"),  # SGLang's alone
    }
)
ERNIE_ONLY: Only = MappingProxyType(
    {
        **COMMON,
        "use_bias": (False, "biases in attention, MLP and head"),
        "rope_is_neox_style": (False, "RoPE over halves"),  # SGLang's alone
        "compression_ratio": (1.0, "positions that are divided"),
    }
)
ERNIE_MOE_ONLY: Only = MappingProxyType(
    {
        **ERNIE_ONLY,
        "moe_layer_interval": (1, "layers without experts among those with them"),  # counted from 0, or from the first
        "moe_norm_min": (1e-12, "another least sum of the chosen scores"),
        "moe_gate_act": ("softmax", "another score of the experts"),
    }
)
HUNYUAN_ONLY: Only = MappingProxyType(
    {
        **COMMON,
        "bias": (False, "biases in attention"),  # SGLang's alone
        "use_qk_norm": (True, "queries and keys without norms"),  # SGLang's alone, as what follows
        "use_cla": (False, "keys and values of other layers"),
        "logit_scale": (1.0, "scaled logits"),
        "use_mla": (False, "latent attention"),
        "position_embedding_xdrope": (False, "positions on several axes"),
        "use_rotary_pos_emb": (True, "attention without positions"),
        "norm_type": ("rms", "other norms"),
    }
)
HUNYUAN_DENSE_ONLY: Only = MappingProxyType({**HUNYUAN_ONLY, "num_experts": (1, "experts")})
HUNYUAN_MOE_ONLY: Only = MappingProxyType(
    {
        **HUNYUAN_ONLY,
        "use_mixed_mlp_moe": (True, "experts without a shared one"),
        SHARED: (1, "several shared experts"),
        "moe_layer_num_skipped": (0, "layers without experts"),
        "norm_topk_prob": (True, "scores that are not divided by their sum"),
        "group_limited_greedy": (False, "a choice among groups of experts"),
        "routed_scaling_factor": (1.0, "scaled scores"),
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
GEMMA4_ONLY: Only = MappingProxyType(
    {
        **{key: value for key, value in COMMON.items() if key not in ("hidden_act", "final_logit_softcapping")},
        "hidden_activation": ("gelu_pytorch_tanh", "another activation"),
        "use_bidirectional_attention": ("vision", "attention to later tokens"),  # of pictures alone, or none
        "num_kv_shared_layers": (0, "layers with the keys and values of others"),
        "sliding_window_pattern": (6, "other layers with windows"),
        "swa_num_attention_heads": (None, "other heads in layers with windows"),  # SGLang's alone
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
