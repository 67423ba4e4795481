"""How many numbers a vision tower's weights are, by a config.json alone. Without torch."""

from __future__ import annotations

from megarl.models.hf_fields import Fields


def patch_size(tower: Fields) -> int:
    """Pixels of a patch's side. Raises UserError."""
    return tower.count("patch_size", 16 if _is_later(tower) else 14)


def tower_width(tower: Fields) -> int:
    """`hidden_size`, which is that of the text part in Qwen2-VL. Raises UserError."""
    return tower.count("hidden_size", 1152 if _is_later(tower) else 3584)  # transformers' defaults


def tower_elements(tower: Fields) -> int:
    """Of a `vision_config`, as transformers builds it of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5. Raises UserError."""
    if "embed_dim" in tower.raw:
        return _of_the_first(tower)
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


def _of_the_first(tower: Fields) -> int:
    """The same of Qwen2-VL, whose keys have other meanings: `hidden_size` is that of the text part."""
    hidden, out = tower.count("embed_dim", 1280), tower.count("hidden_size", 3584)
    inner, merged = hidden * tower.count("mlp_ratio", 4), hidden * tower.count("spatial_merge_size", 2) ** 2
    pixels = patch_size(tower) ** 2 * tower.count("temporal_patch_size", 2) * tower.count("in_channels", 3)
    block = 4 * hidden * (hidden + 1) + inner * (hidden + 1) + (inner + 1) * hidden + 4 * hidden
    merger = merged * (merged + 1) + (merged + 1) * out + 2 * hidden
    return pixels * hidden + tower.count("depth", 32) * block + merger


def _is_later(tower: Fields) -> bool:
    return any(key in tower.raw for key in ("num_position_embeddings", "deepstack_visual_indexes"))
