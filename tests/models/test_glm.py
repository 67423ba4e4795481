"""Configs of GLM: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers import Glm4Config, Glm4MoeConfig, Glm4MoeLiteConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from megarl.core.errors import UserError
from megarl.models.config import Mla, Moe, Rope
from tests.models.test_families import PATH, SIZES, parse

# GLM-4-9B-0414's sizes, but for the number of layers.
GLM4: dict[str, Any] = {
    **SIZES,
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "pad_token_id": 5,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
}
# GLM-4.5-Air's own, but for the number of layers.
GLM: dict[str, Any] = {
    **SIZES,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
}
# GLM-4.7-Flash's sizes, but for the number of layers.
FLASH: dict[str, Any] = {
    **SIZES,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_method": "noaux_tc",
}


def test_glm_4() -> None:
    config = parse(GLM4)
    assert (config.qkv_bias, config.qk_norm, config.rotary_dim, config.rope) == (True, False, 64, Rope(1e4))
    assert config.interleaved_rope and config.post_norms and not config.norm_offset
    assert (config.embedding_scale, config.query_scale, config.window, config.moe) == (1.0, None, None, None)
    assert not parse(GLM4, attention_bias=False).qkv_bias
    theirs = Glm4Config()
    absent = parse(GLM4, attention_bias="absent", partial_rotary_factor="absent")
    assert absent.qkv_bias == theirs.attention_bias
    assert absent.rotary_dim == theirs.rope_parameters["partial_rotary_factor"] * theirs.head_dim
    large = parse(GLM4, pad_token_id="absent", vocab_size=theirs.vocab_size)
    assert large.pad_token_id == theirs.pad_token_id
    assert not parse(GLM).interleaved_rope and not parse(GLM).post_norms


def test_glm_4_5() -> None:
    config = parse(GLM)
    assert (config.qkv_bias, config.qk_norm, config.rotary_dim, config.rotated) == (True, False, 64, 64)
    assert config.rope == Rope(1e6)
    assert config.moe == Moe(128, 8, 1408, shared_ffn_hidden_size=1408, score="sigmoid", score_bias=True)
    assert config.moe_layers == {1, 2, 3, 4, 5}
    assert parse(GLM, use_qk_norm=True).qk_norm
    absent = parse(GLM, attention_bias="absent", use_qk_norm="absent", partial_rotary_factor="absent")
    assert (absent.qkv_bias, absent.qk_norm, absent.rotary_dim) == (False, False, 64)


def test_glm_4_7_flash() -> None:
    config = parse(FLASH)
    assert config.mla == Mla(q_rank=768, kv_rank=512, nope_dim=192, rope_dim=64, v_dim=256)
    assert (config.head_dim, config.rotated, config.rotary_dim, config.rope) == (256, 64, None, Rope(1e6))
    assert config.moe == Moe(
        64, 4, 1536, shared_ffn_hidden_size=1536, score="sigmoid", scaling_factor=1.8, score_bias=True
    )
    assert config.moe_layers == {1, 2, 3, 4, 5}
    assert parse(FLASH, head_dim=64) == config


@pytest.mark.parametrize("kinds", [None, ["dense", "sparse", "dense", "sparse", "sparse", "sparse"], ["sparse"] * 6])
def test_layers_with_experts_are_those_that_transformers_gives_them(kinds: list[str] | None) -> None:
    theirs = Glm4MoeLiteConfig(num_hidden_layers=6, mlp_layer_types=kinds).mlp_layer_types
    sparse = {index for index, kind in enumerate(theirs) if kind == "sparse"}
    assert parse(FLASH, first_k_dense_replace="absent", mlp_layer_types=kinds).moe_layers == sparse


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "partial_rotary_factor": 0.75,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "partial_rotary_factor": 1.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e6},
    ],
)
def test_the_rotated_share_of_a_head_is_the_one_that_transformers_takes(keys: dict[str, Any]) -> None:
    raw = {key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "rope_scaling")}
    theirs = Glm4MoeConfig(head_dim=128, **deepcopy(keys))
    share = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    assert parse(raw, **keys).rotated == share * 128


@pytest.mark.parametrize("outside", [{}, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25}])
def test_shares_of_a_scaled_rope_have_to_agree(outside: dict[str, Any]) -> None:
    """transformers writes its own share, or that of outside, over the one of the object, once it computes the frequencies."""
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.25}
    raw = {key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "rope_scaling")}
    theirs = Glm4MoeConfig(head_dim=128, rope_parameters=dict(scaling), **outside)
    width = 2 * len(Glm4MoeRotaryEmbedding(theirs).inv_freq)
    if width == 0.25 * 128:
        assert parse(raw, rope_parameters=scaling, **outside).rotated == width
    else:
        with pytest.raises(
            UserError, match=r"partial_rotary_factor is 0.25; where RoPE is scaled, transformers takes 0.5"
        ):
            parse(raw, rope_parameters=scaling, **outside)


@pytest.mark.parametrize(
    ("raw", "changes", "said"),
    [
        (GLM4, {"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        (GLM4, {"attention_bias": 1}, ["attention_bias is 1"]),
        (GLM4, {"mlp_bias": True}, ["mlp_bias=True"]),
        (GLM4, {"use_sliding_window": True}, ["use_sliding_window=True"]),
        (GLM4, {"partial_rotary_factor": 0.2}, ["partial_rotary_factor is 0.2", "an even number"]),
        (GLM4, {"partial_rotary_factor": None}, ["partial_rotary_factor is null", "1.0 is all of it"]),
        (GLM4, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "a part of each head"]),
        (GLM, {"n_group": "absent"}, ["lacks n_group"]),
        (GLM, {"mlp_bias": True}, ["mlp_bias=True"]),
        (GLM, {"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        (GLM, {"attention_bias": 1}, ["attention_bias is 1"]),
        (GLM, {"norm_topk_prob": False}, ["norm_topk_prob=False with sigmoid"]),
        (GLM, {"use_sliding_window": True}, ["use_sliding_window=True"]),
        (GLM, {"partial_rotary_factor": 1.5}, ["partial_rotary_factor is 1.5", "128 elements"]),
        (GLM, {"partial_rotary_factor": 0.2}, ["partial_rotary_factor is 0.2", "an even number"]),
        (GLM, {"partial_rotary_factor": 0}, ["partial_rotary_factor is 0"]),
        (GLM, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "a part of each head"]),
        (FLASH, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        (FLASH, {"rope_interleave": False}, ["rope_interleave=False"]),
        (FLASH, {"rope_interleave": None}, ["rope_interleave=None"]),  # no to transformers
        (FLASH, {"attention_bias": True}, ["attention_bias=True"]),
        (FLASH, {"head_dim": 32}, ["head_dim is 32", "qk_rope_head_dim, which is 64"]),
        (
            FLASH,
            {"first_k_dense_replace": 2},
            ["first_k_dense_replace is 2", "experts in layers 1, 2", "have to agree"],
        ),
        (FLASH, {"mlp_layer_types": ["dense"] * 5}, ["mlp_layer_types is", "each of the 6 layers"]),
        (FLASH, {"mlp_layer_types": ["dense"] * 5 + ["wide"]}, ["'wide'", "'dense' and 'sparse'"]),
    ],
)
def test_what_the_models_do_not_do_is_refused(raw: dict[str, Any], changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        parse(raw, **changes)
    assert all(text in str(refused.value) for text in [str(PATH), *said])
