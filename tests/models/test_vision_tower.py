"""The tower's features: transformers' own, once an image, and only of a folder that has all of it."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from megarl.core.errors import UserError
from megarl.core.stand_in import StandInModule
from megarl.models import vision_tower
from megarl.models.hf_config import load_model_config, parse_model_config
from megarl.models.hf_fields import Fields
from megarl.models.hf_files import check_weights
from megarl.models.rules import expected_tensors
from megarl.models.tower_files import tower_index
from megarl.models.tower_tensors import check_tower
from megarl.models.vision_tower import Tower, load_tower
from tests.support.large_vision import LARGE, large_vision_config
from tests.support.tolerances import Tolerance
from tests.support.vision import QWEN3_5_MOE, SQUARE, Architecture, png, write_tiny_vision_model


@pytest.mark.parametrize("architecture", SQUARE)
def test_features_are_those_of_the_whole_model(
    architecture: Architecture, tmp_path: Path, device: str, bounds: Tolerance
) -> None:
    """Of an image alone, whatever stands beside it there."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder, side = write_tiny_vision_model(tmp_path / "model", architecture), SQUARE[architecture]
    pngs = [png(3 * side, 2 * side, 1), png(2 * side, 4 * side, 2)]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=[Image.open(io.BytesIO(each)) for each in pngs], return_tensors="pt"
    )
    with torch.no_grad():
        expected = model.model.get_image_features(pictures["pixel_values"], pictures["image_grid_thw"])
    tower = Tower(load_tower(folder, torch.float32, device), folder, torch.float32, device)
    found = torch.cat([tower.features(each).cpu() for each in pngs], dim=1)
    levels = [torch.cat(list(expected.pooler_output)), *(getattr(expected, "deepstack_features", None) or [])]
    assert found.shape == (len(levels), 6 + 8, 64)
    for one, other in zip(found, levels, strict=True):
        assert (one - other).abs().max() < bounds.logprob * other.abs().max()
    assert not any(parameter.requires_grad for parameter in tower.module.parameters())
    vision = load_model_config(folder).vision
    assert vision is not None
    assert vision.tower_elements == sum(parameter.numel() for parameter in tower.module.parameters())


def test_the_last_images_are_kept_up_to_a_bound(tmp_path: Path, device: str) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    pngs = [png(56, 56, seed) for seed in range(3)]
    tower = Tower(
        load_tower(folder, torch.float32, device), folder, torch.float32, device, kept_bytes=2 * 4 * 64 * 4
    )  # of two images
    first = tower.features(pngs[0])
    assert tower.features(bytes(bytearray(pngs[0]))) is first, "by what it is, not by where it lies"
    tower.features(pngs[1])
    assert tower.features(pngs[0]) is first
    tower.features(pngs[2])
    assert tower.features(pngs[0]) is first
    tower.forget()
    again = tower.features(pngs[0])
    assert again is not first and torch.equal(again, first)


def test_a_tower_that_is_no_numbers_is_refused(tmp_path: Path, device: str) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"visual.merger.ln_q.weight": torch.full((32,), torch.nan)}, path)
    with pytest.raises(UserError, match=r"NaN or infinite: visual.merger.ln_q.weight"):
        load_tower(folder, torch.float32, device)


@pytest.mark.parametrize("name", LARGE)
def test_a_published_size_is_counted_from_its_config(name: str) -> None:
    """Weights of the text part and of the tower, as a plan counts them; and what the tower's are called."""
    import transformers

    said = large_vision_config(name)
    config = parse_model_config(said.to_dict(), Path("model/config.json"))
    with torch.device("meta"):
        whole = getattr(transformers, LARGE[name][0])(said)
    assert config.vision is not None
    text = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert text + config.vision.tower_elements == sum(each.numel() for each in whole.parameters())
    assert config.vision.tower_elements == sum(each.numel() for each in whole.model.visual.parameters())
    shapes = {f"visual.{name}": tuple(each.shape) for name, each in whole.model.visual.named_parameters()}
    check_tower(Fields(said.to_dict(), Path()).part("vision_config"), shapes, Path("model"))


def test_what_predicts_further_tokens_is_neither_the_towers_nor_the_text_parts(tmp_path: Path, device: str) -> None:
    """As Qwen3.5 is published: with it, and with all experts of a layer in one tensor."""
    folder = write_tiny_vision_model(tmp_path / "model", QWEN3_5_MOE)
    path, config = folder / "model.safetensors", load_model_config(folder)
    plain = load_file(path)
    more = {"mtp.norm.weight": torch.ones(64)}
    for layer in range(config.num_layers):
        own = f"model.language_model.layers.{layer}.mlp.experts"
        one = [{kind: plain.pop(f"{own}.{e}.{kind}_proj.weight") for kind in ("gate", "up", "down")} for e in range(4)]
        more[f"{own}.gate_up_proj"] = torch.stack([torch.cat([each["gate"], each["up"]]) for each in one])
        more[f"{own}.down_proj"] = torch.stack([each["down"] for each in one])
    save_file(plain | more, path)
    assert check_weights(expected_tensors(config), folder, config).keys() >= expected_tensors(config).keys()
    assert {name for name in tower_index(folder) if "mtp" in name} == set()
    Tower(load_tower(folder, torch.float32, device), folder, torch.float32, device)


def test_transformers_is_loaded_without_what_no_tower_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scipy, of which its losses for detection name a function: a second of every rank's start."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "names_scipy.py").write_text("from scipy.optimize import linear_sum_assignment")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(vision_tower._loaded("names_scipy").linear_sum_assignment, StandInModule)
    assert "scipy" not in sys.modules, "who asks afterwards gets it"
