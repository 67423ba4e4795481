"""The table: its names are those that transformers writes, at every family, and those of both of Megatron's layer specs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.models.config import Mla, ModelConfig, Moe
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import read_index
from megarl.models.rules import LayerSpec, Rule, expected_tensors, rules
from tests.models.configs import PLAIN
from tests.support.tiny import GEMMA4_EXPERTS, write_tiny_model

MOE = Moe(num_experts=2, top_k=1, ffn_hidden_size=3)
DEEPSEEK = replace(
    PLAIN,
    num_layers=2,
    moe=replace(MOE, shared_ffn_hidden_size=5, score_bias=True),
    moe_layers=frozenset({1}),
    mla=Mla(q_rank=7, kv_rank=6, nope_dim=4, rope_dim=2, v_dim=3),
    head_dim=6,
)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("ministral3", {}),
        ("qwen3_5", {"head_dim": 24}),
        ("qwen3_5_moe", {}),
        ("qwen3_next", {"linear_num_key_heads": 4, "tie_word_embeddings": True}),
        ("qwen3_moe", {}),
        ("qwen2_moe", {}),
        ("qwen2_moe", {"qkv_bias": False, "tie_word_embeddings": True}),
        ("phi3", {}),
        ("phi3", {"head_dim": 24, "tie_word_embeddings": True}),
        ("mixtral", {}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("apertus", {"head_dim": 24}),
        ("deepseek_v2", {}),
        ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0}),
        ("ernie4_5", {"head_dim": 24, "tie_word_embeddings": True}),
        ("ernie4_5_moe", {}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_end_index": 1}),
        ("hunyuan_v1_dense", {"head_dim": 24}),
        ("hunyuan_v1_moe", {"tie_word_embeddings": True}),
        ("glm4", {}),
        ("glm4", {"attention_bias": False}),
        ("glm4_moe", {}),
        ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
        ("glm4_moe_lite", {}),
        ("gpt_oss", {}),
        ("granite", {}),
        ("granitemoe", {}),
        ("olmo2", {}),
        ("olmo3", {"head_dim": 24, "tie_word_embeddings": True}),
        ("exaone4", {"head_dim": 24, "tie_word_embeddings": True}),
        ("smollm3", {}),
        ("seed_oss", {}),
        ("minimax_m2", {}),
        ("olmoe", {}),
        ("gemma3", {}),
        ("gemma4", {}),
        ("gemma4", GEMMA4_EXPERTS),
        ("gemma4", {"attention_k_eq_v": False, "tie_word_embeddings": True}),
    ],
)
def test_names_and_shapes_are_those_that_transformers_writes(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, family, num_hidden_layers=3, **overrides)
    found = {name: info.shape for name, info in read_index(tmp_path).items()}
    assert found == expected_tensors(load_model_config(tmp_path))


def names(config: ModelConfig, spec: LayerSpec, prefix: str) -> list[str]:
    """Megatron's names below the prefix."""
    return [rule.megatron.removeprefix(prefix) for rule in rules(config, spec) if rule.megatron.startswith(prefix)]


def rule_named(config: ModelConfig, name: str, spec: LayerSpec = "torch") -> Rule:
    return next(rule for rule in rules(config, spec) if rule.megatron == name)


def test_a_dense_layer_under_both_specs() -> None:
    config = replace(PLAIN, qkv_bias=True, qk_norm=True)
    assert names(config, "torch", "decoder.layers.1.") == [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    assert names(config, "transformer_engine", "decoder.layers.1.") == [
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]


def test_a_layer_of_experts_under_both_specs() -> None:
    config = replace(PLAIN, moe=MOE, moe_layers=frozenset({0}))
    assert names(config, "torch", "decoder.layers.0.")[3:] == [
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.local_experts.0.linear_fc1.weight",
        "mlp.experts.local_experts.0.linear_fc2.weight",
        "mlp.experts.local_experts.1.linear_fc1.weight",
        "mlp.experts.local_experts.1.linear_fc2.weight",
    ]
    assert names(config, "transformer_engine", "decoder.layers.0.")[3:] == [
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.linear_fc1.weight0",
        "mlp.experts.linear_fc2.weight0",
        "mlp.experts.linear_fc1.weight1",
        "mlp.experts.linear_fc2.weight1",
    ]
    assert "pre_mlp_layernorm.weight" in names(config, "torch", "decoder.layers.1.")
    assert "mlp.linear_fc1.layer_norm_weight" in names(config, "transformer_engine", "decoder.layers.1.")


def test_latent_attention_under_both_specs() -> None:
    assert names(DEEPSEEK, "torch", "decoder.layers.0.") == [
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    assert names(DEEPSEEK, "transformer_engine", "decoder.layers.0.") == [
        "input_layernorm.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]


@pytest.mark.parametrize("linear", ["linear_q_down_proj", "linear_kv_down_proj"])
def test_transformer_engine_keeps_compressing_linears_whole(linear: str) -> None:
    name = f"decoder.layers.0.self_attention.{linear}.weight"
    assert rule_named(DEEPSEEK, name).cut == "rows"
    assert rule_named(DEEPSEEK, name, "transformer_engine").cut == "whole"


def test_both_specs_are_made_of_the_same_hf_tensors() -> None:
    for config in (PLAIN, DEEPSEEK, replace(PLAIN, post_norms=True, qk_norm=True)):
        torch_spec, fused = (list(rules(config, spec)) for spec in ("torch", "transformer_engine"))
        assert [rule.sources for rule in torch_spec] == [rule.sources for rule in fused]
        assert len({rule.megatron for rule in torch_spec}) == len(torch_spec)
        assert len({rule.megatron for rule in fused}) == len(fused)


def test_shapes_by_hand() -> None:
    shapes = expected_tensors(DEEPSEEK)
    layer = "model.layers.1."
    assert shapes[layer + "self_attn.q_a_proj.weight"] == (7, 2)
    assert shapes[layer + "self_attn.q_b_proj.weight"] == (2 * 6, 7)
    assert shapes[layer + "self_attn.kv_a_proj_with_mqa.weight"] == (6 + 2, 2)
    assert shapes[layer + "self_attn.kv_b_proj.weight"] == (2 * (4 + 3), 6)
    assert shapes[layer + "self_attn.o_proj.weight"] == (2, 2 * 3)
    assert shapes[layer + "mlp.gate.e_score_correction_bias"] == (2,)
    assert shapes[layer + "mlp.experts.1.down_proj.weight"] == (2, 3)
    assert shapes[layer + "mlp.shared_experts.up_proj.weight"] == (5, 2)


def test_gemma_has_norms_behind_attention_and_mlp() -> None:
    config = replace(PLAIN, post_norms=True)
    norms = {
        rule.megatron.removeprefix("decoder.layers.0."): rule.sources[0].name.removeprefix("model.layers.0.")
        for rule in rules(config, "torch")
        if rule.layer == 0 and "norm" in rule.megatron
    }
    assert norms == {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
        "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
    }


def test_a_tied_head_is_a_copy_where_the_stages_need_one() -> None:
    tied = replace(PLAIN, tied_embeddings=True)
    assert "lm_head.weight" in expected_tensors(PLAIN)
    assert "lm_head.weight" not in expected_tensors(tied)
    assert [rule for rule in rules(tied, "torch") if rule.megatron == "output_layer.weight"] == []
    *_, head = rules(tied, "torch", has_head_copy=True)
    assert (head.megatron, head.layer) == ("output_layer.weight", 1)
    assert head.sources[0].name == "model.embed_tokens.weight"
    assert [*rules(PLAIN, "torch", has_head_copy=True)] == [*rules(PLAIN, "torch")]


def test_the_score_bias_is_a_buffer() -> None:
    assert [rule.megatron for rule in rules(DEEPSEEK, "torch") if rule.is_buffer] == [
        "decoder.layers.1.mlp.router.expert_bias"
    ]
