"""How many bytes a model's weights are, from its config alone. Without torch."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.models.hf_dtypes import Dtypes, tensor_dtypes
from megarl.models.rules import expected_tensors
from megarl.training.manifest import read_model_config

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(hf: Path, dtypes: Dtypes) -> int:
    """Of all tensors of the HF model."""
    config = read_model_config(hf)
    written = tensor_dtypes(config, dtypes.model, dtypes.others)
    return sum(math.prod(shape) * ITEM_BYTES[written[name]] for name, shape in expected_tensors(config).items())
