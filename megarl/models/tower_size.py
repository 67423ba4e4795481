"""How many numbers a vision tower's weights are, by a config.json alone. Without torch."""

from __future__ import annotations

from megarl.models.hf_fields import Fields


def patch_size(tower: Fields) -> int:
    """Pixels of a patch's side. Raises UserError."""
    return tower.count("patch_size", 16 if _is_later(tower) else 14)


def tower_elements(tower: Fields) -> int:
    """Of a `vision_config`, as transformers builds it of Qwen2.5-VL (windows), or Qwen3-VL and Qwen3.5. Raises UserError."""
    later = _is_later(tower)
    sizes = (1152, 4304, 3584) if later else (3584, 3420, 3584)  # transformers' defaults
    keys = ("hidden_size", "intermediate_size", "out_hidden_size")
    hidden, inner, out = (tower.count(key, size) for key, size in zip(keys, sizes, strict=True))
    merged = hidden * tower.count("spatial_merge_size", 2) ** 2
    pixels = patch_size(tower) ** 2
    pixels *= tower.count("temporal_patch_size", 2) * tower.count("in_channels", 3)
    attention = 4 * hidden * (hidden + 1)
    merger = merged * (merged + 1) + (merged + 1) * out
    depth = tower.count("depth", 27 if later else 32)
    if not later:
        mlp = 2 * inner * (hidden + 1) + (inner + 1) * hidden
        return pixels * hidden + depth * (attention + mlp + 2 * hidden) + merger + hidden
    mlp = inner * (hidden + 1) + (inner + 1) * hidden
    earlier = len(tower.counts("deepstack_visual_indexes"))
    embedded = (pixels + 1 + tower.count("num_position_embeddings", 2304)) * hidden
    return (
        embedded + depth * (attention + mlp + 4 * hidden) + (1 + earlier) * merger + 2 * hidden + earlier * 2 * merged
    )


def _is_later(tower: Fields) -> bool:
    return any(key in tower.raw for key in ("num_position_embeddings", "deepstack_visual_indexes"))
