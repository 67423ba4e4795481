"""A model that sees images: what transformers computes with its own, at every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.models.hf_config import load_model_config
from megarl.training.rank import Rank
from tests.support.tolerances import Tolerance
from tests.support.vision import QWEN2_5, QWEN3, write_tiny_vision_model
from tests.training.seeing import pictured_shards, reference, seeing_spec, some_pictured


@pytest.fixture(scope="module", params=[QWEN2_5, QWEN3])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of either architecture."""
    return write_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model", request.param)


def test_logprobs_and_gradients_equal_transformers(rank: Rank, seeing: Path, bounds: Tolerance) -> None:
    vision = load_model_config(seeing).vision
    assert vision is not None
    made = some_pictured(vision)
    logprobs, gradients = reference(seeing, vision, made)
    rank.build("actor", seeing_spec(seeing))
    [shard] = pictured_shards(made)
    [[column]] = rank.logprobs("actor", shard)
    assert np.abs(column - torch.cat(logprobs).numpy()).max() < bounds.logprob
    rank.update("actor", shard, {})
    found = {name: tensor for bucket in rank.engine("actor").gradients(1 << 16) for name, tensor in bucket}
    assert found.keys() == gradients.keys()
    for name, tensor in found.items():
        expected = gradients[name]
        assert (tensor - expected).abs().max() < bounds.gradient * expected.abs().max(), name
