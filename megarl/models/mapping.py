"""Tensors from HF's form to Megatron's and back, as the rules say. Exact: no bit is lost in any direction.

`merge` makes a rank's part of a Megatron tensor from the slices that `rules.slices` names, `join` puts the parts together,
and `split` gives the HF tensors back. Shape letters: G key-value heads, q query heads of one of them, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.models.config import ModelConfig
from megarl.models.rules import Rule


def merge(rule: Rule, tensors: Sequence[Tensor], config: ModelConfig, tp: int) -> Tensor:
    """One rank's slices of the HF tensors -> its part of the Megatron tensor; whole tensors, with tp 1, -> the whole.

    A vocabulary that tp does not divide is padded with zeros.
    """
    if rule.form == "qkv":
        width = config.head_dim
        groups = tensors[1].shape[0] // width
        parts = [tensor.unflatten(0, (groups, -1, width)) for tensor in tensors]  # [G, q | 1 | 1, D, ...]
        return torch.cat(parts, dim=1).flatten(0, 2).contiguous()
    if rule.form == "gated":
        return torch.cat(list(tensors))
    (tensor,) = tensors
    if rule.form == "vocab":
        padding = config.padded_vocab_size(tp) // tp - tensor.shape[0]
        return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor
    return tensor


def split(rule: Rule, tensor: Tensor, config: ModelConfig) -> list[tuple[str, Tensor]]:
    """The full Megatron tensor -> named HF tensors, without padding."""
    if rule.form == "qkv":
        groups, width = config.num_kv_heads, config.head_dim
        queries = config.num_heads // groups
        parts = tensor.unflatten(0, (groups, queries + 2, width)).split([queries, 1, 1], dim=1)
        tensors = [part.flatten(0, 2).contiguous() for part in parts]
    elif rule.form == "gated":
        tensors = [half.contiguous() for half in tensor.chunk(2)]
    elif rule.form == "vocab":
        tensors = [tensor[: config.vocab_size]]
    else:
        tensors = [tensor]
    return list(zip(rule.hf, tensors, strict=True))


def join(rule: Rule, parts: Sequence[Tensor]) -> Tensor:
    """The full Megatron tensor from the parts of all ranks."""
    if rule.cut == "whole":
        return parts[0]
    if rule.cut == "gated":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[side] for side in (0, 1) for half in halves])
    return torch.cat(list(parts), dim=1 if rule.cut == "columns" else 0)
