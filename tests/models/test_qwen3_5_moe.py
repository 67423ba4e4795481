"""Qwen3.5 with experts and Qwen3-Next: what megarl reads of their configs, and experts in one tensor or one by one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5MoeTextConfig, Qwen3NextConfig

from megarl.convert.hf_tensors import hf_tensors
from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.config import Delta, Moe
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.hf_gather import Gatherer, export_buckets
from megarl.models.rules import expected_tensors
from megarl.training.parallel import Groups
from tests.models.parity import megatron_logits, transformers_logprobs
from tests.models.test_families import parse
from tests.models.test_gpt import built
from tests.models.test_qwen3_5 import QWEN3_5
from tests.support.fp8 import dequantised, write_fp8
from tests.support.tiny import write_tiny_model
from tests.support.tolerances import Tolerance

EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
# Qwen3.5-35B-A3B's text part, but for the number of layers.
QWEN3_5_MOE = {key: value for key, value in QWEN3_5.items() if key != "intermediate_size"} | {
    **EXPERTS,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "mlp_only_layers": [],
    "mtp_use_dedicated_embeddings": False,
    "output_router_logits": False,
}
# Qwen3-Next-80B-A3B-Instruct's, but for the number of layers.
QWEN3_NEXT = {
    key: value for key, value in QWEN3_5.items() if key not in ("rope_parameters", "mtp_num_hidden_layers")
} | {
    **EXPERTS,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "use_sliding_window": False,
}
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
UP = "model.layers.0.mlp.experts.3.up_proj.weight"


def test_qwen3_5_moe() -> None:
    config = parse(QWEN3_5_MOE)
    assert config.moe == Moe(256, 8, 512, shared_ffn_hidden_size=512, shared_gate=True)
    assert config.moe_layers == frozenset(range(8)) and config.linear_layers == {0, 1, 2, 4, 5, 6}
    assert config.delta == Delta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4)
    assert (config.head_dim, config.rotated, config.rope.theta) == (256, 64, 1e7)
    assert config.output_gate and config.norm_offset and config.qk_norm
    theirs = Qwen3_5MoeTextConfig(num_hidden_layers=8)
    unsaid = parse(QWEN3_5_MOE, **dict.fromkeys(("full_attention_interval", "head_dim", "rope_parameters"), "absent"))
    assert (unsaid.head_dim, unsaid.rope.theta) == (theirs.head_dim, theirs.rope_parameters["rope_theta"])
    assert [index in unsaid.linear_layers for index in range(8)] == [
        kind == "linear_attention" for kind in theirs.layer_types
    ]


def test_qwen3_next() -> None:
    config = parse(QWEN3_NEXT)
    assert config.moe == Moe(512, 10, 512, shared_ffn_hidden_size=512, shared_gate=True)
    assert config.moe_layers == frozenset(range(8)) and config.linear_layers == {0, 1, 2, 4, 5, 6}
    assert (config.head_dim, config.rotated, config.rope.theta) == (256, 64, 1e7)
    unsaid = parse(QWEN3_NEXT, norm_topk_prob="absent", partial_rotary_factor="absent")
    assert unsaid == config and Qwen3NextConfig().norm_topk_prob
    assert not parse(QWEN3_NEXT, norm_topk_prob=False).moe.normalize  # type: ignore[union-attr]
    assert parse(QWEN3_NEXT, decoder_sparse_step=2, mlp_only_layers=[3]).moe_layers == {1, 5, 7}


@pytest.mark.parametrize(
    ("raw", "changes", "says"),
    [
        (QWEN3_5_MOE, {"norm_topk_prob": False}, r"norm_topk_prob=False \(scores that are not divided by their sum\)"),
        (QWEN3_5_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] \(layers without experts\)"),
        (QWEN3_5_MOE, {"decoder_sparse_step": 2}, r"decoder_sparse_step=2 \(layers without experts\)"),
        (QWEN3_5_MOE, {"num_experts": "absent"}, r"lacks num_experts: it is not a whole config"),
        (QWEN3_5_MOE, {"shared_expert_intermediate_size": "absent"}, r"lacks shared_expert_intermediate_size: it"),
        (QWEN3_5_MOE, {"attn_output_gate": False}, r"attn_output_gate=False \(attention without a gate\)"),
        (QWEN3_5_MOE, {"model_type": "qwen3_5_moe"}, r"Set model_type to 'qwen3_5_moe_text'"),
        (QWEN3_NEXT, {"intermediate_size": "absent"}, r"lacks intermediate_size: it is not a whole config"),
        (QWEN3_NEXT, {"use_sliding_window": True}, r"use_sliding_window=True \(sliding-window attention\)"),
        (QWEN3_NEXT, {"num_experts_per_tok": 1}, r"the router would have no gradient"),
    ],
)
def test_what_is_not_supported(raw: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(raw, **changes)


def one_tensor(folder: Path) -> Path:
    """Write a folder's experts as the published ones have them: all of a layer in two tensors."""
    found = load_file(folder / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            [found.pop(f"{prefix}{expert}.{kind}_proj.weight") for expert in range(8)]
            for kind in ("gate", "up", "down")
        )
        found[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        found[f"{prefix}down_proj"] = torch.stack(downs)
    save_file(found, folder / "model.safetensors")
    return folder


def exported(folder: Path, groups: Groups) -> dict[str, Tensor]:
    gatherer = Gatherer([built(folder, groups)], load_model_config(folder), Layout(), 0, None, None)
    return {name: tensor.cpu() for name, tensor in chain.from_iterable(export_buckets(gatherer, 1 << 14))}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def test_experts_in_one_tensor_are_read_and_written_one_by_one(
    one_rank: Groups, bounds: Tolerance, tmp_path: Path
) -> None:
    apart = load_file(write_tiny_model(tmp_path, "qwen3_5_moe") / "model.safetensors")
    stored = load_file(one_tensor(tmp_path) / "model.safetensors")
    assert UP in apart and GATE_UP in stored and DOWN in stored and not stored.keys() & {UP}
    assert_same(exported(tmp_path, one_rank), apart)
    assert_same(dict(hf_tensors(tmp_path)), apart)
    logprobs = megatron_logits(built(tmp_path, one_rank).eval(), 128).log_softmax(-1)
    assert (logprobs - transformers_logprobs(tmp_path, 128)).abs().max() < bounds.logprob


def test_experts_in_fp8_lie_one_by_one(one_rank: Groups, tmp_path: Path) -> None:
    block = (16, 24)
    write_fp8(write_tiny_model(tmp_path, "qwen3_5_moe"), block)
    assert_same(exported(tmp_path, one_rank), dequantised(tmp_path, block, torch.float32))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "shape",
            r"of another shape: model\.layers\.0\.mlp\.experts\.gate_up_proj is \[8, 95, 64\], .* \[8, 96, 64\]\.",
        ),
        ("both", r"not in the config: model\.layers\.0\.mlp\.experts\.down_proj\."),
        ("missing", r"missing: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight, .* and 3 more"),
        ("dtype", r"of another type: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight is I32"),
    ],
)
def test_experts_in_one_tensor_are_held_against_the_config(what: str, says: str, tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path, "qwen3_5_moe") / "model.safetensors"
    apart = load_file(file)
    found = load_file(one_tensor(tmp_path) / "model.safetensors")
    config = load_model_config(tmp_path)
    check_weights(expected_tensors(config), tmp_path, config)
    if what == "shape":
        found[GATE_UP] = found[GATE_UP][:, :-1].contiguous()
    elif what == "both":
        found = apart | {DOWN: found[DOWN]}
    elif what == "missing":
        del found[DOWN]
    else:
        found[DOWN] = found[DOWN].int()
    save_file(found, file)
    with pytest.raises(UserError, match=says):
        check_weights(expected_tensors(config), tmp_path, config)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_layers_that_predict_further_tokens_are_passed_over(family: str, tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path, family) / "model.safetensors"
    extra = {"mtp.fc.weight": torch.zeros(2), "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    save_file(load_file(file) | extra, file)
    config = load_model_config(tmp_path)
    check_weights(expected_tensors(config), tmp_path, config)
