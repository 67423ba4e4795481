"""Tensors from HF's form to Megatron's and back, as the rules say. Exact: no bit is lost in any direction.

`merge` and `split` are inverses, and so are `cut` and `join`. Shape letters: G key-value heads, q query heads of one of
them, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.models.hf_config import ModelConfig
from megarl.models.rules import Rule


def merge(rule: Rule, tensors: Sequence[Tensor], config: ModelConfig, tp: int) -> Tensor:
    """HF tensors -> the full Megatron tensor, its vocabulary padded with zeros to a multiple of tp."""
    if rule.form == "qkv":
        groups, width = config.num_kv_heads, config.head_dim
        parts = [tensor.unflatten(0, (groups, -1, width)) for tensor in tensors]  # [G, q | 1 | 1, D, ...]
        return torch.cat(parts, dim=1).flatten(0, 2).contiguous()
    if rule.form == "gated":
        return torch.cat(list(tensors))
    (tensor,) = tensors
    if rule.form == "vocab":
        padding = config.padded_vocab_size(tp) - tensor.shape[0]
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


def cut(rule: Rule, tensor: Tensor, rank: int, tp: int) -> Tensor:
    """The part of a full Megatron tensor that one tensor-parallel rank holds."""
    if rule.cut == "whole":
        return tensor
    if rule.cut == "gated":
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, dim=1 if rule.cut == "columns" else 0)[rank]


def join(rule: Rule, parts: Sequence[Tensor]) -> Tensor:
    """The full Megatron tensor from the parts of all ranks."""
    if rule.cut == "whole":
        return parts[0]
    if rule.cut == "gated":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[side] for side in (0, 1) for half in halves])
    return torch.cat(list(parts), dim=1 if rule.cut == "columns" else 0)
