"""A vision tower's tensors in a multimodal HF folder. Without torch."""

from __future__ import annotations

from pathlib import Path

from megarl.models.config import ModelConfig
from megarl.models.hf_files import TensorInfo, names_of_text, read_index
from megarl.models.hf_header import BITS
from megarl.models.multimodal import TOWER, has_newer_names, tower_names


def tower_index(folder: Path) -> dict[str, TensorInfo]:
    """Of a multimodal folder the vision tower; wide dtypes first, as in a file. Raises UserError.

    Layers that predict further tokens (Qwen3.5's `mtp.`) are neither of it nor of the text part, and would not be trained.
    """
    index = read_index(folder)
    text = set(names_of_text(index, folder).values())
    found = {name: info for name, info in index.items() if name not in text and TOWER in name}
    return dict(sorted(found.items(), key=lambda each: -BITS[each[1].dtype]))


def with_tower(config: ModelConfig, folder: Path) -> ModelConfig:
    """The model with the vision tower of its folder as a part of it. Raises UserError."""
    index = tower_index(folder)
    shapes = {part: index[name].shape for part, name in tower_names(index).items()}
    return config.with_tower(shapes, newer_names=has_newer_names(index))
