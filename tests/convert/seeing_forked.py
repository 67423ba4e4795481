"""What a rank of a conversion does, copied of a process that has loaded transformers' configs as well."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.convert.forked import main

LOADED = (
    PreTrainedConfig,
    *(
        CONFIG_MAPPING[kind]
        for kind in (
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
        )
    ),
)

__all__ = ["LOADED", "main"]
