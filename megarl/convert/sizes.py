"""How many bytes a model's weights are, from its config alone. Without torch."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.models.rules import expected_tensors
from megarl.training.manifest import read_model_config

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def weight_bytes(hf: Path, dtype: str) -> int:
    """Of all tensors of the HF model."""
    shapes = expected_tensors(read_model_config(hf)).values()
    return sum(math.prod(shape) for shape in shapes) * ITEM_BYTES[dtype]
