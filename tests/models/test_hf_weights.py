"""Weights into a model and out again, bit by bit, and the folder that an export leaves."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.core.errors import MegarlError, UserError
from megarl.core.platform import get_platform
from megarl.models.gpt import build_gpt
from megarl.models.config import ModelConfig
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.hf_weights import Bucket, export_buckets, load_hf_weights, save_hf
from megarl.models.rules import expected_tensors
from tests.support.tiny import write_tiny_qwen

pytestmark = pytest.mark.usefixtures("one_rank")
CASES = [
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"vocab_size": 97}),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen(tmp_path_factory.mktemp("weights") / "model")


def built(config: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return build_gpt(config, tp=1, dtype=dtype, platform=get_platform("cpu"))


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, ModelConfig]:
    config = load_model_config(folder)
    model = built(config, dtype)
    load_hf_weights(model, config, folder, 0, 1)
    return model, config


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def buckets_of(folder: Path) -> list[Bucket]:
    return [list(stored(folder).items())]


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_export_gives_back_every_bit(family: str, overrides: dict[str, object], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_qwen(source, family, tokenizer=True, **overrides)
    model, config = loaded(source)
    save_hf(export_buckets(model, config, None, 1 << 14), config, source, target, max_shard_bytes=1 << 17)
    expected, found = stored(source), stored(target)
    assert len(list(target.glob("*.safetensors"))) > 1
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    check_weights(expected_tensors(config), target, load_model_config(target))
    again = AutoModelForCausalLM.from_pretrained(target)
    original = AutoModelForCausalLM.from_pretrained(source)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), original.parameters(), strict=True))


def test_buckets_keep_to_their_size(source: Path) -> None:
    model, config = loaded(source)
    limit = 40_000
    buckets = [
        [(name, tensor.nbytes) for name, tensor in bucket] for bucket in export_buckets(model, config, None, limit)
    ]
    assert len(buckets) > 3
    for bucket in buckets:
        assert len(bucket) == 1 or sum(size for _, size in bucket) <= limit
    assert [name for bucket in buckets for name, _ in bucket] == list(expected_tensors(config))


def test_weights_are_cast_to_the_model(source: Path) -> None:
    model, config = loaded(source, torch.bfloat16)
    [bucket] = export_buckets(model, config, None, 1 << 30)
    expected = stored(source)
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in bucket)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_exported_config_names_the_dtype_of_its_weights(key: str, source: Path, tmp_path: Path) -> None:
    origin, target = tmp_path / "origin", tmp_path / "target"
    shutil.copytree(source, origin)
    raw = json.loads((origin / "config.json").read_text())
    raw.pop("dtype", None)
    (origin / "config.json").write_text(json.dumps({**raw, key: "bfloat16"}))
    save_hf(buckets_of(source), load_model_config(source), origin, target)
    assert json.loads((target / "config.json").read_text()) == {**raw, key: "float32"}
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert model.dtype == torch.float32
    assert torch.equal(model.model.norm.weight, stored(source)["model.norm.weight"])


def test_the_tokenizer_and_generation_settings_come_along(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_hf(buckets_of(source), load_model_config(source), source, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(target).encode("1+1=") == AutoTokenizer.from_pretrained(source).encode("1+1=")
    assert not (target / "model.safetensors.index.json").exists(), "one file needs no index"


def test_an_export_replaces_the_one_before_and_leaves_nothing_beside_it(source: Path, tmp_path: Path) -> None:
    target, config = tmp_path / "target", load_model_config(source)
    target.mkdir()
    (target / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    (tmp_path / ".tmp-target").mkdir()
    (tmp_path / ".tmp-target" / "half.safetensors").write_text("of an export that was killed")
    save_hf(buckets_of(source), config, source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    check_weights(expected_tensors(config), target, config)


def test_an_export_that_fails_leaves_the_one_before(source: Path, tmp_path: Path) -> None:
    target, config = tmp_path / "target", load_model_config(source)
    save_hf(buckets_of(source), config, source, target)
    with pytest.raises(MegarlError, match="Nothing was exported"):
        save_hf([], config, source, target)
    check_weights(expected_tensors(config), target, config)


def test_tensors_that_are_missing_are_named(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    tensors = stored(folder)
    tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks the tensors model\.layers\.1\.self_attn\.k_proj\.weight"):
        loaded(folder)


def test_a_parameter_that_no_rule_fills_is_an_error(source: Path) -> None:
    config = load_model_config(source)
    with pytest.raises(
        MegarlError, match=r"No rule fills the parameters \['decoder.layers.0.self_attention.k_layernorm"
    ):
        load_hf_weights(built(config), replace(config, qk_norm=False), source, 0, 1)


def test_a_rule_that_meets_no_parameter_is_an_error(source: Path) -> None:
    config = load_model_config(source)
    with pytest.raises(MegarlError, match=r"q_layernorm\.weight is not there"):
        load_hf_weights(built(replace(config, qk_norm=False)), config, source, 0, 1)


def test_a_part_of_another_shape_is_an_error(source: Path) -> None:
    config = load_model_config(source)
    with pytest.raises(MegarlError, match=r"word_embeddings\.weight has shape \[130, 64\]; its rule gives \[128, 64\]"):
        load_hf_weights(built(replace(config, vocab_size=130)), config, source, 0, 1)
