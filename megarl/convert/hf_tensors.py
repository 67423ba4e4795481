"""The tensors of an HF folder one by one, whole, as a model of another dtype would have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.models.hf_files import check_weights
from megarl.models.hf_read import HfReader
from megarl.models.rules import expected_tensors, rules
from megarl.training.manifest import read_model_config


def hf_tensors(folder: Path, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Name and content of every tensor that the config asks for, in the order of a forward pass."""
    config = read_model_config(folder)
    index = check_weights(expected_tensors(config), folder, config)
    with HfReader(index, check_finite=False) as reader:
        for rule in rules(config, "torch"):
            for source in rule.sources:
                kept = torch.float32 if rule.is_buffer else getattr(torch, dtype)
                tensor = torch.empty(source.shape, dtype=kept)
                reader.read(source.name, slice(0, source.shape[0]), None, tensor)
                reader.finish()
                yield source.name, tensor
