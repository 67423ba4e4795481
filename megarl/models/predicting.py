"""Layers of a folder that predict further tokens (multi-token prediction), by the names of their tensors. Without torch.

megarl does not train them; what they are for is speculative decoding at servers. Exports have them as they were (`carried`).
"""

from __future__ import annotations

from collections.abc import Collection

from megarl.models.config import ModelConfig

MAX_LAYERS = 8
# Families whose layers have names of their own, and how these begin.
PREFIXES = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), "mtp.") | {"ernie4_5_moe": "model.mtp_"}


def predicting(names: Collection[str], config: ModelConfig) -> set[str]:
    """Those of a folder's names that belong to such layers: behind the last layer with an `eh_proj`, or of PREFIXES."""
    layers = range(config.num_layers, config.num_layers + MAX_LAYERS)
    begins = [f"model.layers.{i}." for i in layers if f"model.layers.{i}.eh_proj.weight" in names]
    begins += [PREFIXES[config.family]] if config.family in PREFIXES else []
    return {name for name in names if name.startswith(tuple(begins))}
