"""Roles whose vision tower is a part of the model, beside each other on a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.core.errors import MegarlError
from megarl.models.hf_config import load_model_config
from megarl.training.rank import Rank
from megarl.training.spec import RoleSpec
from tests.support.vision import QWEN2_5, QWEN3, write_tiny_vision_model
from tests.training.harness import OPTIMIZER
from tests.training.seeing import pictured_shards, seeing_spec, some_pictured

LEARNS = OPTIMIZER.model_copy(update={"freeze_vision_tower": False})


@pytest.mark.parametrize("architecture", [QWEN2_5, QWEN3])
def test_a_reference_is_refreshed_with_the_tower_bit_for_bit(rank: Rank, architecture: str, tmp_path: Path) -> None:
    """And forgets what it saw of images before."""
    folder = write_tiny_vision_model(tmp_path / "model", architecture)
    vision = load_model_config(folder).vision
    assert vision is not None
    rank.build("actor", replace(seeing_spec(folder), optimizer=LEARNS, offload=("params",)))
    rank.build("reference", RoleSpec(folder, "float32", has_tower=True))
    rank.build("in front", RoleSpec(folder, "float32"))
    [shard] = pictured_shards(some_pictured(vision))

    def column(role: str) -> np.ndarray:
        return (rank.logprobs(role, shard) or [])[0][0]

    first = column("reference")
    assert np.array_equal(first, column("in front"))
    rank.update("actor", shard, {})
    assert np.array_equal(column("reference"), first)
    rank.copy_weights("actor", "reference")
    assert np.array_equal(column("reference"), column("actor")) and not np.array_equal(first, column("actor"))
    rank.engine("actor").wake()
    towers = [rank.engine(role)._chunks[0].vision_tower for role in ("actor", "reference")]
    for mine, other in zip(*(tower.parameters() for tower in towers), strict=True):
        assert torch.equal(mine, other) and not other.requires_grad
    (tmp_path / "saved").mkdir()
    rank.save("reference", tmp_path / "saved")
    rank.build("again", RoleSpec(folder, "float32", has_tower=True))
    rank.load("again", tmp_path / "saved")
    assert np.array_equal(column("again"), column("reference"))
    with pytest.raises(MegarlError, match="a tower's into one that has it too"):
        rank.copy_weights("actor", "in front")
