"""Which tensors a vision tower has by its config.json, as transformers 5.12 makes it, and whether a folder's are these.

Without torch: what transformers itself would make of the config takes seconds of every start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from megarl.core.errors import UserError
from megarl.models.hf_fields import Fields
from megarl.models.multimodal import TOWER, tower_names
from megarl.models.tower_size import is_later, patch_size, tower_shape
from megarl.models.weight_files import AGAIN, some


def tower_elements(tower: Fields) -> int:
    """Of a `vision_config`, as transformers builds it of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5. Raises UserError."""
    ends, block = _tensors(tower)
    return _numbers(ends) + tower_shape(tower).depth * _numbers(block)


def check_tower(tower: Fields, stored: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise UserError where a folder's tower is not that of the same config. stored: the shapes of its tensors."""
    if not stored:
        raise UserError(f"The weights in {folder} have no vision tower: they are of the text part alone. {AGAIN}")
    # First by their number: of another depth there would be a line of names for each block.
    count, wanted = _numbers(stored), tower_elements(tower)
    if count != wanted:
        raise UserError(
            f"The vision tower in {folder} is not that of its config.json: its {len(stored)} tensors have {count:,} numbers, and "
            f"vision_config is of a tower of {wanted:,}. {AGAIN}"
        )
    found, expected = {TOWER + part: stored[name] for part, name in tower_names(stored).items()}, _all(tower)
    wrong = {
        "missing": sorted(expected.keys() - found.keys()),
        "not in the config": sorted(found.keys() - expected.keys()),
        "of another shape": [
            f"{name} is {list(found[name])}, the config says {list(shape)}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ],
    }
    if any(wrong.values()):
        said = "; ".join(f"{kind}: {some(what)}" for kind, what in wrong.items() if what)
        raise UserError(f"The vision tower's weights in {folder} do not match its config.json. {said}. {AGAIN}")


def _all(tower: Fields) -> dict[str, tuple[int, ...]]:
    ends, block = _tensors(tower)
    blocks = range(tower_shape(tower).depth)
    named = ends | {f"blocks.{number}.{name}": shape for number in blocks for name, shape in block.items()}
    return {TOWER + name: shape for name, shape in named.items()}


def _tensors(tower: Fields) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes in front of the blocks and behind them, and those of each block."""
    shape, later = tower_shape(tower), is_later(tower)
    width, merged = shape.width, shape.merged * shape.width
    sides = (tower.count("temporal_patch_size", 2), *[patch_size(tower)] * 2)
    ends: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (width, tower.count("in_channels", 3), *sides)}
    if later:
        ends |= {"patch_embed.proj.bias": (width,)}
        ends |= {"pos_embed.weight": (tower.count("num_position_embeddings", 2304), width)}
        names = ("norm", "linear_fc1", "linear_fc2")
    else:
        names = ("ln_q", "mlp.0", "mlp.2")
    for merger in ("merger", *(f"deepstack_merger_list.{number}" for number in range(shape.mergers - 1))):
        normed, first, second = (f"{merger}.{name}" for name in names)
        ends |= _norm(normed, width if merger == "merger" else merged, biased=not shape.wide_norms)
        ends |= _linear(first, merged, merged) | _linear(second, shape.out, merged)
    block = _linear("attn.qkv", 3 * width, width) | _linear("attn.proj", width, width)
    for name in ("norm1", "norm2"):
        block |= _norm(name, width, biased=not shape.wide_norms)
    last = "down_proj" if shape.wide_norms else "linear_fc2" if later else "fc2"
    for name in ["gate_proj", "up_proj"] if shape.wide_norms else ["linear_fc1" if later else "fc1"]:
        block |= _linear(f"mlp.{name}", shape.inner, width)
    return ends, block | _linear(f"mlp.{last}", width, shape.inner)


def _linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm(name: str, width: int, *, biased: bool) -> dict[str, tuple[int, ...]]:
    kinds = ["weight", "bias"] if biased else ["weight"]
    return {f"{name}.{kind}": (width,) for kind in kinds}


def _numbers(tensors: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, tensors.values()))
