"""Layers that predict further tokens go through conversions as they are, without the folder that they came from."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from megarl.convert.digest import differences, digests
from megarl.convert.hf_tensors import carried_tensors
from megarl.convert.inspection import inspect, render
from megarl.convert.sizes import weight_bytes
from megarl.convert.text_part import into_multimodal, text_part
from megarl.core.errors import UserError
from megarl.models.carried import carried
from megarl.models.hf_config import load_model_config
from megarl.models.hf_dtypes import Dtypes
from megarl.training.manifest import CARRIED, HF_FOLDER, read_manifest
from tests.convert.conftest import flip
from tests.convert.forked import Conversions
from tests.support.fp8 import dequantised, write_fp8
from tests.support.further import add_further, further_layer, same_bytes, stored
from tests.support.multimodal import write_multimodal
from tests.support.tiny import write_tiny_model
from tests.support.vision import QWEN3_5_MOE, write_tiny_vision_model

BLOCK = (24, 40)


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.mark.parametrize(
    ("family", "axes", "other"),
    [("deepseek_v3", {"tp": 2, "sequence_parallel": True, "ep": 2}, {"pp": 3}), ("qwen3_next", {"pp": 3}, {"ep": 2})],
)
def test_there_and_back_without_the_source(
    family: str, axes: dict[str, int], other: dict[str, int], forked: Conversions, tmp_path: Path
) -> None:
    source = write_tiny_model(tmp_path / "source", family)
    names = add_further(source, family, dtype=torch.bfloat16)
    expected = stored(source)
    done = forked.hf_to_mcore(source, tmp_path / "mcore", verify=True, **axes)
    assert done.differences == () and done.num_verified == len(expected)
    assert f"{HF_FOLDER}/{CARRIED}" in read_manifest(tmp_path / "mcore").files
    shutil.rmtree(source)
    assert forked.reshard(tmp_path / "mcore", tmp_path / "other", **other).differences == ()
    back = forked.mcore_to_hf(tmp_path / "other", tmp_path / "back", verify=True)
    assert back.differences == () and back.num_verified == len(expected)
    assert same_bytes(stored(tmp_path / "back"), expected)
    for name in ("mcore", "other", "back"):
        found = inspect(tmp_path / name)
        assert found.carried.keys() == names and found.damage == []
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(inspect(tmp_path / "other")))
    total = sum(expected[name].nbytes for name in names)
    assert f"{len(names)} tensors, {total:,} bytes, not trained: a frozen vision tower" in console.export_text()


def test_fp8_ones_are_unquantised_in_checkpoints_too(forked: Conversions, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "deepseek_v3", num_hidden_layers=2)
    names = add_further(source, "deepseek_v3")
    expected = dequantised(write_fp8(source, BLOCK), BLOCK, torch.bfloat16)
    size = weight_bytes(load_model_config(source), source, Dtypes("bfloat16", {}))
    assert size == sum(tensor.nbytes for tensor in expected.values())
    done = forked.hf_to_mcore(source, tmp_path / "mcore", verify=True, tp=2, sequence_parallel=True)
    assert done.differences == () and done.num_verified == len(expected)
    kept = load_file(tmp_path / "mcore" / HF_FOLDER / CARRIED)
    assert same_bytes(kept, {name: expected[name] for name in names})
    back = forked.mcore_to_hf(tmp_path / "mcore", tmp_path / "back", verify=True)
    assert back.differences == () and same_bytes(stored(tmp_path / "back"), expected)


def test_what_was_damaged_in_a_checkpoint_is_refused(forked: Conversions, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3", num_hidden_layers=2)
    add_further(source, "qwen3")
    forked.hf_to_mcore(source, tmp_path / "mcore")
    flip(tmp_path / "mcore" / HF_FOLDER / CARRIED, at=-1)
    assert inspect(tmp_path / "mcore").damage == [f"{HF_FOLDER}/{CARRIED} has other content than was written"]
    with pytest.raises(UserError, match=rf"damaged: {HF_FOLDER}/{CARRIED} has other content"):
        forked.mcore_to_hf(tmp_path / "mcore", tmp_path / "back")


def test_a_verification_sees_other_bytes(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", "qwen3", num_hidden_layers=2)
    [name] = [name for name in add_further(source, "qwen3") if name.endswith("eh_proj.weight")]
    config, path = load_model_config(source), source / "model.safetensors"
    before = digests(carried_tensors(source, config), lambda _: None)
    flip(path, at=carried(source, config)[name].offset)
    after = digests(carried_tensors(source, config), lambda _: None)
    assert [(each.name, each.what) for each in differences(before, after)] == [(name, "hash")]


def test_a_model_that_sees_has_them_beside_its_tower(forked: Conversions, tmp_path: Path) -> None:
    source = write_tiny_vision_model(tmp_path / "source", QWEN3_5_MOE)
    path = source / "model.safetensors"
    tensors = load_file(path)
    config = load_model_config(source)
    more = further_layer(tensors, config.family, config.num_layers, model="model.language_model.")
    save_file(tensors | more, path, {"format": "pt"})
    expected = stored(source)
    towers = {name for name in expected if name.startswith("model.visual.")}
    assert carried(source, config).keys() == towers | more.keys()
    done = forked.hf_to_mcore(source, tmp_path / "mcore", verify=True)
    back = forked.mcore_to_hf(tmp_path / "mcore", tmp_path / "back", verify=True)
    assert done.differences == back.differences == () and same_bytes(stored(tmp_path / "back"), expected)


def test_a_text_part_has_them_and_they_stay_in_the_whole(tmp_path: Path) -> None:
    whole, text = tmp_path / "whole", tmp_path / "text"
    write_multimodal(whole, "Qwen3_5ForConditionalGeneration", tied=False)
    path = whole / "model.safetensors"
    tensors = load_file(path)
    own = "model.language_model." if "model.language_model.norm.weight" in tensors else "model."
    layers = json.loads((whole / "config.json").read_text())["text_config"]["num_hidden_layers"]
    more = further_layer(tensors, "qwen3_5", layers, model=own)
    save_file(tensors | more, path, {"format": "pt"})
    text_part(whole, text, force=False, console=quiet())
    assert same_bytes({name: each for name, each in stored(text).items() if name.startswith("mtp.")}, more)
    assert carried(text, load_model_config(text)).keys() == more.keys()
    into_multimodal(text, whole, tmp_path / "again", force=False, console=quiet())
    assert same_bytes(stored(tmp_path / "again"), stored(whole))
