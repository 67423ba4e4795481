"""Configs of OLMo-2, OLMo-3 and OLMoE: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Olmo2Config, Olmo3Config, OlmoeConfig

from megarl.core.errors import UserError
from megarl.models.config import Moe, Rope
from tests.models.test_families import SIZES, parse

# OLMo-2-0325-32B's sizes, but for the number of layers.
OLMO2: dict[str, Any] = {
    **SIZES,
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
# Olmo-3-7B's, but for the number of layers.
OLMO3: dict[str, Any] = {
    **OLMO2,
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 8,
    "rope_scaling": YARN,
    "sliding_window": 4096,
}

# OLMoE-1B-7B-0125's, but for the number of layers.
OLMOE: dict[str, Any] = {
    **SIZES,
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 16,
    "pad_token_id": 1,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def test_olmo_2() -> None:
    config = parse(OLMO2)
    assert (config.family, config.head_dim, config.num_kv_heads, config.rope) == ("olmo2", 128, 8, Rope(5e5))
    assert config.qk_norm and config.whole_qk_norm and config.post_norms and not config.pre_norms
    assert (config.window, config.local_rope, config.qkv_bias, config.activation) == (None, None, False, "silu")
    theirs = Olmo2Config()
    absent = parse(OLMO2, pad_token_id="absent", rope_theta="absent", tie_word_embeddings="absent")
    assert absent.pad_token_id == theirs.pad_token_id
    assert absent.rope.theta == theirs.rope_parameters["rope_theta"]
    assert absent.tied_embeddings == theirs.tie_word_embeddings
    with pytest.raises(UserError, match=r"attention_bias=True \(biases in attention\) is not supported"):
        parse(OLMO2, attention_bias=True)


def test_olmo_3_scales_the_positions_of_its_global_layers_alone() -> None:
    config = parse(OLMO3)
    assert (config.window, config.local_layers) == (4096, {0, 1, 2, 4, 5, 6})
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("yarn", 5e5, 8.0)
    assert config.local_rope == Rope(5e5)
    assert config.whole_qk_norm and config.post_norms and not config.pre_norms
    unscaled = parse(OLMO3, rope_scaling=None)
    assert (unscaled.rope, unscaled.local_rope) == (Rope(5e5), None)  # all layers have the same
    newer = {"rope_theta": "absent", "rope_scaling": "absent", "rope_parameters": YARN | {"rope_theta": 500000}}
    assert parse(OLMO3, **newer) == config
    theirs = Olmo3Config(num_hidden_layers=8)
    assert [index for index, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"] == sorted(
        parse(OLMO3, sliding_window="absent").local_layers
    )
    assert parse(OLMO3, sliding_window="absent").window == theirs.sliding_window


def test_olmoe() -> None:
    config = parse(OLMOE)
    assert (config.family, config.head_dim, config.rope, config.moe_layers) == ("olmoe", 128, Rope(1e4), set(range(6)))
    assert config.qk_norm and config.whole_qk_norm and config.pre_norms and not config.post_norms
    assert config.moe == Moe(64, 8, 1024, normalize=False)
    absent = parse(
        OLMOE, **dict.fromkeys(("pad_token_id", "norm_topk_prob", "tie_word_embeddings", "rope_theta"), "absent")
    )
    assert absent == config
    theirs = OlmoeConfig()
    assert (theirs.pad_token_id, theirs.norm_topk_prob, theirs.tie_word_embeddings) == (1, False, False)
    assert theirs.rope_parameters["rope_theta"] == absent.rope.theta
    with pytest.raises(UserError, match=r"clip_qkv=8\.0 \(clipped queries, keys and values\) is not supported"):
        parse(OLMOE, clip_qkv=8.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window_pattern": 2}, r"sliding_window_pattern=2 \(other layers with windows\)"),
        ({"clip_qkv": 8.0, "hidden_act": "gelu"}, r"hidden_act='gelu'"),
        (
            {"rope_scaling": "absent", "rope_parameters": {"full_attention": YARN, "sliding_attention": {}}},
            r"an object for each kind of layers.*Write what is in rope_parameters\.full_attention in its place",
        ),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(OLMO3, **changes)
