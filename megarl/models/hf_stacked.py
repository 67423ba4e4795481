"""Experts that lie in one tensor a layer, of which each one's are rows: folders of one family have them so, or one by one.

Qwen3.5's are published in one tensor for all gates and ups and one for all downs; transformers' `save_pretrained` writes a
tensor for each expert's gate, up and down. megarl writes and sends these, of which none is large. Without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

STACKED_FAMILIES = ("qwen3_5_moe",)
_ONE = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_ALL = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def stacked(names: Iterable[str]) -> dict[str, list[str]]:
    """Name of a tensor of all experts -> names of those whose rows it has, one below the other, as they come in `names`."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _ONE.fullmatch(name):
            found.setdefault(f"{match[1]}.{_ALL[match[2]]}", []).append(name)
    return found
