"""What leaves a role's model in a parameter's place: merged adapters, or the dtypes of the folder that it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megarl.models.config import ModelConfig
from megarl.models.hf_dtypes import tensor_dtypes
from megarl.models.hf_weights import Value
from megarl.models.lora import merged
from megarl.training.spec import RoleSpec


def exported(
    chunks: Sequence[Module], config: ModelConfig, spec: RoleSpec
) -> tuple[Value | None, dict[str, torch.dtype]]:
    """As `Gatherer(value=)` takes it; and the dtype of each HF tensor, where the HF folder had several."""
    if spec.stored:  # all of them are exact in float32
        dtypes = tensor_dtypes(config, spec.dtype, spec.stored)
        return lambda _, parameter: parameter.float(), {name: getattr(torch, each) for name, each in dtypes.items()}
    return merged(chunks) if spec.lora is not None else None, {}


def main_grad(_: str, parameter: Any) -> Tensor:
    """The float32 gradient that Megatron's data parallel keeps beside a parameter under training; 0 for buffers."""
    gradient: Tensor = parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter)
    return gradient
