"""Weights into a model of one rank and out again, bit by bit, and everything that does not fit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from megarl.core.errors import MegarlError, UserError
from megarl.core.layout import Layout
from megarl.models.config import ModelConfig
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import load_model_config
from megarl.models.hf_gather import Gatherer, export_buckets
from megarl.models.hf_weights import Bucket, Value, exact_buffers, global_tensors, load_hf_weights
from megarl.models.rules import expected_tensors, rules
from megarl.training.parallel import Groups
from tests.support.platforms import chosen
from tests.support.tiny import GEMMA4_EXPERTS, write_tiny_model

ONE = Layout()
CASES = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"vocab_size": 97}),
    ("mistral", {}),
    ("ministral3", {"tie_word_embeddings": True}),
    ("qwen3_5", {}),
    ("qwen3_5_moe", {}),
    ("qwen3_next", {}),
    ("qwen3_moe", {}),
    ("qwen2_moe", {}),
    ("phi3", {"tie_word_embeddings": True}),
    ("mixtral", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("apertus", {}),
    ("deepseek_v2", {}),
    ("ernie4_5", {"tie_word_embeddings": True}),
    ("ernie4_5_moe", {}),
    ("hunyuan_v1_dense", {}),
    ("hunyuan_v1_moe", {}),
    ("glm4", {}),
    ("glm4_moe", {}),
    ("glm4_moe_lite", {}),
    ("gpt_oss", {}),
    ("granite", {}),
    ("granitemoe", {}),
    ("olmo2", {}),
    ("olmo3", {"tie_word_embeddings": True}),
    ("exaone4", {}),
    ("smollm3", {"tie_word_embeddings": True}),
    ("seed_oss", {}),
    ("minimax_m2", {}),
    ("olmoe", {}),
    ("gemma3", {}),
    ("gemma4", {}),
    ("gemma4", GEMMA4_EXPERTS),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("experts") / "model", "deepseek_v3")


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def built(config: ModelConfig, groups: Groups, dtype: torch.dtype = torch.float32) -> list[Module]:
    return [*build_gpt(config, ONE, groups.collection, dtype=dtype, platform=chosen())]


def loaded(folder: Path, groups: Groups, dtype: torch.dtype = torch.float32) -> tuple[list[Module], ModelConfig]:
    config = load_model_config(folder)
    chunks = built(config, groups, dtype)
    load_hf_weights(chunks, config, folder, ONE, 0)
    return chunks, config


def buckets(
    chunks: list[Module], config: ModelConfig, limit: int = 1 << 30, value: Value | None = None
) -> list[Bucket]:
    exported = export_buckets(Gatherer(chunks, config, ONE, 0, None, value), limit)
    return [[(name, tensor.cpu()) for name, tensor in bucket] for bucket in exported]


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def change(folder: Path, **tensors: Tensor) -> None:
    save_file(stored(folder) | tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_export_gives_back_every_bit(family: str, overrides: dict[str, Any], one_rank: Groups, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family, **overrides)
    chunks, config = loaded(tmp_path, one_rank)
    found = dict(chain.from_iterable(buckets(chunks, config, 1 << 14)))
    expected = stored(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_buckets_keep_to_their_size(source: Path, one_rank: Groups) -> None:
    chunks, config = loaded(source, one_rank)
    limit = 40_000
    found = [[(name, tensor.nbytes) for name, tensor in bucket] for bucket in buckets(chunks, config, limit)]
    assert len(found) > 3
    for bucket in found:
        assert len(bucket) == 1 or sum(size for _, size in bucket) <= limit
    assert [name for bucket in found for name, _ in bucket] == list(expected_tensors(config))


def test_what_an_engine_fuses_while_it_loads_is_never_in_two_buckets(experts: Path, one_rank: Groups) -> None:
    chunks, config = loaded(experts, one_rank)
    for limit in (1, 1 << 12, 1 << 14):
        for bucket in buckets(chunks, config, limit):
            names = {name for name, _ in bucket}
            for name in names:
                if "q_a_proj" in name:
                    assert name.replace("q_a_proj", "kv_a_proj_with_mqa") in names
                if "kv_a_proj_with_mqa" in name:
                    assert name.replace("kv_a_proj_with_mqa", "q_a_proj") in names


def test_weights_are_cast_to_the_model(source: Path, one_rank: Groups) -> None:
    chunks, config = loaded(source, one_rank, torch.bfloat16)
    [bucket] = buckets(chunks, config)
    expected = stored(source)
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in bucket)


def test_the_score_bias_stays_exact_whatever_the_model_is(experts: Path, one_rank: Groups) -> None:
    chunks, config = loaded(experts, one_rank, torch.bfloat16)
    [bucket] = buckets(chunks, config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = dict(bucket)[name]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, stored(experts)[name])
    assert not torch.equal(bias, bias.bfloat16().float()), "rounding would show"


def test_casting_a_model_may_leave_its_score_bias_exact(experts: Path, one_rank: Groups) -> None:
    chunks, config = loaded(experts, one_rank)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with exact_buffers(chunks):
        chunks[0].bfloat16()
    found = dict(chain.from_iterable(buckets(chunks, config)))
    assert torch.equal(found[name], stored(experts)[name])
    assert found["model.norm.weight"].dtype == torch.bfloat16


def test_names_count_layers_and_experts_over_the_whole_model(experts: Path, one_rank: Groups) -> None:
    config = load_model_config(experts)
    chunks = built(config, one_rank)
    assert set(global_tensors(chunks, ONE, 0)) == {rule.megatron for rule in rules(config, "torch")}
    assert config.moe is not None
    # The same chunks as if they were the second of two expert-parallel ranks: numbers go on where the first's end.
    count = config.moe.num_experts
    names = set(global_tensors(chunks, Layout(ep=2, world_size=2), 1))
    last = f"decoder.layers.2.mlp.experts.local_experts.{count + count // 2 - 1}.linear_fc2.weight"
    assert last in names
    assert "decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight" not in names


def test_something_else_may_go_out_in_a_parameters_place(source: Path, one_rank: Groups) -> None:
    chunks, config = loaded(source, one_rank)
    seen = []

    def negated(name: str, parameter: Tensor) -> Tensor:
        seen.append(name)
        return -parameter.double()

    [bucket] = buckets(chunks, config, value=negated)
    expected = stored(source)
    assert all(torch.equal(tensor, -expected[name].double()) for name, tensor in bucket)
    assert set(seen) == {rule.megatron for rule in rules(config, "torch")}


def test_a_value_of_another_shape_is_an_error(source: Path, one_rank: Groups) -> None:
    chunks, config = loaded(source, one_rank)
    with pytest.raises(
        MegarlError, match=r"value to export for decoder\.layers\.0\.mlp\.linear_fc2\.weight is \[63, 128\]"
    ):
        buckets(
            chunks,
            config,
            value=lambda name, tensor: tensor[:-1] if name.endswith("0.mlp.linear_fc2.weight") else tensor,
        )


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "norm"), (float("inf"), "q_proj")])
def test_weights_that_are_no_numbers_are_named(value: float, shown: str, copy: Path, one_rank: Groups) -> None:
    name = {"norm": "model.norm.weight", "q_proj": "model.layers.1.self_attn.q_proj.weight"}[shown]
    tensor = stored(copy)[name]
    tensor[-1] = value
    change(copy, **{name: tensor})
    with pytest.raises(UserError, match=f"NaN or infinite: {name}") as error:
        loaded(copy, one_rank)
    assert str(copy) in str(error.value)
    config = load_model_config(copy)
    load_hf_weights(built(config, one_rank), config, copy, ONE, 0, check_finite=False)


def test_tensors_that_are_missing_too_many_or_misshapen_are_named(copy: Path, one_rank: Groups) -> None:
    tensors = stored(copy)
    tensors.pop("model.layers.1.self_attn.k_proj.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    tensors["model.odd"] = torch.zeros(1)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError) as error:
        loaded(copy, one_rank)
    for part in (
        "missing: model.layers.1.self_attn.k_proj.weight",
        "not in the config: model.odd",
        "model.norm.weight is [63]",
    ):
        assert part in str(error.value)


def test_a_parameter_that_no_rule_fills_is_an_error(source: Path, one_rank: Groups) -> None:
    chunks, config = loaded(source, one_rank)
    chunks[0].odd = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(MegarlError, match=r"No rule fills the parameters \['odd'\] of family qwen3"):
        load_hf_weights(chunks, config, source, ONE, 0)


def test_a_rule_that_meets_no_parameter_is_an_error(source: Path, one_rank: Groups) -> None:
    config = load_model_config(source)
    with pytest.raises(MegarlError, match=r"q_layernorm\.weight is not there"):
        load_hf_weights(built(replace(config, qk_norm=False), one_rank), config, source, ONE, 0)


def test_a_part_of_another_shape_is_an_error(source: Path, one_rank: Groups) -> None:
    config = load_model_config(source)
    with pytest.raises(MegarlError, match=r"word_embeddings\.weight has shape \[130, 64\]; its rule gives \[128, 64\]"):
        load_hf_weights(built(replace(config, vocab_size=130), one_rank), config, source, ONE, 0)
