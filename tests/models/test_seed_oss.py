"""Configs of Seed-OSS: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import SeedOssConfig

from megarl.core.errors import UserError
from megarl.models.config import Rope
from megarl.models.rules import expected_tensors
from tests.models.test_families import SIZES, of, parse

# Seed-OSS-36B-Instruct's own, but for the number of layers.
SEED_OSS: dict[str, Any] = {
    **SIZES,
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "pad_token_id": 1,
    "pretraining_tp": 1,
    "residual_dropout": 0.1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 155136,
}


def test_seed_oss() -> None:
    config = parse(SEED_OSS)
    assert (config.family, config.head_dim, config.rope, config.pad_token_id) == ("seed_oss", 128, Rope(1e7), 1)
    assert (config.qkv_bias, config.output_bias, config.qk_norm, config.window) == (True, False, False, None)
    assert not parse(SEED_OSS, attention_bias=False).qkv_bias
    theirs, absent = SeedOssConfig(), of("SeedOssForCausalLM")
    assert (absent.qkv_bias, absent.output_bias) == (theirs.attention_bias, theirs.attention_out_bias)
    assert (absent.head_dim, absent.pad_token_id) == (theirs.head_dim, theirs.pad_token_id)
    assert absent.rope == Rope(theirs.rope_parameters["rope_theta"])
    # Of other families the key says nothing, and the heads of a null are as wide as the rest.
    assert not parse(
        SEED_OSS, architectures=["Qwen2ForCausalLM"], model_type="qwen2", attention_out_bias=True
    ).output_bias
    assert parse(SEED_OSS, head_dim=None).head_dim == SeedOssConfig(hidden_size=5120, head_dim=None).head_dim == 64


def test_the_bias_behind_attention_is_one_more_tensor_a_layer() -> None:
    biased, plain = (expected_tensors(parse(SEED_OSS, attention_out_bias=asked)) for asked in (True, False))
    more = {f"model.layers.{layer}.self_attn.o_proj.bias": (5120,) for layer in range(6)}
    assert biased == plain | more


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mlp_bias": True}, r"mlp_bias=True \(biases in the MLP\)"),
        ({"attention_out_bias": "yes"}, r"attention_out_bias is 'yes'; true or false is wanted"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(another activation\)"),
    ],
)
def test_what_it_is_refused_for(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(SEED_OSS, **changes)
