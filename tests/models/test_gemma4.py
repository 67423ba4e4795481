"""Gemma 4: what of its configs megarl reads as transformers does, and what its layers are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.core.platform import PlatformName, get_platform
from megarl.models.config import GlobalHeads, Moe, Rope
from megarl.models.flops import forward_flops
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import load_model_config
from megarl.models.layout_check import cuts_servers, layout_problems
from megarl.models.rope import inverse_frequencies
from megarl.models.rules import expected_tensors
from megarl.placement.roofline import attention_elements, attention_products
from megarl.placement.sizes import kv_bytes, model_sizes
from megarl.recipe.load import load_recipe
from megarl.run.model_check import check_experts
from megarl.serving.server_models import missing_settings
from megarl.training.parallel import Groups
from tests.models.test_families import SIZES, of, parse
from tests.support.bad_input import good_place
from tests.support.platforms import chosen
from tests.support.tiny import GEMMA4_EXPERTS, write_tiny_model

# As the text part of gemma-4-31B's.
ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
GEMMA4: dict[str, Any] = {
    **SIZES,
    "architectures": ["Gemma4ForCausalLM"],
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * 10,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPES,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
EVERYWHERE, LOCAL = Rope(1e6, "proportional", share=0.25), Rope(1e4)


def test_gemma4() -> None:
    config = parse(GEMMA4)
    assert (config.family, config.tied_embeddings, config.pad_token_id) == ("gemma4", True, 0)
    assert config.global_heads == GlobalHeads(4, 512, keys_as_values=True)
    assert (config.rope, config.local_rope, config.window) == (EVERYWHERE, LOCAL, 1024)
    assert config.local_layers == {index for index in range(60) if (index + 1) % 6}
    assert (config.query_scale, config.embedding_scale, config.logit_cap) == (1.0, 5376**0.5, 30.0)
    assert (config.norm_offset, config.pre_norms, config.post_norms, config.value_norm) == (False, True, True, True)
    shapes = expected_tensors(config)
    attention = {
        name.removeprefix("model.layers.5.self_attn."): shape
        for name, shape in shapes.items()
        if name.startswith("model.layers.5.self_attn.")
    }
    assert attention == {
        "q_proj.weight": (32 * 512, 5376),
        "k_proj.weight": (4 * 512, 5376),
        "q_norm.weight": (512,),
        "k_norm.weight": (512,),
        "o_proj.weight": (5376, 32 * 512),
    }
    assert shapes["model.layers.4.self_attn.v_proj.weight"] == (16 * 256, 5376)
    assert shapes["model.layers.5.layer_scalar"] == (1,)
    assert round(model_sizes(config).total / 1e9, 1) == 30.7  # as its card has it


def test_what_no_key_says_is_as_in_transformers() -> None:
    theirs = Gemma4TextConfig(num_hidden_layers=7)
    ours = of("Gemma4ForCausalLM", num_hidden_layers=7, hidden_size_per_layer_input=0)
    assert ours.local_layers == {i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"}
    assert theirs.layer_types[-1] == "full_attention"
    assert (ours.window, ours.head_dim) == (theirs.sliding_window, theirs.head_dim)
    assert ours.global_heads == GlobalHeads(2, theirs.global_head_dim, keys_as_values=theirs.attention_k_eq_v)
    assert (ours.tied_embeddings, ours.logit_cap) == (theirs.tie_word_embeddings, theirs.final_logit_softcapping)
    assert (ours.rope, ours.local_rope) == (EVERYWHERE, LOCAL)
    assert theirs.rope_parameters == ROPES
    assert Gemma4TextConfig().hidden_size_per_layer_input == 256  # so that a config without the key is refused


@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_frequencies_are_transformers(share: float) -> None:
    given = {"full_attention": {**ROPES["full_attention"], "partial_rotary_factor": share}}
    theirs = Gemma4TextConfig(rope_parameters={**ROPES, **given}, global_head_dim=24)
    expected, factor = ROPE_INIT_FUNCTIONS["proportional"](
        theirs, device=None, layer_type="full_attention", head_dim_key="global_head_dim"
    )
    found = inverse_frequencies(Rope(1e6, "proportional", share=share), 24)
    assert factor == 1.0
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert int((found > 0).sum()) == int(share * 12)


def test_each_kind_of_heads_is_counted() -> None:
    config = parse(GEMMA4)
    wide, narrow = 32 * 512, 32 * 256
    local = 50 * 5376 * (2 * narrow + 2 * 16 * 256)
    everywhere = 10 * 5376 * (2 * wide + 4 * 512)
    assert forward_flops(config, [1]).projections == pytest.approx(2 * (local + everywhere))
    pairs = 2000 * 2001 / 2, 1024 * 1025 / 2 + 976 * 1024
    expected = 2 * (10 * pairs[0] * 2 * wide + 50 * pairs[1] * 2 * narrow)
    assert forward_flops(config, [2000]).attention == pytest.approx(expected)
    # Values are kept beside keys, though they are made of the same.
    assert kv_bytes(config, 1, 2) == pytest.approx(2 * 2 * (50 * 16 * 256 + 10 * 4 * 512))
    assert kv_bytes(config, 8, 2) == pytest.approx(2 * 2 * (50 * 2 * 256 + 10 * 1 * 512))
    weights = sum(float(inner * columns) for inner, columns in attention_products(config, 1))
    assert weights * 60 == pytest.approx(local + everywhere)
    assert attention_elements(config, 1) == pytest.approx(
        10 * 5376 + (50 * (6 * 32 + 8 * 16) * 256 + 10 * (6 * 32 + 8 * 4) * 512) / 60
    )


def test_layouts_and_servers_cut_both_kinds_of_heads() -> None:
    config = parse(GEMMA4)
    for tp, fits in ((2, True), (4, True), (8, True), (16, True), (3, False)):
        assert (layout_problems(config, Layout(tp=tp, world_size=tp)) == []) is fits
        assert cuts_servers(config, tp) is fits
    three = parse(GEMMA4, num_attention_heads=48, num_global_key_value_heads=3)
    [problem] = layout_problems(three, Layout(tp=2, world_size=2))
    assert "3 key-value heads" in problem
    assert not cuts_servers(three, 2)


def test_what_multiplies_a_layers_output_does_not_learn(one_rank: Groups, tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(tmp_path, "gemma4"))
    [model] = build_gpt(config, Layout(), one_rank.collection, dtype=torch.bfloat16, platform=chosen())
    fixed = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    assert set(fixed) == {f"decoder.layers.{index}.layer_scale" for index in range(3)}
    assert {each.dtype for each in fixed.values()} == {torch.bfloat16}  # so that it is exported as it came


def test_servers_are_told_the_heads_of_both_kinds(tmp_path: Path) -> None:
    """Of a text part's config SGLang takes those of layers with a window for all."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    assert missing_settings(tmp_path) == {
        **{"head_dim": 512, "v_head_dim": 512, "num_key_value_heads": 4},
        **{"swa_head_dim": 256, "swa_v_head_dim": 256, "swa_num_key_value_heads": 16},
    }
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4 | {"attention_k_eq_v": False}))
    assert missing_settings(tmp_path)["num_key_value_heads"] == 16


def test_experts_stand_beside_the_mlp() -> None:
    """As the text part of gemma-4-26B-A4B's."""
    sizes = {"hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8}
    experts = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    layers = {"num_hidden_layers": 30, "num_global_key_value_heads": 2, "layer_types": GEMMA4["layer_types"][:30]}
    config = parse(GEMMA4, **sizes, **experts, **layers)
    assert config.moe == Moe(128, 8, 704, shared_ffn_hidden_size=2112, normed=True)
    assert config.moe_layers == set(range(30))
    shapes = expected_tensors(config)
    prefix = "model.layers.3."
    assert {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith((f"{prefix}router", f"{prefix}experts", f"{prefix}mlp"))
    } == {
        "mlp.gate_proj.weight": (2112, 2816),
        "mlp.up_proj.weight": (2112, 2816),
        "mlp.down_proj.weight": (2816, 2112),
        "router.scale": (2816,),
        "router.proj.weight": (128, 2816),
        "router.per_expert_scale": (128,),
        "experts.gate_up_proj": (128, 2 * 704, 2816),
        "experts.down_proj": (128, 2816, 704),
    }
    assert {name.removeprefix(prefix) for name in shapes if name.startswith(prefix) and "feedforward" in name} == {
        *("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"),
        *("pre_feedforward_layernorm_2.weight", "post_feedforward_layernorm_1.weight"),
        "post_feedforward_layernorm_2.weight",
    }
    assert round(model_sizes(config).total / 1e9, 1) == 25.2


def test_a_run_whose_servers_would_keep_an_old_scale_of_the_router_is_refused(tmp_path: Path) -> None:
    """SGLang makes a copy of it at the first request, which no update of weights changes."""
    model = load_model_config(write_tiny_model(tmp_path / "source" / "model", "gemma4", **GEMMA4_EXPERTS))
    place = good_place(tmp_path, tmp_path / "source" / "model")

    def check(*overrides: str, platform: PlatformName = "cuda") -> None:
        check_experts(load_recipe(place.recipe, overrides).recipe, model, get_platform(platform))

    with pytest.raises(UserError, match=r"`actor.optimizer.freeze_router` is false.*Set it to true, or train adapters"):
        check()
    check("actor.optimizer.freeze_router=true")
    check("actor.lora={rank: 4, alpha: 8}")
    check(platform="cpu")  # where megarl's adapter multiplies by what is there


def ropes(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**ROPES, kind: {**ROPES[kind], **changes}}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size_per_layer_input": 256}, r"hidden_size_per_layer_input=256 \(embeddings of each layer\)"),
        ({"hidden_size_per_layer_input": "absent"}, r"hidden_size_per_layer_input=256, where no key says"),
        ({"num_kv_shared_layers": 20}, r"num_kv_shared_layers=20 \(layers with the keys and values of others\)"),
        ({"enable_moe_block": True}, r"moe_intermediate_size is None"),
        ({"enable_moe_block": True, "top_k_experts": "absent"}, r"lacks top_k_experts"),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention='all'"),
        ({"attention_bias": True}, r"attention_bias=True"),
        ({"hidden_activation": "silu"}, r"hidden_activation='silu'"),
        ({"final_logit_softcapping": 0}, r"final_logit_softcapping is 0"),
        ({"num_global_key_value_heads": None}, r"num_global_key_value_heads is None"),
        ({"num_global_key_value_heads": 5}, r"num_global_key_value_heads 5 does not divide num_attention_heads 32"),
        ({"num_key_value_heads": "absent"}, r"lacks num_key_value_heads"),
        ({"global_head_dim": 0}, r"global_head_dim is 0"),
        ({"global_head_dim": 25}, r"global_head_dim is 25; RoPE turns pairs"),
        ({"sliding_window": None, "layer_types": "absent"}, r"sliding_window is None"),
        ({"layer_types": ["sliding_attention"] * 60}, r"layer_types is 'sliding_attention'.*of the last layer"),
        ({"sliding_window_pattern": 4}, r"sliding_window_pattern=4"),
        ({"rope_scaling": {"factor": 2.0}}, r"rope_scaling is"),
        (ropes("full_attention", rope_type="default"), r"of full_attention 'proportional' is wanted"),
        (ropes("sliding_attention", rope_type="linear"), r"of sliding_attention 'default' is wanted"),
        (ropes("full_attention", factor=8.0), r"factor is 8.0"),
        (ropes("full_attention", partial_rotary_factor=1.5), r"partial_rotary_factor is 1.5"),
        (ropes("full_attention", rope_theta=None), r"rope_theta is None"),
        (ropes("sliding_attention", partial_rotary_factor=0.5), r"partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}}, r"of sliding_attention 'default' is wanted"),
    ],
)
def test_what_it_is_refused_for(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(GEMMA4, **changes)
