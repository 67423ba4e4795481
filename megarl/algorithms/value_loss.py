"""The critic's loss, per token. Weighting is not done here; how good a critic is: returns.explained_variance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """Per-token values, each [T]. loss: differentiable. clipped: bool, where the clip decided, so that no gradient flows."""

    loss: Tensor
    clipped: Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None = None
) -> ValueLoss:
    """max((V - R)^2, (V_old + clip(V - V_old, +-clip_range) - R)^2) / 2.

    PPO's clipped value loss, as in the reference implementation of arXiv 1707.06347 and in 2005.12729, section 3.
    Without clip_range: (V - R)^2 / 2.

    values: [T] float, of the critic under training. old_values: [T], of the critic before the step. returns: [T].
    Only values receives a gradient. Raises ValueError where clip_range is not above 0.
    """
    returns = returns.detach()
    plain = (values - returns).square() / 2
    if clip_range is None:
        return ValueLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
    if clip_range <= 0:
        raise ValueError(f"clip_range must be above 0, or None for no clip; got {clip_range}")
    old_values = old_values.detach()
    moved = values - old_values
    # Within the range the values themselves: old + (new - old) is rounded, and the clip would seem to decide.
    near = torch.where(moved.abs() <= clip_range, values, old_values + moved.clamp(-clip_range, clip_range))
    bounded = (near - returns).square() / 2
    clipped = bounded > plain
    return ValueLoss(torch.where(clipped, bounded, plain), clipped)
