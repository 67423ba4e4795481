"""Estimators of the KL divergence from samples, token by token. Weighting and summing them is not done here."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megarl.algorithms.limits import MAX_LOG_RATIO

KlKind = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KlKind) -> Tensor:
    """Estimates KL(policy || reference) at tokens sampled from the policy: [T].

    With d = ref_logprobs - logprobs: k1 = -d; k2 = d^2 / 2; k3 = exp(d) - 1 - d; abs = |d|.
    John Schulman, "Approximating KL divergence" (2020). k1 and k3 are unbiased, k2 and k3 are never negative; k3 is
    GRPO's (arXiv 2402.03300, equation 4). abs is a distance, and no estimate of the KL. For all but k1, d
    is clamped to +-20, so that extreme tokens stay finite.

    logprobs: [T] float, natural log, of the policy under training. ref_logprobs: [T], of the reference; no gradient.
    Raises ValueError for another kind.
    """
    difference = ref_logprobs.detach() - logprobs
    if kind == "k1":
        return -difference
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "abs":
        return bounded.abs()
    if kind == "k2":
        return bounded.square() / 2
    if kind == "k3":
        return bounded.expm1() - bounded
    raise ValueError(f"kind must be k1, k2, k3 or abs; got {kind!r}")
