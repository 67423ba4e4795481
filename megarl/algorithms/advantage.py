"""Advantages: how much better a sample was than what it is compared with. One number a sample; numpy, no tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FloatArray, IntArray


def group_advantages(rewards: FloatArray, group_index: IntArray, normalize_std: bool, eps: float = 1e-6) -> FloatArray:
    """A_i = r_i - mean(r of i's group), divided by std(r of i's group) + eps where normalize_std.

    With the standard deviation: GRPO (arXiv 2402.03300, section 4.1.2); without: Dr.GRPO (arXiv 2503.20783).
    The standard deviation is the population's. Groups of one, and groups whose rewards are all equal, give exactly 0.

    rewards: [N]. group_index: [N] integers from 0, in any order; groups may differ in size. Returns [N] float32.
    Raises ValueError where the shapes differ, an index is negative, or a reward is not finite.
    """
    rewards64, groups = _checked(rewards, group_index)
    sizes = np.maximum(np.bincount(groups), 1)
    centered = rewards64 - (np.bincount(groups, weights=rewards64) / sizes)[groups]
    # Rounding of the mean must not become an advantage when a tiny standard deviation divides it.
    centered[zero_variance_groups(rewards, group_index)[groups]] = 0.0
    if normalize_std:
        std = np.sqrt(np.bincount(groups, weights=centered**2) / sizes)
        centered /= std[groups] + eps
    advantages: FloatArray = centered.astype(np.float32)
    return advantages


def zero_variance_groups(rewards: FloatArray, group_index: IntArray) -> NDArray[np.bool_]:
    """Which groups teach nothing, because all their rewards are equal: [G] bool, G = largest index + 1.

    rewards: [N]. group_index: [N] integers from 0. An index that no sample has counts as a group without variance.
    Raises ValueError as group_advantages does.
    """
    rewards64, groups = _checked(rewards, group_index)
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, groups, rewards64)
    np.maximum.at(high, groups, rewards64)
    return low >= high


def _checked(rewards: FloatArray, group_index: IntArray) -> tuple[NDArray[np.float64], IntArray]:
    rewards64, groups = np.asarray(rewards, dtype=np.float64), np.asarray(group_index, dtype=np.int64)
    if rewards64.ndim != 1 or rewards64.shape != groups.shape:
        raise ValueError(f"rewards and group_index must both be [N]; got {rewards64.shape} and {groups.shape}")
    if len(groups) and groups.min() < 0:
        raise ValueError(f"group_index must count from 0; got {groups.min()}")
    if not np.isfinite(rewards64).all():
        first = int(np.flatnonzero(~np.isfinite(rewards64))[0])
        raise ValueError(f"rewards must be finite; reward {first} is {rewards64[first]}")
    return rewards64, groups
