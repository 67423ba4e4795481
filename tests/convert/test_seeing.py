"""Conversions of a multimodal folder whose text part is trained: what is not of it comes through as it was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.convert.hf_tensors import hf_tensors
from megarl.convert.inspection import inspect
from megarl.models.hf_config import load_model_config
from megarl.models.hf_dtypes import ModelDtype
from megarl.models.hf_files import check_weights
from megarl.models.hf_save import save_hf
from megarl.models.rules import expected_tensors
from megarl.models.tower_files import tower_index
from megarl.training.manifest import CARRIED, HF_FOLDER, read_manifest
from megarl.training.rank import Rank
from megarl.training.spec import ValueObjective
from tests.convert.forked import Conversions
from tests.support.multimodal import exchange_experts, in_newer_names
from tests.support.vision import QWEN2_5, QWEN3, QWEN3_5_MOE, QWEN3_MOE, Architecture, write_tiny_vision_model
from tests.training.harness import OPTIMIZER, assert_same, weights
from tests.training.seeing import paired_shards, pictured_shards, seeing_spec, some_pictured

Head = Literal["vocabulary", "score"]


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("architecture", "newer"),
    [(QWEN2_5, False), (QWEN2_5, True), (QWEN3, True), (QWEN3_MOE, True), (QWEN3_5_MOE, True)],
)
def test_there_and_back_to_the_bit(
    architecture: Architecture, newer: bool, forked: Conversions, tmp_path: Path
) -> None:
    source = write_tiny_vision_model(tmp_path / "source", architecture, published=not newer)
    if newer:
        in_newer_names(source)
    done = forked.hf_to_mcore(
        source, tmp_path / "mcore", verify=True, **({"ep": 2} if "Moe" in architecture else {"tp": 2})
    )
    assert done.num_verified > 20 and done.differences == ()
    manifest = read_manifest(tmp_path / "mcore")
    assert f"{HF_FOLDER}/{CARRIED}" in manifest.files and f"{HF_FOLDER}/preprocessor_config.json" in manifest.files
    again = forked.reshard(tmp_path / "mcore", tmp_path / "other", pp=2)
    assert again.differences == ()
    back = forked.mcore_to_hf(tmp_path / "other", tmp_path / "back", verify=True)
    assert back.num_verified == done.num_verified and back.differences == ()
    expected, found = stored(source), stored(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [inspect(tmp_path / name).damage for name in ("source", "mcore", "other", "back")] == [[]] * 4
    for name in ("config.json", "preprocessor_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((source / name).read_text())


def test_experts_that_lie_as_transformers_writes_them_come_back_as_they_are_published(
    forked: Conversions, tmp_path: Path
) -> None:
    """Which servers want, and transformers reads as well."""
    published = write_tiny_vision_model(tmp_path / "published", QWEN3_MOE)
    source = write_tiny_vision_model(tmp_path / "source", QWEN3_MOE)
    exchange_experts(source)
    forked.hf_to_mcore(source, tmp_path / "mcore", verify=True)
    back = forked.mcore_to_hf(tmp_path / "mcore", tmp_path / "back", verify=True)
    assert back.differences == ()
    expected, found = stored(published), stored(tmp_path / "back")
    experts = {name for name in expected if ".experts." in name}
    assert len(experts) == 8 and all(stored(source)[name].shape != expected[name].shape for name in experts)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("limit", [1, 20_000, 60_000])
def test_a_layers_experts_are_in_one_file_however_small_files_are_to_be(limit: int, tmp_path: Path) -> None:
    source = write_tiny_vision_model(tmp_path / "source", QWEN3_MOE)
    config = load_model_config(source)
    save_hf([list(hf_tensors(source, None))], config, source, tmp_path / "written", limit)
    assert len([*(tmp_path / "written").glob("*.safetensors")]) > 5
    expected, found = stored(source), stored(tmp_path / "written")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    check_weights(expected_tensors(config), tmp_path / "written", config)


def learned(rank: Rank, folder: Path, saved: Path, dtype: ModelDtype, head: Head) -> dict[str, Tensor]:
    """Save a checkpoint of a model, or a critic, that has learned with its tower; returns its weights."""
    learning = OPTIMIZER.model_copy(update={"freeze_vision_tower": False})
    spec = replace(seeing_spec(folder), dtype=dtype, optimizer=learning, head=head)
    vision = load_model_config(folder).vision
    assert vision is not None
    made = some_pictured(vision)
    if head == "score":
        [shard], [columns] = paired_shards(made)
        rank.build("model", replace(spec, objective=ValueObjective()))
        targets = dict.fromkeys(("values", "returns"), columns["ref_logprobs"])
    else:
        [shard] = pictured_shards(made)
        rank.build("model", spec)
        targets = {}
    for _ in range(2):  # a head of zeros asks nothing of what is before it
        rank.update("model", shard, targets)
    saved.mkdir()
    rank.save("model", saved)
    return weights(rank, "model")


@pytest.mark.parametrize(
    ("architecture", "newer", "head", "dtype"),
    [
        (QWEN2_5, False, "vocabulary", "float32"),
        (QWEN2_5, True, "score", "bfloat16"),
        (QWEN3_MOE, True, "vocabulary", "bfloat16"),
    ],
)
def test_a_tower_that_learned_is_written_with_the_model(
    architecture: Architecture,
    newer: bool,
    head: Head,
    dtype: ModelDtype,
    rank: Rank,
    forked: Conversions,
    tmp_path: Path,
) -> None:
    """Under the names of the folder that it came from, whatever layout and dtype; with an optimizer through a reshard."""
    source = write_tiny_vision_model(tmp_path / "source", architecture, published=not newer)
    if newer:
        in_newer_names(source)
    saved = tmp_path / "saved"
    expected = learned(rank, source, saved, dtype, head)
    assert not (saved / HF_FOLDER / CARRIED).exists()
    axes = {"ep": 2} if "Moe" in architecture else {"tp": 2}
    again = forked.reshard(saved, tmp_path / "other", **axes)
    assert again.differences == ()
    back = forked.mcore_to_hf(tmp_path / "other", tmp_path / "back", verify=True)
    assert back.differences == () and back.num_verified == len(expected)
    found = dict(hf_tensors(tmp_path / "back", tower=True))
    assert_same(found, expected)
    before, after = stored(source), stored(tmp_path / "back")
    names = before.keys() - {"lm_head.weight"} | {"score.weight"} if head == "score" else before.keys()
    assert after.keys() == names
    assert {name for name in tower_index(source) if torch.equal(before[name], after[name].float())} == set()
    forked.mcore_to_hf(saved, tmp_path / "wide", dtype="float32", verify=True, **axes)
    assert_same(dict(hf_tensors(tmp_path / "wide", tower=True)), {n: each.float() for n, each in expected.items()})
    assert [inspect(tmp_path / name).damage for name in ("saved", "other", "back", "wide")] == [[]] * 4
    whole = sum(math.prod(each.shape) for each in expected.values())
    assert {inspect(tmp_path / name).parameters for name in ("saved", "other", "back", "wide")} == {whole}
