"""Configs of Qwen3.5: what of them megarl reads as transformers does, and what it refuses; and sequences of several chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from megarl.core.errors import UserError
from megarl.models.config import Delta, Rope
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.packed import packed_params
from megarl.models.rules import expected_tensors
from megarl.training.parallel import Groups
from tests.models.test_families import SIZES, parse
from tests.models.test_gpt import PLATFORM, built
from tests.support.tiny import write_tiny_model
from tests.support.tolerances import Tolerance

# Qwen3.5-9B's text part, but for the number of layers.
QWEN3_5: dict[str, Any] = {
    **SIZES,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
}


def test_qwen3_5() -> None:
    config = parse(QWEN3_5)
    assert config.delta == Delta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4)
    assert config.linear_layers == {0, 1, 2, 4, 5, 6}
    assert (config.head_dim, config.rotated, config.rope) == (256, 64, Rope(1e7))
    assert config.output_gate and config.norm_offset and config.qk_norm and not config.post_norms
    assert (config.window, config.qkv_bias, config.mla) == (None, False, None)
    theirs = Qwen3_5TextConfig(num_hidden_layers=8)
    unsaid = parse(QWEN3_5, **dict.fromkeys(("full_attention_interval", "head_dim", "rope_parameters"), "absent"))
    assert (unsaid.linear_layers, unsaid.head_dim) == (config.linear_layers, theirs.head_dim)
    assert unsaid.rope.theta == theirs.rope_parameters["rope_theta"]
    assert unsaid.rotated == theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert [index in config.linear_layers for index in range(8)] == [
        kind == "linear_attention" for kind in theirs.layer_types
    ]
    assert parse(QWEN3_5, layer_types=["full_attention"] * 7 + ["linear_attention"]).linear_layers == {7}
    assert parse(QWEN3_5, layer_types=["full_attention"] * 8).delta is None
    assert parse(QWEN3_5, full_attention_interval=2).linear_layers == {0, 2, 4, 6}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": ["linear_attention"] * 7}, r"layer_types has 7 entries, and num_hidden_layers is 8"),
        ({"layer_types": ["sliding_attention"] * 8}, r"supported are 'full_attention' and 'linear_attention'"),
        ({"attn_output_gate": False}, r"attn_output_gate=False \(attention without a gate\) is not supported"),
        ({"linear_num_value_heads": 24}, r"linear_num_value_heads is 24; a multiple of linear_num_key_heads, 16"),
        ({"linear_key_head_dim": "absent"}, r"lacks linear_key_head_dim: it is not a whole config"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ({"use_sliding_window": True}, r"use_sliding_window=True \(sliding-window attention\)"),
        ({"partial_rotary_factor": 0.2, "rope_parameters": "absent"}, r"a share of the head's 256 elements"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(QWEN3_5, **changes)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_5")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(2)}, file)
    config = load_model_config(tmp_path)
    check_weights(expected_tensors(config), tmp_path, config)
    with pytest.raises(UserError, match=r"not in the config: mtp\.fc\.weight"):
        check_weights(expected_tensors(config), tmp_path, replace(config, family="qwen3"))


def test_states_go_from_chunk_to_chunk_as_in_transformers(one_rank: Groups, bounds: Tolerance, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3_5")
    lengths = (130, 64, 3)
    tokens = torch.randint(1, 128, (sum(lengths),), generator=torch.Generator().manual_seed(5))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    on = [tensor.to(PLATFORM.device) for tensor in (tokens, positions, edges)]
    with torch.no_grad():
        expected = torch.cat([theirs(part[None]).logits[0] for part in tokens.split(lengths)]).log_softmax(-1)
        ours = built(tmp_path, one_rank).eval()(on[0][None], on[1][None], None, packed_seq_params=packed_params(on[2]))
    assert (ours[0].float().cpu().log_softmax(-1) - expected).abs().max().item() < bounds.logprob
