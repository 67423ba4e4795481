"""Configs of Qwen1.5-MoE and Qwen2-MoE: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2MoeConfig

from megarl.core.errors import UserError
from megarl.models.config import Moe
from tests.models.test_families import PATH, SIZES, parse

# Qwen1.5-MoE-A2.7B's own, but for the number of layers.
QWEN: dict[str, Any] = {
    **SIZES,
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
}


def test_qwen_1_5_moe() -> None:
    config = parse(QWEN)
    assert config.moe == Moe(60, 4, 1408, shared_ffn_hidden_size=5632, normalize=False, shared_gate=True)
    assert config.moe_layers == {0, 1, 2, 3, 4, 5}
    assert (config.qkv_bias, config.qk_norm, config.head_dim, config.window) == (True, False, 128, None)
    assert not parse(QWEN, qkv_bias=False).qkv_bias
    theirs = Qwen2MoeConfig()
    absent = parse(QWEN, qkv_bias="absent", norm_topk_prob="absent", decoder_sparse_step="absent")
    assert absent.moe is not None and absent.moe.normalize == theirs.norm_topk_prob
    assert absent.qkv_bias == theirs.qkv_bias
    assert absent.moe_layers == config.moe_layers


@pytest.mark.parametrize("keys", [{"decoder_sparse_step": 2}, {"decoder_sparse_step": 3, "mlp_only_layers": [2]}])
def test_layers_with_experts_are_those_that_transformers_gives_them(keys: dict[str, Any]) -> None:
    theirs = Qwen2MoeConfig(num_hidden_layers=6, **keys)
    dense = theirs.mlp_only_layers
    sparse = {n for n in range(6) if n not in dense and (n + 1) % theirs.decoder_sparse_step == 0}
    assert parse(QWEN, **keys).moe_layers == sparse


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared_expert_intermediate_size": "absent"}, ["lacks shared_expert_intermediate_size"]),
        ({"shared_expert_intermediate_size": 0}, ["shared_expert_intermediate_size is 0", "from 1"]),
        ({"qkv_bias": 1}, ["qkv_bias is 1"]),
        ({"use_sliding_window": True}, ["use_sliding_window=True (sliding-window attention)"]),
        ({"layer_types": ["sliding_attention"] * 6}, ["sliding_attention in layers 0"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"num_experts_per_tok": 61}, ["num_experts_per_tok=61 of 60 experts"]),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, ["the router would have no gradient"]),
    ],
)
def test_what_the_models_do_not_do_is_refused(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        parse(QWEN, **changes)
    assert all(text in str(refused.value) for text in [str(PATH), *said])
