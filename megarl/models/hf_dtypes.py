"""Which dtype each tensor of an HF folder is in, so that it can go through Megatron's form and come back in it. No torch.

A Megatron model has one dtype, but for buffers that are always float32 (`Row.is_buffer`). A folder may mix: norms, routers
or a score head in float32 among bfloat16. The parameters that such tensors are part of are then held in float32, where
each of these dtypes is exact, and each HF tensor is written back in its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megarl.models.config import ModelConfig
from megarl.models.hf_files import TensorInfo
from megarl.models.hf_fp8 import FP8
from megarl.models.hf_mxfp4 import STORED
from megarl.models.rules import LayerSpec, rules

ModelDtype = Literal["float32", "bfloat16"]
StoredDtype = Literal["float32", "bfloat16", "float16"]
# What is read in a dtype that float32 holds exactly, as torch calls it; FP8 is what DeepSeek makes of it, and MXFP4 (whose bytes
# have no other dtype) what it stands for.
NAMES: Mapping[str, StoredDtype] = MappingProxyType(
    {"F32": "float32", "BF16": "bfloat16", "F16": "float16", FP8: "bfloat16", STORED: "bfloat16"}
)
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$")


@dataclass(frozen=True)
class Dtypes:
    """Of a model and of its HF tensors.

    model: of the parameters. others: HF name -> dtype of each tensor that is in another than `tensor_dtypes` would say.
    """

    model: ModelDtype
    others: dict[str, StoredDtype]


def stored_dtypes(index: Mapping[str, TensorInfo], config: ModelConfig) -> Dtypes | None:
    """As a folder has them; the model's is bfloat16 where most is. None where a tensor is in a dtype of no exact place."""
    names = [source.name for rule in rules(config, "torch") for source in rule.sources]
    if any(index[name].dtype not in NAMES for name in names):
        return None
    stored = {name: NAMES[index[name].dtype] for name in names}
    sizes = {name: math.prod(index[name].shape) for name in names}
    most = 2 * sum(sizes[name] for name in names if stored[name] == "bfloat16") > sum(sizes.values())
    model: ModelDtype = "bfloat16" if most else "float32"
    plain = tensor_dtypes(config, model, {})
    return Dtypes(model, {name: dtype for name, dtype in stored.items() if dtype != plain[name]})


def tensor_dtypes(config: ModelConfig, model: ModelDtype, others: Mapping[str, StoredDtype]) -> dict[str, StoredDtype]:
    """The dtype that each HF tensor of a model is written in."""
    return {
        source.name: others.get(source.name, "float32" if rule.is_buffer else model)
        for rule in rules(config, "torch")
        for source in rule.sources
    }


def wide_parameters(
    config: ModelConfig, spec: LayerSpec, model: ModelDtype, others: Mapping[str, StoredDtype]
) -> frozenset[str]:
    """The parameters, by their global names, that have to be float32 for all of their HF tensors to stay exact.

    All layers and experts are alike in it: Megatron's checkpoints have them as one tensor.
    """
    if model == "float32" or not others:
        return frozenset()
    every = [rule for rule in rules(config, spec, has_head_copy=True) if not rule.is_buffer]
    wide = {_kind(rule.megatron) for rule in every if any(source.name in others for source in rule.sources)}
    return frozenset(rule.megatron for rule in every if _kind(rule.megatron) in wide)


def _kind(parameter: str) -> str:
    """The name without the numbers of layer and expert."""
    return NUMBER.sub("*", parameter)
