"""Importance weights between the policy that sampled and the trainer's own, which are never quite the same; numpy.

First the ratios, token by token or a sequence at a time; then what is done with them: truncate, mask or reject. The
weights multiply a loss that is linear in the advantages (all in megarl.algorithms.policy_loss are, for weights that are
not negative), so they may as well multiply the advantages. All columns are [T], label-aligned, see
megarl.algorithms.ragged; a weight outside of the mask is 0. The denominator of the loss stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.algorithms.limits import MAX_LOG_RATIO
from megarl.algorithms.ragged import Bounds, Floats, Mask, check_ragged, sequence_sums, spread, trained
from megarl.core.types import FloatArray

Level = Literal["token", "sequence", "geometric"]


class Correction(NamedTuple):
    """weights: [T] float32. touched: [T] bool, where the bound decided the weight."""

    weights: FloatArray
    touched: NDArray[np.bool_]


def importance_ratios(
    logprobs: Floats, rollout_logprobs: Floats, mask: Mask, cu_seqlens: Bounds, level: Level
) -> FloatArray:
    """pi(trainer) / pi(rollout): [T] float32, 0 outside of the mask.

    token: exp(d_t), with d_t = logprobs - rollout_logprobs. sequence: exp(sum of d over the sequence), at each of its
    tokens: unbiased for whole responses, of a variance that grows with their length. geometric: exp(mean of d over the
    sequence), which is biased, and does not. The exponent is clamped to +-20.

    logprobs: [T], natural log, of the trainer with the weights that sampled. rollout_logprobs: [T], as the server said.
    Raises ValueError for other shapes, for another level, and where they are not finite inside of the mask.
    """
    check_ragged(mask, cu_seqlens, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    chosen = mask != 0
    with np.errstate(invalid="ignore"):
        log_ratio = np.where(chosen, np.asarray(logprobs, np.float64) - rollout_logprobs, 0.0)
    if not np.isfinite(log_ratio).all():
        bad = int(np.flatnonzero(~np.isfinite(log_ratio))[0])
        raise ValueError(
            f"log-probs must be finite; at position {bad} the trainer has {logprobs[bad]}, the rollout {rollout_logprobs[bad]}"
        )
    if level in ("sequence", "geometric"):
        exponents = sequence_sums(log_ratio, mask, cu_seqlens)
        if level == "geometric":
            exponents /= np.maximum(trained(mask, cu_seqlens).counts, 1)
        log_ratio = spread(exponents, mask, cu_seqlens).astype(np.float64)
    elif level != "token":
        raise ValueError(f"level must be token, sequence or geometric; got {level!r}")
    ratios = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    result: FloatArray = np.where(chosen, ratios, 0.0).astype(np.float32)
    return result


def truncate(ratios: Floats, mask: Mask, max_ratio: float) -> Correction:
    """w = min(ratio, max_ratio): truncated importance sampling, TIS.

    Espeholt et al., arXiv 1802.01561, section 4.1; between rollout and trainer: Yao et al., "Your efficient RL framework
    secretly brings you off-policy RL training" (2025). Raises ValueError where max_ratio is not above 0.

    ratios: [T], of any level of importance_ratios.
    """
    if max_ratio <= 0:
        raise ValueError(f"max_ratio must be above 0; got {max_ratio}")
    chosen = mask != 0
    return Correction(_weights(np.minimum(ratios, max_ratio), chosen), chosen & (ratios > max_ratio))


def mask_outside(ratios: Floats, mask: Mask, min_ratio: float, max_ratio: float) -> Correction:
    """w = ratio inside of [min_ratio, max_ratio], 0 outside: masked importance sampling, MIS.

    IcePop (Ring-1T, arXiv 2510.18855). With ratios of a sequence, whole sequences are left out.

    ratios: [T]. Raises ValueError unless 0 <= min_ratio < max_ratio.
    """
    outside = _outside(ratios, mask, min_ratio, max_ratio)
    return Correction(_weights(np.where(outside, 0.0, ratios), mask != 0), outside)


def reject(ratios: Floats, mask: Mask, cu_seqlens: Bounds, min_ratio: float, max_ratio: float) -> Correction:
    """w = 0 on all of a sequence of which any ratio is outside of [min_ratio, max_ratio], 1 on the others.

    With token ratios, one impossible token condemns its sequence; with those of a sequence, the sequence as a whole.
    Beside the weights of truncate or mask_outside where those are wanted too: `both`.

    ratios: [T]. Raises ValueError unless 0 <= min_ratio < max_ratio.
    """
    outside = _outside(ratios, mask, min_ratio, max_ratio)
    rejected = sequence_sums(outside.astype(np.float32), mask, cu_seqlens) > 0
    touched = spread(rejected.astype(np.float32), mask, cu_seqlens) > 0
    return Correction(_weights(np.where(touched, 0.0, 1.0), mask != 0), touched)


def both(first: Correction, second: Correction) -> Correction:
    """One correction on top of another: the product of their weights; [T], touched where either bound decided."""
    return Correction(first.weights * second.weights, first.touched | second.touched)


# By the kind that a recipe names; each is given what its parameters ask for.
CORRECTIONS: Mapping[str, Callable[..., Correction]] = MappingProxyType(
    {"truncate": truncate, "mask": mask_outside, "reject": reject}
)


class WeightSums(NamedTuple):
    """Sums over trained positions that tell what a correction did; those of several parts add up.

    num: positions. weights, squares: sums of w and of w^2. touched: positions where a bound decided.
    """

    num: int = 0
    weights: float = 0.0
    squares: float = 0.0
    touched: int = 0

    @property
    def effective_sample_size(self) -> float:
        """(sum w)^2 / (K sum w^2) over K positions: the share of them that the weighted mean is worth.

        Kong (1992). 1 where all weights are equal, 1 / K where one has all; 0 where nothing has any weight.
        """
        return self.weights * self.weights / (self.num * self.squares) if self.squares else 0.0

    @property
    def share_touched(self) -> float:
        """Positions where a bound decided / positions; 0 where there are none."""
        return self.touched / self.num if self.num else 0.0


def weight_sums(correction: Correction, mask: Mask) -> WeightSums:
    """The sums of a correction [T] over the mask [T]."""
    chosen = mask != 0
    inside = correction.weights[chosen].astype(np.float64)
    touched = int(correction.touched[chosen].sum())
    return WeightSums(len(inside), float(inside.sum()), float((inside * inside).sum()), touched)


def add_up(parts: Iterable[WeightSums]) -> WeightSums:
    """The sums over all parts."""
    whole = WeightSums()
    for part in parts:
        whole = WeightSums(
            whole.num + part.num,
            whole.weights + part.weights,
            whole.squares + part.squares,
            whole.touched + part.touched,
        )
    return whole


def _weights(values: Floats, chosen: NDArray[np.bool_]) -> FloatArray:
    return np.where(chosen, values, 0.0).astype(np.float32)


def _outside(ratios: Floats, mask: Mask, min_ratio: float, max_ratio: float) -> NDArray[np.bool_]:
    if not 0 <= min_ratio < max_ratio:
        raise ValueError(f"0 <= min_ratio < max_ratio is needed; got {min_ratio} and {max_ratio}")
    outside: NDArray[np.bool_] = (mask != 0) & ((ratios < min_ratio) | (ratios > max_ratio))
    return outside
