"""How many bytes a model's weights are, from its config and headers alone. Without torch."""

from __future__ import annotations

import math
from pathlib import Path

from megarl.models.carried import carried, carried_bytes
from megarl.models.config import ModelConfig
from megarl.models.hf_dtypes import Dtypes, tensor_dtypes
from megarl.models.rules import expected_tensors

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(config: ModelConfig, hf: Path, dtypes: Dtypes) -> int:
    """Of all tensors of the HF model, with what is carried along. hf: the folder with its config."""
    return model_bytes(config, dtypes) + carried_bytes(carried(hf, config).values())


def model_bytes(config: ModelConfig, dtypes: Dtypes) -> int:
    """Of those that are a part of the model."""
    written = tensor_dtypes(config, dtypes.model, dtypes.others)
    return sum(math.prod(shape) * ITEM_BYTES[written[name]] for name, shape in expected_tensors(config).items())
