"""Configs of gpt-oss: what of them megarl reads as transformers does, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import GptOssConfig

from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import Moe, Rope
from megarl.models.layout_check import layout_problems
from tests.models.test_families import PATH, SIZES, parse

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
# gpt-oss-20b's own, but for the number of layers.
OSS: dict[str, Any] = {
    **SIZES,
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}


def test_gpt_oss_20b() -> None:
    config = parse(OSS)
    assert config.moe == Moe(32, 4, 2880, biases=True)
    assert (config.sinks, config.qkv_bias, config.qk_norm, config.head_dim) == (True, True, False, 64)
    assert (config.activation, config.mxfp4, config.fp8_block) == ("swiglu_clamped", True, None)
    assert (config.window, config.local_layers) == (128, {0, 2, 4})
    assert config.rope == Rope(150000.0, "yarn", factor=32.0, original_positions=4096, truncate=False)


def test_what_no_key_says_is_what_transformers_takes() -> None:
    theirs = GptOssConfig(num_hidden_layers=6, num_local_experts=32)
    absent = ("attention_bias", "head_dim", "layer_types", "quantization_config", "rope_scaling", "rope_theta")
    found = parse(OSS, **dict.fromkeys((*absent, "sliding_window", "swiglu_limit"), "absent"))
    assert theirs.rope_parameters["rope_theta"] == found.rope.theta
    assert replace(parse(OSS), mxfp4=False) == found
    local = {index for index, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"}
    assert (found.head_dim, found.window, found.local_layers) == (theirs.head_dim, theirs.sliding_window, local)


def test_layers_with_windows_are_those_that_are_named() -> None:
    named = ["full_attention"] * 4 + ["sliding_attention"] * 2
    assert parse(OSS, layer_types=named).local_layers == {4, 5}
    assert parse(OSS, layer_types=["full_attention"] * 6).window is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": False}, ["attention_bias=False (attention without biases)"]),
        ({"swiglu_limit": 10.0}, ["swiglu_limit=10.0"]),
        ({"hidden_act_alpha": 1.0}, ["hidden_act_alpha=1.0"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"sliding_window": None}, ["layer_types with sliding_attention in layers 0, 2, 4", "no layer"]),
        ({"layer_types": ["chunked_attention"] * 6}, ["'chunked_attention'"]),
        ({"num_experts_per_tok": 1}, ["num_experts_per_tok=1"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config is"]),
        ({"rope_scaling": YARN | {"rope_type": "longrope"}}, ["'longrope'"]),
        ({"num_local_experts": "absent"}, ["lacks num_local_experts"]),
    ],
)
def test_what_the_models_do_not_do_is_refused(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        parse(OSS, **changes)
    assert all(text in str(refused.value) for text in [str(PATH), *said]), refused.value


def test_experts_with_biases_are_not_cut() -> None:
    config = parse(OSS)
    assert layout_problems(config, Layout(tp=2, pp=2, ep=4, cp=2, sequence_parallel=True, world_size=8)) == []
    [problem] = layout_problems(config, Layout(tp=2, etp=2, sequence_parallel=True, world_size=2))
    assert "etp 2 is not for experts with biases" in problem


def test_rope_that_says_nothing_is_not_scaled() -> None:
    """As transformers has an object that is there and empty; an empty `rope_scaling` it takes for none at all."""
    assert parse(OSS, rope_scaling="absent", rope_parameters={}).rope == Rope(150000.0)
    assert parse(OSS, rope_scaling={}).rope == parse(OSS, rope_scaling="absent").rope != Rope(150000.0)
