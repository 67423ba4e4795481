"""Frequencies of rotary positions (RoPE, arXiv 2104.09864), plain and stretched. Tensors only; Megatron is in `rotary`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models.config import Rope


def inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    """[dim / 2] float32, radians a position. dim: width of the rotated part of a head.

    linear divides all by the factor (arXiv 2306.15595); llama3 divides long waves, keeps short ones and blends between
    (Llama 3.1); yarn blends over dimensions (arXiv 2309.00071); longrope divides each by a factor of its own (arXiv 2402.13753).
    proportional has those of the whole width, and zeros behind the first of them (Gemma 4).
    """
    wavelengths = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # over 2 pi
    plain = 1.0 / wavelengths
    if rope.kind == "proportional":
        plain[int(rope.share * dim // 2) :] = 0.0
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.short_factors) * wavelengths)
    return plain


def attention_factor(rope: Rope) -> float:
    """What cosine and sine are multiplied by: 1 but for yarn and longrope, which sharpen attention the further they stretch."""
    if rope.kind == "longrope":
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
    return magnitude(rope.factor)


def logit_factor(rope: Rope) -> float:
    """The same for the product of a query and a key, which are both multiplied."""
    return attention_factor(rope) ** 2


def position_scale(rope: Rope, positions: Tensor) -> Tensor:
    """What queries at these positions are multiplied by, float32: 1 + beta ln(1 + floor(position / original context)).

    As in Llama 4, whose own models have it in some layers: logits of a longer context are sharper. positions: any shape.
    """
    return 1 + rope.position_beta * torch.log1p(positions // rope.original_positions)


def magnitude(factor: float, weight: float = 1.0) -> float:
    """Yarn's 0.1 weight ln(factor) + 1; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    # Turns that each frequency makes within the context of the first training.
    turns = rope.original_positions * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: Rope, plain: Tensor, dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        """The (fractional) dimension whose frequency makes so many turns within the first context."""
        return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretched * plain / rope.factor + (1 - stretched) * plain
