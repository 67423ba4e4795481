"""A folder's vision tower is held against its config without building it; test_vision_tower.py has transformers' own names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.models.hf_fields import Fields
from megarl.models.tower_files import tower_index
from megarl.models.tower_tensors import check_tower
from tests.support.vision import SQUARE, Architecture, write_tiny_vision_model

Shapes = dict[str, tuple[int, ...]]


def stored(folder: Path) -> tuple[Fields, Shapes]:
    path = folder / "config.json"
    shapes = {name: info.shape for name, info in tower_index(folder).items()}
    return Fields(json.loads(path.read_text()), path).part("vision_config"), shapes


@pytest.mark.parametrize("architecture", SQUARE)
def test_what_transformers_writes_is_as_the_config_has_it(tmp_path: Path, architecture: Architecture) -> None:
    check_tower(*stored(write_tiny_vision_model(tmp_path, architecture)), tmp_path)


def other(found: Shapes) -> Shapes:
    return {name.replace("attn.proj.weight", "attn.out.weight"): shape for name, shape in found.items()}


def turned(found: Shapes) -> Shapes:
    return {name: shape[::-1] if name.endswith("qkv.weight") else shape for name, shape in found.items()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: {}, "have no vision tower: they are of the text part alone"),
        (
            lambda found: found | {"visual.more": (2,)},
            r"its \d+ tensors have [\d,]+ numbers, and vision_config is of a",
        ),
        (
            lambda found: found | {f"model.{name}": found[name] for name in found},
            "tensors have .* numbers",
        ),  # both names
        (other, r"missing: visual.blocks.0.attn.proj.weight, .*; not in the config: visual.blocks.0.attn.out.weight"),
        (turned, r"of another shape: visual.blocks.0.attn.qkv.weight is \[32, 96\], the config says \[96, 32\]"),
    ],
)
def test_a_tower_that_is_not_the_configs_is_refused(
    tmp_path: Path, change: Callable[[Shapes], Shapes], says: str
) -> None:
    """Also where it has as many numbers."""
    tower, found = stored(write_tiny_vision_model(tmp_path))
    with pytest.raises(UserError, match=says):
        check_tower(tower, change(found), tmp_path)
