"""Experts in MXFP4 against transformers' own way with them, and folders whose parts do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.convert.hf_tensors import hf_tensors
from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.gpt import build_gpt
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.hf_gather import Gatherer, export_buckets
from megarl.models.hf_read import BLOCK_BYTES, unpacked
from megarl.models.hf_weights import load_hf_weights
from megarl.models.rules import expected_tensors
from megarl.training.parallel import Groups
from tests.support.platforms import chosen
from tests.support.tiny import write_tiny_model

ONE = Layout()
EXPERTS = ("gate_up_proj", "down_proj")
FIRST = "model.layers.0.mlp.experts.gate_up_proj"
Tensors = dict[str, Tensor]


def quantised(folder: Path) -> Path:
    """The folder with random experts in MXFP4 in the place of its own, as gpt-oss is published."""
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        experts, width, rows = tensors.pop(name).shape
        shape = experts, rows, width // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        tensors[f"{name}_scales"] = torch.randint(117, 123, shape, dtype=torch.uint8, generator=random)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": told}))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    return quantised(write_tiny_model(folder, "gpt_oss", intermediate_size=96, num_hidden_layers=2))


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def dequantised(folder: Path) -> Tensors:
    """Every tensor, experts as transformers computes them."""
    found = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in found if name.endswith("_blocks")]:
        found[name] = convert_moe_packed_tensors(found.pop(f"{name}_blocks"), found.pop(f"{name}_scales"))
    return found


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit: zeros have signs."""
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def test_every_value_at_every_power_is_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(256, 16, 1, 16).contiguous()
    powers = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 16, 1).contiguous()
    expected = convert_moe_packed_tensors(blocks, powers).transpose(1, 2)
    assert all(same(unpacked(*each), wanted) for *each, wanted in zip(blocks, powers, expected, strict=True))
    assert expected[127, 0, :4].tolist() == [0.0, 0.0, 0.5, 0.0]  # bytes 0 and 1: the low bits come first


def exported(folder: Path, one_rank: Groups) -> Tensors:
    """Through a bfloat16 model of one rank."""
    config = load_model_config(folder)
    chunks = build_gpt(config, ONE, one_rank.collection, dtype=torch.bfloat16, platform=chosen())
    load_hf_weights(chunks, config, folder, ONE, 0)
    buckets = export_buckets(Gatherer(chunks, config, ONE, 0, None), 1 << 14)
    return {name: tensor.cpu() for bucket in buckets for name, tensor in bucket}


@pytest.mark.parametrize("block_bytes", [1, BLOCK_BYTES])
def test_a_published_folder_is_read_and_leaves_unquantised_as_transformers_reads_it(
    block_bytes: int, folder: Path, one_rank: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.models.hf_read.BLOCK_BYTES", block_bytes)  # a row at a time
    config, expected = load_model_config(folder), dequantised(folder)
    assert config.mxfp4
    found = exported(folder, one_rank)
    assert found.keys() == expected.keys() == expected_tensors(config).keys()
    assert [name for name in expected if not same(found[name], expected[name].bfloat16())] == []
    assert [name for name, tensor in hf_tensors(folder) if not same(tensor, expected[name])] == []


def test_unquantised_experts_of_one_tensor_are_read_in_blocks(
    tmp_path: Path, one_rank: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model", "gpt_oss", num_hidden_layers=1)
    monkeypatch.setattr("megarl.models.hf_read.BLOCK_BYTES", 1)
    expected = load_file(folder / "model.safetensors")
    found = exported(folder, one_rank)
    assert [name for name in expected if not same(found[name], expected[name].bfloat16())] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{FIRST}_scales"), ["missing", FIRST]),
        (
            lambda t: t.update({f"{FIRST}_scales": t[f"{FIRST}_scales"][:, 1:].clone()}),
            ["another form", "_scales is [8, 191"],
        ),
        (lambda t: t.update({f"{FIRST}_blocks": t[f"{FIRST}_blocks"].to(torch.int8)}), ["another form", "I8"]),
        (lambda t: t.update({FIRST: torch.zeros(8, 64, 192)}), ["not in the config", f"{FIRST}_blocks"]),
    ],
)
def test_parts_that_do_not_fit_are_refused(folder: Path, change: Callable[[Tensors], object], said: list[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = load_model_config(folder)
    with pytest.raises(UserError) as refused:
        check_weights(expected_tensors(config), folder, config)
    assert all(text in str(refused.value) for text in said), refused.value


def test_a_config_that_says_quantised_of_experts_that_are_not(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "gpt_oss", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    read = load_model_config(folder)
    with pytest.raises(UserError, match="no experts are MXFP4"):
        check_weights(expected_tensors(read), folder, read)
    other = write_tiny_model(tmp_path / "other", num_hidden_layers=1)
    config = json.loads((other / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantization_config is"):
        load_model_config(other)


def test_rows_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    folder = quantised(write_tiny_model(tmp_path / "model", "gpt_oss", intermediate_size=80, num_hidden_layers=1))
    read = load_model_config(folder)
    with pytest.raises(
        UserError, match=r"experts\.down_proj: rows of 80 numbers, and MXFP4 has one power of two for each 32"
    ):
        check_weights(expected_tensors(read), folder, read)
