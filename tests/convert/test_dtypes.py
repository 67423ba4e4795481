"""Folders of mixed dtypes, through a Megatron checkpoint and back, by their bytes; and FP8, which comes back as bfloat16."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.convert.convert import Settings, hf_to_mcore
from megarl.convert.hf_tensors import hf_tensors
from megarl.core.errors import UserError
from megarl.core.layout import Layout
from megarl.models.hf_config import load_model_config
from megarl.models.hf_dtypes import stored_dtypes
from megarl.models.hf_files import check_weights
from megarl.models.hf_read import HfReader
from megarl.models.rules import expected_tensors
from megarl.training.manifest import read_manifest
from megarl.training.spec import RoleSpec
from tests.support.fp8 import dequantised, write_fp8
from tests.support.tiny import write_tiny_model
from tests.training.harness import assert_same, weights, written

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)
BLOCK = (16, 24)


def mix(folder, seed=0):
    """Give every tensor a dtype of its own; most are bfloat16."""
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(DTYPES[int(torch.randint(len(DTYPES), (), generator=random))])
    save_file(tensors, folder / "model.safetensors")
    return folder


def dtypes_of(folder):
    config = load_model_config(folder)
    found = stored_dtypes(check_weights(expected_tensors(config), folder, config), config)
    assert found is not None
    return found


def through_megatron(rank, folder, tmp_path):
    """What a conversion of one rank does: the HF folder that comes back."""
    dtypes = dtypes_of(folder)
    rank.build("model", RoleSpec(folder, dtypes.model, stored=dtypes.others))
    (tmp_path / "mcore").mkdir()
    rank.save("model", tmp_path / "mcore")
    manifest = read_manifest(tmp_path / "mcore")
    assert (manifest.dtype, manifest.stored) == (dtypes.model, dtypes.others)
    spec = RoleSpec(tmp_path / "mcore" / "hf", manifest.dtype, stored=manifest.stored, load_weights=False)
    rank.build("model", spec)
    rank.load("model", tmp_path / "mcore")
    assert_same(written(rank, "model"), weights(rank, "model"))
    rank.export_hf("model", tmp_path / "mcore" / "hf", tmp_path / "hf")
    return tmp_path / "hf"


def assert_same_bytes(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen2_moe",
        "qwen3_moe",
        "phi3",
        "deepseek_v3",
        "apertus",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "olmo3",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma3",
        "gemma4",
    ],
)
def test_every_tensor_comes_back_in_its_own_dtype(family, rank, tmp_path):
    seed = {"gpt_oss": 9, "apertus": 1, "gemma4": 3}.get(family, 0)  # by which most are bfloat16
    folder = mix(write_tiny_model(tmp_path / "source", family, num_hidden_layers=3), seed)
    expected = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in expected.values()} == set(DTYPES)
    back = through_megatron(rank, folder, tmp_path)
    assert_same_bytes(load_file(back / "model.safetensors"), expected)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_folder_of_one_dtype_comes_back_in_it(dtype, rank, tmp_path):
    """deepseek: the bias of the router is float32 in every model of Megatron's, and not in every folder."""
    folder = write_tiny_model(tmp_path / "source", "deepseek_v3", num_hidden_layers=2)
    expected = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(expected, folder / "model.safetensors")
    assert_same_bytes(load_file(through_megatron(rank, folder, tmp_path) / "model.safetensors"), expected)


def test_the_checkpoint_holds_what_came_in_float32_in_float32(rank, hf, tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(hf / "model.safetensors").items()}
    tensors["model.layers.1.post_attention_layernorm.weight"] = torch.randn(64)
    folder = tmp_path / "source"
    shutil.copytree(hf, folder)
    save_file(tensors, folder / "model.safetensors")
    through_megatron(rank, folder, tmp_path)
    found = {name: entry.dtype for name, entry in read_manifest(tmp_path / "mcore").tensors.items()}
    assert {name for name, dtype in found.items() if dtype == "float32"} == {
        "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    }


def test_fp8_comes_back_unquantised(rank, tmp_path):
    folder = write_fp8(write_tiny_model(tmp_path / "source", "deepseek_v3", num_hidden_layers=2), BLOCK)
    expected = dequantised(folder, BLOCK, torch.bfloat16)
    back = through_megatron(rank, folder, tmp_path)
    assert_same_bytes(load_file(back / "model.safetensors"), expected)
    for config in (back / "config.json", tmp_path / "mcore" / "hf" / "config.json"):
        raw = json.loads(config.read_text())
        assert "quantization_config" not in raw and raw["dtype"] == "bfloat16"
    assert load_model_config(back).fp8_block is None


def test_the_other_side_of_a_verification_is_not_our_reader(tmp_path, monkeypatch):
    """It gives what the library reads, FP8 dequantised, while our own reader cannot be called at all."""
    folder = write_fp8(write_tiny_model(tmp_path / "source", "deepseek_v3", num_hidden_layers=2), BLOCK)
    monkeypatch.setattr(HfReader, "read", lambda *_: pytest.fail("our reader was asked"))
    monkeypatch.setattr("megarl.models.hf_read.dequantized", lambda *_: pytest.fail("our reader was asked"))
    assert_same_bytes(dict(hf_tensors(folder)), dequantised(folder, BLOCK, torch.bfloat16))
    mixed = mix(write_tiny_model(tmp_path / "mixed", "qwen3", num_hidden_layers=2))
    assert_same_bytes(dict(hf_tensors(mixed)), load_file(mixed / "model.safetensors"))
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(mixed / "model.safetensors").items()}
    assert_same_bytes(dict(hf_tensors(mixed, "bfloat16")), rounded)


def test_a_verification_sees_a_head_that_is_not_the_embedding_it_is_tied_to(tmp_path):
    """gemma3: tied where no key says."""
    for family in ("qwen3", "gemma3"):
        folder = write_tiny_model(tmp_path / family, family, tie_word_embeddings=True)
        config = json.loads((folder / "config.json").read_text())
        if family == "gemma3":
            del config["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        copied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(copied, folder / "model.safetensors")
        assert_same_bytes(dict(hf_tensors(folder)), tensors)
        copied["lm_head.weight"][-1, -1] += 1
        save_file(copied, folder / "model.safetensors")
        with pytest.raises(UserError, match=r"hold lm_head\.weight, which is not the same"):
            dict(hf_tensors(folder))


def test_what_headers_show_is_refused_before_ranks_start(hf, tmp_path, monkeypatch):
    folder = tmp_path / "source"
    shutil.copytree(hf, folder)
    monkeypatch.setattr("megarl.convert.convert.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    tensors = load_file(folder / "model.safetensors")
    for change, says in (
        ({"model.norm.weight": torch.zeros(3)}, "of another shape: model.norm.weight"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "of another type: model.norm.weight"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.float64)}, "in F64, .* Say --dtype float32 or --dtype"),
        ({"odd": torch.zeros(1)}, "not in the config: odd"),
    ):
        save_file(tensors | change, folder / "model.safetensors")
        with pytest.raises(UserError, match=says) as error:
            hf_to_mcore(folder, tmp_path / "x", Layout(), None, Settings(), None)
        assert str(folder) in str(error.value)
        assert not (tmp_path / "x").exists()
