"""The denominator of a loss, as weights of tokens: the loss of a mini-batch is the sum of weight x per-token loss.

Computed before backward over the whole mini-batch, so that neither micro-batching nor parallel layout can change it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.core.types import FloatArray

Reduction = Literal["token-mean", "sequence-mean", "group-mean", "constant"]


def sample_weights(
    lengths: ArrayLike, mode: Reduction, max_tokens: int, group_index: ArrayLike | None = None
) -> FloatArray:
    """The weight of each trained token of each sample: [N] float32.

    token-mean: 1 / sum(lengths), every token counts the same (DAPO, arXiv 2503.14476, section 3.3).
    sequence-mean: 1 / (length_i * number of samples with tokens), every sample counts the same (GRPO, 2402.03300).
    group-mean: 1 / (tokens of i's group * number of groups with tokens), every prompt counts the same, and every token
    of its samples.
    constant: 1 / (N * max_tokens), no length decides anything (Dr.GRPO, arXiv 2503.20783).
    A sample without trained tokens weighs 0.

    lengths: [N] trained tokens of each sample of the mini-batch. max_tokens: longest response; read by constant only.
    group_index: [N] integers from 0, in any order; read by group-mean only.
    Raises ValueError for another mode, for a negative length, for max_tokens below 1 with constant, and for group-mean
    without a group_index [N].
    """
    counts = np.asarray(lengths, dtype=np.float64)
    if (counts < 0).any():
        raise ValueError(f"lengths must not be negative; got {counts.min():g}")
    filled = counts > 0
    weights = np.zeros_like(counts)
    if mode == "token-mean":
        weights[filled] = 1 / counts.sum() if filled.any() else 0.0
    elif mode == "sequence-mean":
        weights[filled] = 1 / (counts[filled] * filled.sum())
    elif mode == "group-mean":
        weights[filled] = _group_weights(counts, group_index)[filled]
    elif mode == "constant":
        if max_tokens < 1:
            raise ValueError(f"constant needs max_tokens of at least 1; got {max_tokens}")
        weights[filled] = 1 / (max(1, len(counts)) * max_tokens)
    else:
        raise ValueError(f"mode must be token-mean, sequence-mean, group-mean or constant; got {mode!r}")
    return weights.astype(np.float32)


def _group_weights(counts: NDArray[np.float64], group_index: ArrayLike | None) -> NDArray[np.float64]:
    groups = None if group_index is None else np.asarray(group_index, dtype=np.int64)
    if groups is None or groups.shape != counts.shape:
        raise ValueError(f"group-mean needs a group_index for each of {len(counts)} samples; got {group_index!r}")
    tokens = np.bincount(groups, weights=counts)
    weights: NDArray[np.float64] = 1 / np.maximum(tokens[groups] * (tokens > 0).sum(), 1)
    return weights
