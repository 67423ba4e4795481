"""HF -> layout -> HF gives back every bit: each family on real Megatron models of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.core.ports import free_port
from tests.models.layout_ranks import LAYERS, LAYOUTS, MODELS, SOME
from tests.support.forked_ranks import Ranks
from tests.support.tiny import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small HF folder of every family."""
    root = tmp_path_factory.mktemp("layouts")
    for name, (family, overrides) in MODELS.items():
        write_tiny_model(root / name, family, num_hidden_layers=LAYERS, **overrides)
    return root


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_family_comes_back_bit_equal(world_size: int, ranks: Ranks, root: Path) -> None:
    words = (world_size, free_port(), root)
    assert ranks.run("tests.models.layout_ranks", world_size, *words, log=root / f"{world_size}.log") == ""
    differing = json.loads((root / f"{world_size}.json").read_text())
    assert {case: names for case, names in differing.items() if names} == {}
    for name in MODELS if world_size == 2 else SOME:
        assert sum(case.startswith(f"{name} at") for case in differing) >= 2, f"{name} was hardly tried"
    for layout in LAYOUTS[world_size]:
        assert any(case.endswith(f" at {layout}") for case in differing), f"no model was cut as {layout}"
