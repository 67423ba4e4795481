"""What of a folder is not trained comes out of an export as it went in."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.convert.hf_tensors import carried_tensors, hf_tensors
from megarl.core.errors import UserError
from megarl.models.carried import carried, carried_bytes, in_files
from megarl.models.hf_config import load_model_config
from megarl.models.hf_files import check_weights
from megarl.models.hf_save import save_hf
from megarl.models.predicting import predicting
from megarl.models.rules import expected_tensors
from megarl.models.weight_files import INDEX
from tests.support.fp8 import dequantised, write_fp8
from tests.support.further import add_further, further_layer, same_bytes, stored
from tests.support.tiny import write_tiny_model
from tests.support.vision import QWEN3_5_MOE, write_tiny_vision_model

BLOCK = (24, 40)  # which divides no matrix
LAYER = "model.layers.2."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_tiny_model(tmp_path / "source", "deepseek_v3", num_hidden_layers=2)
    add_further(made, "deepseek_v3")
    return made


def exported(folder: Path, target: Path, limit: int = 1 << 30) -> Path:
    config = load_model_config(folder)
    check_weights(expected_tensors(config), folder, config)
    save_hf([list(hf_tensors(folder))], config, folder, target, limit)
    return target


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "ernie4_5_moe"])
def test_an_export_has_further_layers_to_the_byte(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "source", family)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    names = add_further(folder, family, dtype=torch.bfloat16)
    config = load_model_config(folder)
    assert carried(folder, config).keys() == names and len(names) > 5
    target = exported(folder, tmp_path / "target", 40_000)
    assert same_bytes(stored(target), stored(folder))
    assert json.loads((target / "config.json").read_text())["num_nextn_predict_layers"] == 1
    named = json.loads((target / INDEX).read_text())["weight_map"]
    assert named.keys() == stored(folder).keys()
    assert {name: each.dtype for name, each in carried(target, config).items()} == dict.fromkeys(names, "BF16")
    loaded, said = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    passed_over = set(said["unexpected_keys"])  # experts by the names of all of them
    assert not said["missing_keys"] and predicting(names | passed_over, config) >= passed_over
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), plain.parameters(), strict=True))


def test_a_folder_without_them_has_none(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "source", "deepseek_v3", num_hidden_layers=2)
    assert carried(folder, load_model_config(folder)) == {}
    assert same_bytes(stored(exported(folder, tmp_path / "target")), stored(folder))


def test_what_scores_predicts_nothing(folder: Path) -> None:
    config = load_model_config(folder)
    assert carried(folder, config) and carried(folder, replace(config, head="score")) == {}


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_fp8_ones_are_written_unquantised(scales: torch.dtype, folder: Path, tmp_path: Path) -> None:
    expected = dequantised(write_fp8(folder, BLOCK, scales=scales), BLOCK, torch.bfloat16)
    config = load_model_config(folder)
    found = carried(folder, config)
    assert not any(name.endswith("_scale_inv") for name in found)
    assert sum(info.scales is not None for info in found.values()) > 10
    assert carried_bytes(found.values()) == sum(expected[name].nbytes for name in found)
    assert same_bytes(stored(exported(folder, tmp_path / "target", 20_000)), expected)
    assert same_bytes(dict(carried_tensors(folder, config)), {name: expected[name] for name in found})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("scales", rf"without scales: {LAYER}eh_proj\.weight is F8_E4M3"),
        ("norm", rf"of another type: {LAYER}enorm\.weight is F8_E4M3"),
        ("whole", rf"of another type: {LAYER}enorm\.weight is I32"),
    ],
)
def test_ones_that_no_export_could_have_are_refused_before_training(change: str, says: str, folder: Path) -> None:
    path = write_fp8(folder, BLOCK) / "model.safetensors"
    tensors = load_file(path)
    if change == "scales":
        del tensors[f"{LAYER}eh_proj.weight_scale_inv"]
    else:
        dtype = torch.float8_e4m3fn if change == "norm" else torch.int32
        name = f"{LAYER}enorm.weight"
        tensors |= {name: tensors[name].to(dtype), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, path)
    config = load_model_config(folder)
    with pytest.raises(UserError, match=says):
        check_weights(expected_tensors(config), folder, config)
    with pytest.raises(UserError, match=says):
        carried(folder, config)


def test_so_are_those_of_a_model_that_sees(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "sees", QWEN3_5_MOE)
    path, config = folder / "model.safetensors", load_model_config(folder)
    tensors = load_file(path)
    more = further_layer(tensors, config.family, config.num_layers, model="model.language_model.")
    save_file(tensors | more | {"mtp.fc.weight": more["mtp.fc.weight"].to(torch.int32)}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"of another type: mtp\.fc\.weight is I32"):
        check_weights(expected_tensors(config), folder, config)


def in_own_file(folder: Path) -> Path:
    """Put the further layer into a file of its own."""
    tensors, files = load_file(folder / "model.safetensors"), ("model-1.safetensors", "model-2.safetensors")
    named = {name: files[name.startswith(LAYER)] for name in tensors}
    for file in files:
        save_file({name: each for name, each in tensors.items() if named[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": named}))
    return folder / files[1]


def test_a_cut_file_is_refused_as_of_other_tensors(folder: Path, tmp_path: Path) -> None:
    path, tensors = in_own_file(folder), list(hf_tensors(folder))
    assert same_bytes(stored(exported(folder, tmp_path / "whole")), stored(folder))
    config, content = load_model_config(folder), path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"model-2\.safetensors"):
        check_weights(expected_tensors(config), folder, config)
    with pytest.raises(UserError, match=r"model-2\.safetensors"):
        save_hf([tensors], config, folder, tmp_path / "target")
    path.unlink()
    with pytest.raises(UserError, match=r"names files that are not there: model-2\.safetensors"):
        save_hf([tensors], config, folder, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    shutil.rmtree(tmp_path / "whole")


def test_a_disk_is_asked_for_what_is_carried_along(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("megarl.models.hf_save.shutil.disk_usage", lambda _: usage(2_000_000, 1_900_000, 100_000))
    needed = sum(tensor.nbytes for tensor in stored(folder).values())
    with pytest.raises(UserError, match=f"need {needed / 1e9:.3f} GB, and 0.000 GB are free"):
        exported(folder, tmp_path / "target")


def test_files_are_as_large_as_they_may_be(folder: Path) -> None:
    found = carried(folder, load_model_config(folder))
    for limit in (1, 30_000, 1 << 30):
        files = list(in_files(found, limit))
        assert [name for file in files for name in file] == list(found)
        assert all(len(file) == 1 or carried_bytes(file.values()) <= limit for file in files)
        assert len(files) == {1: len(found), 1 << 30: 1}.get(limit, len(files))
    assert list(in_files({}, 1)) == []
