"""Configs of MiniMax-M2: what of them megarl reads as transformers does, what servers are told, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import MiniMaxM2Config

from megarl.core.errors import UserError
from megarl.models.config import Moe, Rope
from megarl.models.hf_config import load_model_config
from megarl.models.rules import expected_tensors
from megarl.serving.server_models import missing_settings
from tests.models.test_families import SIZES, of, parse
from tests.support.tiny import write_tiny_model

LAYERS = SIZES["num_hidden_layers"]
# MiniMax-M2's own, but for the number of layers.
MINIMAX_M2: dict[str, Any] = {
    **SIZES,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "attn_type_list": [1] * LAYERS,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
SHARE = {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5}


def test_minimax_m2() -> None:
    config = parse(MINIMAX_M2)
    assert (config.family, config.head_dim, config.rotary_dim, config.rope) == ("minimax_m2", 128, 64, Rope(5e6))
    assert (config.qk_norm, config.whole_qk_norm, config.qkv_bias, config.fp8_block) == (True, True, False, (128, 128))
    assert config.moe == Moe(256, 8, 1536, score="sigmoid", score_bias=True)
    assert config.moe_layers == set(range(LAYERS))
    tensors = expected_tensors(config)
    assert tensors["model.layers.5.block_sparse_moe.e_score_correction_bias"] == (256,)
    assert tensors["model.layers.5.self_attn.q_norm.weight"] == (6144,)
    theirs, absent = MiniMaxM2Config(), of("MiniMaxM2ForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    assert (absent.head_dim, absent.pad_token_id) == (theirs.head_dim, theirs.pad_token_id)
    assert absent.rope == Rope(theirs.rope_parameters["rope_theta"])
    assert absent.rotated == absent.head_dim


def test_how_much_of_a_head_is_rotated_is_a_number_or_a_share() -> None:
    """The published configs have the number, and those that transformers writes anew the share, or both."""
    published = parse(MINIMAX_M2)
    for changes in ({"rotary_dim": "absent"}, {}):
        assert parse(MINIMAX_M2, rope_theta="absent", rope_parameters=SHARE, **changes) == published
    assert parse(MINIMAX_M2, rotary_dim="absent", partial_rotary_factor=0.5) == published
    assert parse(MINIMAX_M2, rotary_dim=96, rope_parameters={**SHARE, "partial_rotary_factor": 0.75}).rotary_dim == 96
    with pytest.raises(UserError, match=r"rotary_dim is 32; 64 is wanted, which partial_rotary_factor 0\.5 is of 128"):
        parse(MINIMAX_M2, rope_parameters=SHARE, rotary_dim=32)


def test_servers_are_told_what_transformers_does_not_write(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "minimax_m2", tokenizer=False)
    told = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 8}
    assert missing_settings(folder) == told
    (folder / "config.json").write_text(json.dumps(MINIMAX_M2))
    assert missing_settings(folder) == {}


def test_experts_with_scales_of_blocks_are_read_by_the_published_name_of_their_format(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "minimax_m2")
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": MINIMAX_M2["quantization_config"]})
    )
    assert load_model_config(folder).fp8_block == (128, 128)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_type_list": [1, 0] * (LAYERS // 2)}, r"attn_type_list=\[1, 0.*\(linear attention\)"),
        ({"shared_intermediate_size": 1536}, r"shared_intermediate_size=1536 \(shared experts\)"),
        ({"scoring_func": "softmax"}, r"scoring_func='softmax'"),
        ({"use_routing_bias": False}, r"use_routing_bias=False \(a choice of the experts by their scores alone\)"),
        ({"use_qk_norm": False}, r"use_qk_norm=False"),
        ({"qk_norm_type": "per_head"}, r"qk_norm_type='per_head'"),
        ({"rotary_dim": 130}, r"rotary_dim is 130; an even number of the head's 128 elements is wanted"),
        ({"rotary_dim": 63}, r"rotary_dim is 63; an even number"),
        ({"rotary_dim": 0}, r"rotary_dim is 0; a whole number from 2"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}}, r"fmt e4m3"),
    ],
)
def test_what_it_is_refused_for(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(MINIMAX_M2, **changes)
