"""Configs of Hunyuan, dense and with experts: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

from megarl.core.errors import UserError
from megarl.models.config import Moe, Rope
from megarl.models.rope import inverse_frequencies
from megarl.models.rules import expected_tensors
from megarl.serving.server_models import missing_settings
from tests.models.test_families import SIZES, of, parse
from tests.support.tiny import write_tiny_model

SCALING: dict[str, Any] = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}
# As Hunyuan-7B-Instruct's and Hunyuan-A13B-Instruct's, but for the number of layers.
HUNYUAN: dict[str, Any] = {
    **SIZES,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "bos_token_id": 1,
    "cla_share_factor": 2,
    "eos_token_id": 127960,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_experts": 1,
    "num_key_value_heads": 8,
    "pad_token_id": 127961,
    "rope_scaling": SCALING,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
LAYERS = SIZES["num_hidden_layers"]
EXPERTS: dict[str, Any] = {
    **HUNYUAN,
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "intermediate_size": 3072,
    "model_type": "hunyuan_v1_moe",
    "moe_drop_tokens": False,
    "moe_intermediate_size": [3072] * LAYERS,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * LAYERS,
    "num_experts": 64,
    "num_shared_expert": [1] * LAYERS,
    "use_mixed_mlp_moe": True,
}
BASE = 10000.0 * 1000.0 ** (128 / 126)


def test_hunyuan() -> None:
    config = parse(HUNYUAN)
    assert (config.family, config.head_dim, config.pad_token_id) == ("hunyuan_v1_dense", 128, 127961)
    assert config.qk_norm and config.late_qk_norm and not config.whole_qk_norm and not config.interleaved_rope
    assert config.rope == Rope(BASE)
    tensors = expected_tensors(config)
    assert tensors["model.layers.5.self_attn.query_layernorm.weight"] == (128,)
    assert "model.layers.5.self_attn.q_norm.weight" not in tensors
    theirs, absent = HunYuanDenseV1Config(head_dim=16), of("HunYuanDenseV1ForCausalLM", head_dim=16)
    assert (absent.pad_token_id, absent.tied_embeddings) == (theirs.pad_token_id, theirs.tie_word_embeddings)
    assert absent.rope == Rope(theirs.rope_parameters["rope_theta"])


def test_hunyuan_with_experts() -> None:
    config = parse(EXPERTS)
    assert (config.family, config.late_qk_norm, config.rope) == ("hunyuan_v1_moe", True, Rope(BASE))
    assert config.moe == Moe(64, 8, 3072, shared_ffn_hidden_size=3072)
    assert config.moe_layers == set(range(LAYERS))
    tensors = expected_tensors(config)
    assert tensors["model.layers.5.mlp.gate.wg.weight"] == (64, 4096)
    assert tensors["model.layers.5.mlp.shared_mlp.up_proj.weight"] == (3072, 4096)
    plain = {"moe_topk": 8, "num_shared_expert": 1, "moe_intermediate_size": 3072}
    for changes in (plain, {"moe_topk": "absent", "num_experts_per_tok": 8}, {"moe_intermediate_size": None}):
        assert parse(EXPERTS, **changes) == config


@pytest.mark.parametrize("alpha", [1000.0, 2.5, 0.5, 1])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_alpha_is_a_factor_of_the_base(alpha: float, key: str) -> None:
    scaling = {**SCALING, "alpha": alpha} | ({"rope_theta": 10000.0} if key == "rope_parameters" else {})
    ours = parse(HUNYUAN, **{"rope_scaling": None, key: scaling}).rope
    given = {key: deepcopy(scaling)} | ({} if key == "rope_parameters" else {"rope_theta": 10000.0})
    theirs = HunYuanDenseV1RotaryEmbedding(HunYuanDenseV1Config(head_dim=128, **given))
    torch.testing.assert_close(inverse_frequencies(ours, 128), theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.kind == "default" and theirs.attention_scaling == 1


def test_servers_are_told_what_transformers_does_not_write(tmp_path: Path) -> None:
    dense = write_tiny_model(tmp_path / "dense", "hunyuan_v1_dense", tokenizer=False)
    assert missing_settings(dense) == {"use_qk_norm": True}
    experts = write_tiny_model(tmp_path / "experts", "hunyuan_v1_moe", tokenizer=False)
    told = {"use_qk_norm": True, "use_mixed_mlp_moe": True, "num_shared_expert": 1, "moe_intermediate_size": 48}
    assert missing_settings(experts) == told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"type 'dynamic' without alpha is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, r"type 'yarn' before the norms of queries and keys"),
        ({"rope_scaling": SCALING | {"alpha": 1e300}}, r"alpha is 1e\+300; a factor of the base 10000 is wanted"),
        ({"rope_scaling": SCALING | {"alpha": 1e-9}}, r"alpha is 1e-09; a factor of the base"),
        ({"rope_scaling": SCALING | {"alpha": -1.0}}, r"alpha is -1\.0; a number over 0"),
        ({"head_dim": "absent"}, r"lacks head_dim"),
        ({"head_dim": None}, r"head_dim is None"),
        ({"head_dim": 2}, r"head_dim is 2; more than 2 elements"),
        ({"use_qk_norm": False}, r"use_qk_norm=False \(queries and keys without norms\)"),
        ({"use_cla": True}, r"use_cla=True \(keys and values of other layers\)"),
        ({"attention_bias": True}, r"attention_bias=True"),
        ({"use_mixed_mlp_moe": False}, r"use_mixed_mlp_moe=False \(experts without a shared one\)"),
        ({"num_shared_expert": [1, 2] * 3}, r"num_shared_expert=\[1, 2.*\(several shared experts\)"),
        (
            {"moe_intermediate_size": [3072, 1536] * 3},
            r"moe_intermediate_size is .*; 3072 is wanted, as intermediate_size",
        ),
        ({"moe_topk": [8, 4] * 3}, r"moe_topk is .*; a whole number, or a list of it for each layer"),
        ({"moe_topk": []}, r"moe_topk is \[\]; a whole number, or a list of it"),
        ({"moe_layer_num_skipped": 2}, r"moe_layer_num_skipped=2 \(layers without experts\)"),
        ({"moe_topk": 65}, r"num_experts_per_tok=65 of 64 experts"),
        ({"num_experts": [64] * LAYERS}, r"num_experts is \[64.*; a whole number"),
    ],
)
def test_what_it_is_refused_for(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(EXPERTS, **changes)


def test_a_dense_model_with_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_experts=64 \(experts\)"):
        parse(HUNYUAN, num_experts=64)
