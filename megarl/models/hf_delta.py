"""Gated DeltaNet's sizes, and which layers have it, read from an HF config. Without torch."""

from __future__ import annotations

from typing import Any

from megarl.models.config import Delta
from megarl.models.family import Family
from megarl.models.hf_fields import Fields
from megarl.models.hf_layers import KINDS, layers_of_kind

LINEAR, INTERVAL = "linear_attention", "full_attention_interval"
# By the names of `Delta`.
_KEYS = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
STATE = "mamba_ssm_dtype"  # SGLang's alone; what it does not know is float32 to it
DELTA_REQUIRED = tuple(_KEYS.values())


def read_delta(fields: Fields, family: Family, layers: int) -> dict[str, Any]:
    """Fields of a ModelConfig; none where a family has no Gated DeltaNet, or a model no layer of it. Raises UserError."""
    if not family.delta:
        return {}
    if fields.get(KINDS) is not None:
        linear = layers_of_kind(fields, layers, LINEAR)
    else:
        interval = fields.count(INTERVAL, 4)
        linear = frozenset(index for index in range(layers) if (index + 1) % interval)
    state_bytes = 2 if fields.get(STATE) in ("bfloat16", "float16") else 4
    delta = Delta(**{name: fields.count(key) for name, key in _KEYS.items()}, state_bytes=state_bytes)
    if delta.num_value_heads % delta.num_key_heads:
        wanted = f"a multiple of linear_num_key_heads, {delta.num_key_heads}, is wanted"
        fields.refuse("linear_num_value_heads", delta.num_value_heads, wanted)
    return {"delta": delta, "linear_layers": linear} if linear else {}
