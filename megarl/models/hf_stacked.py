"""Experts that lie in one tensor a layer, or one by one: folders of one family have them in either form. Without torch.

Qwen3.5's are published in one tensor for all gates and ups and one for all downs, which megarl writes too. transformers'
`save_pretrained` writes a tensor for each expert's gate, up and down; below each other they are the same rows.
"""

from __future__ import annotations

ONE_TENSOR_FAMILIES = ("qwen3_5_moe",)
_PARTS = {".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), ".mlp.experts.down_proj": ("down_proj",)}


def one_by_one(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that the tensor of all experts is, in the order of its rows; none of another tensor.

    shape: [experts, rows, columns].
    """
    for end, parts in _PARTS.items():
        if name.endswith(end):
            prefix = name.removesuffix(end) + ".mlp.experts."
            each = shape[1] // len(parts), shape[2]
            return {f"{prefix}{expert}.{part}.weight": each for expert in range(shape[0]) for part in parts}
    return {}
