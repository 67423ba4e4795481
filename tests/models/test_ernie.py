"""Configs of ERNIE 4.5, dense and with experts: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, Ernie4_5Config

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import Moe, Rope
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.hf_weights import load_hf_weights
from megarl.models.routers import BiasedRouter
from megarl.models.rules import expected_tensors
from megarl.serving.server_models import known_as, missing_settings, unused_models
from megarl.training.parallel import Groups
from tests.models.test_families import SIZES, of, parse
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_model

# As ERNIE-4.5-0.3B-PT's and 21B-A3B-PT's, but for the number of layers.
ERNIE: dict[str, Any] = {
    **SIZES,
    "architectures": ["Ernie4_5ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
EXPERTS: dict[str, Any] = {
    **{key: value for key, value in ERNIE.items() if key != "head_dim"},
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
}


def test_ernie() -> None:
    config = parse(ERNIE)
    assert (config.family, config.head_dim, config.rope, config.pad_token_id) == ("ernie4_5", 128, Rope(5e5), 0)
    assert config.interleaved_rope and config.rotary_dim is None and config.tied_embeddings
    assert not (config.qkv_bias or config.qk_norm or config.output_bias)
    theirs, absent = Ernie4_5Config(), of("Ernie4_5ForCausalLM")
    assert (absent.head_dim, absent.pad_token_id, absent.tied_embeddings) == (theirs.head_dim, 0, True)
    assert absent.rope == Rope(theirs.rope_parameters["rope_theta"])
    assert parse(ERNIE, head_dim=None).head_dim == Ernie4_5Config(head_dim=None).head_dim == 64


def test_ernie_with_experts() -> None:
    config = parse(EXPERTS)
    assert (config.family, config.head_dim, config.rope) == ("ernie4_5_moe", 128, Rope(5e5))
    assert config.moe == Moe(64, 6, 1536, shared_ffn_hidden_size=3072, score_bias=True)
    assert config.moe_layers == set(range(1, 6))
    tensors = expected_tensors(config)
    assert tensors["model.layers.5.mlp.moe_statics.e_score_correction_bias"] == (1, 64)
    assert tensors["model.layers.5.mlp.shared_experts.down_proj.weight"] == (2560, 3072)
    assert tensors["model.layers.0.mlp.gate_proj.weight"] == (12288, 2560)
    other = parse(EXPERTS, moe_k="absent", num_experts_per_tok=6, moe_num_experts="absent", num_experts=64)
    assert other == config
    assert parse(EXPERTS, moe_num_shared_experts=0).moe == Moe(64, 6, 1536, score_bias=True)
    theirs = Ernie4_5_MoeConfig()
    assert of(
        "Ernie4_5_MoeForCausalLM",
        **{key: EXPERTS[key] for key in ("moe_num_experts", "moe_k", "moe_intermediate_size")},
        moe_num_shared_experts=2,
    ).moe_layers == set(range(theirs.moe_layer_start_index, 6))


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 4}, {3, 4}),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": -1}, set(range(6))),
        ({"moe_layer_end_index": 53}, set(range(1, 6))),
        ({"moe_layer_start_index": 4, "moe_layer_end_index": 2}, set()),
    ],
)
def test_experts_are_in_the_layers_between_two(keys: dict[str, Any], layers: set[int]) -> None:
    theirs = Ernie4_5_MoeConfig(num_hidden_layers=6, **keys)
    between = range(theirs.moe_layer_start_index, min(theirs.moe_layer_end_index, 5) + 1)
    assert parse(EXPERTS, **keys).moe_layers == layers == set(between)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path, "ernie4_5_moe")
    config, file = load_model_config(folder), folder / "model.safetensors"
    found = load_file(file)
    save_file(found | {"model.mtp_block.0.input_layernorm.weight": torch.ones(64)}, file)
    check_weights(expected_tensors(config), folder, config)
    save_file(found | {"model.other_block.0.input_layernorm.weight": torch.ones(64)}, file)
    with pytest.raises(UserError, match=r"model\.other_block"):
        check_weights(expected_tensors(config), folder, config)


def test_the_bias_keeps_its_bits_and_is_not_trained(one_rank: Groups, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "ernie4_5_moe")
    config = load_model_config(tmp_path)
    written = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).model.layers[1].mlp.gate
    [model] = build_gpt(config, Layout(), one_rank.collection, dtype=torch.bfloat16, platform=chosen())
    load_hf_weights([model], config, tmp_path, Layout(), 0)
    router = model.bfloat16().decoder.layers[1].mlp.router
    assert isinstance(router, BiasedRouter)
    assert torch.equal(router.expert_bias.cpu(), written.moe_statics.e_score_correction_bias)
    assert "expert_bias" not in dict(router.named_parameters())


def test_servers_are_told_sglangs_own_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "dense", "ernie4_5", tokenizer=False)
    assert missing_settings(folder) == {"architectures": ["Ernie4_5_ForCausalLM"]}
    assert (
        known_as("Ernie4_5_ForCausalLM") == "Ernie4_5ForCausalLM" and known_as("Qwen3ForCausalLM") == "Qwen3ForCausalLM"
    )
    experts = write_tiny_model(tmp_path / "experts", "ernie4_5_moe", tokenizer=False)
    assert missing_settings(experts) == {}
    (experts / "config.json").write_text(json.dumps(EXPERTS))
    assert missing_settings(experts) == {"head_dim": 128}
    assert "ernie4" not in unused_models(folder) and "ernie4" not in unused_models(experts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_bias": True}, r"use_bias=True \(biases in attention, MLP and head\)"),
        ({"rope_is_neox_style": True}, r"rope_is_neox_style=True \(RoPE over halves\)"),
        ({"compression_ratio": 2.0}, r"compression_ratio=2\.0 \(positions that are divided\)"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ({"moe_layer_interval": 2}, r"moe_layer_interval=2 \(layers without experts among those with them\)"),
        ({"moe_norm_min": 0.1}, r"moe_norm_min=0\.1"),
        ({"moe_k": 65}, r"num_experts_per_tok=65 of 64 experts"),
        ({"moe_k": 6, "num_experts_per_tok": 7}, r"num_experts_per_tok is 7; 6, as moe_k has it, or no such key"),
        ({"moe_layer_end_index": -2}, r"moe_layer_end_index is -2; a whole number from -1"),
        ({"moe_num_shared_experts": "absent"}, r"lacks moe_num_shared_experts"),
        ({"head_dim": None}, r"head_dim is None"),
    ],
)
def test_what_it_is_refused_for(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(EXPERTS, **changes)
