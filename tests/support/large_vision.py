"""Models that see images, as large as published ones; without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.vision import QWEN2, QWEN2_5, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE

ROPE = {
    "rope_type": "default",
    "mrope_interleaved": True,
    "mrope_section": [24, 20, 20],
    "rope_theta": 5e6,
}
PARTIAL = ROPE | {"mrope_section": [11, 11, 10], "rope_theta": 1e7, "partial_rotary_factor": 0.25}
# Architecture, config class, and sizes where they are not transformers' own.
LARGE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2-VL-7B": (
        QWEN2,
        "Qwen2VLConfig",
        {
            **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
            **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "use_sliding_window": False},
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        },
        {},
    ),
    "Qwen2.5-VL-7B": (
        QWEN2_5,
        "Qwen2_5_VLConfig",
        {
            **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
            **{"num_key_value_heads": 4, "max_position_embeddings": 128000, "use_sliding_window": False},
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        },
        {"hidden_size": 1280, "out_hidden_size": 3584},
    ),
    "Qwen3-VL-8B": (
        QWEN3,
        "Qwen3VLConfig",
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rope_parameters": ROPE},
        },
        {"out_hidden_size": 4096},
    ),
    "Qwen3-VL-30B-A3B": (
        QWEN3_MOE,
        "Qwen3VLMoeConfig",
        {
            **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32},
            **{"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 768, "max_position_embeddings": 262144, "rope_parameters": ROPE},
        },
        {"out_hidden_size": 2048},
    ),
    "Qwen3-VL-235B-A22B": (
        QWEN3_MOE,
        "Qwen3VLMoeConfig",
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64},
            **{"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 1536, "max_position_embeddings": 262144, "rope_parameters": ROPE},
        },
        {"out_hidden_size": 4096},
    ),
    # Text parts are transformers' own.
    "Qwen3.5-9B": (QWEN3_5, "Qwen3_5Config", {"rope_parameters": PARTIAL}, {"out_hidden_size": 4096}),
    "Qwen3.5-35B-A3B": (QWEN3_5_MOE, "Qwen3_5MoeConfig", {"rope_parameters": PARTIAL}, {"out_hidden_size": 2048}),
}


def large_vision_config(name: str) -> Any:
    """As transformers has it."""
    import transformers

    architecture, config, text, vision = LARGE[name]
    return getattr(transformers, config)(text_config=text, vision_config=vision, architectures=[architecture])


def write_large_vision(folder: Path, name: str) -> Path:
    """A config.json, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(large_vision_config(name).to_dict()))
    return folder
