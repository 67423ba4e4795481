"""Token-level rewards, returns and advantages over ragged sequences: for algorithms with a critic, or with KL in the reward.

numpy. What is over the whole batch (whitening, the explained variance) can be made of the moments of its parts. All
columns are [T], label-aligned; S sequences lie end to end as `cu_seqlens` [S + 1] says; `mask` [T] is 1 where a label is
trained on. What lies between two trained tokens of a sequence (the words of a tool or a user) is stepped over: the next
state is that of the next trained token. Positions outside of the mask are 0 in every result.
"""

from __future__ import annotations

from math import sqrt
from typing import Literal, NamedTuple

import numpy as np

from megarl.algorithms.limits import MAX_LOG_RATIO
from megarl.algorithms.moments import Moments, moments
from megarl.algorithms.ragged import (
    Bounds,
    Floats,
    Mask,
    Trained,
    check_finite,
    check_ragged,
    pieces,
    reverse_scan,
    scatter,
    trained,
)
from megarl.core.types import FloatArray


class AdvantagesAndReturns(NamedTuple):
    """Both [T] float32, 0 outside of the mask; a critic learns the returns."""

    advantages: FloatArray
    returns: FloatArray


def gae(
    token_rewards: Floats, values: Floats, mask: Mask, cu_seqlens: Bounds, *, gamma: float = 1.0, lam: float = 1.0
) -> AdvantagesAndReturns:
    """A_t = sum over l of (gamma lam)^l delta_(t+l), with delta_t = r_t + gamma V_(t+1) - V_t; returns R_t = A_t + V_t.

    Generalized advantage estimation, arXiv 1506.02438, equation 16. Every sequence ends after its last trained token:
    the value there is 0, also where the length limit cut it.

    token_rewards: [T]. values: [T], of the state from which the label is predicted. gamma, lam: in [0, 1].
    Raises ValueError for other shapes, for gamma or lam outside of [0, 1], and for infinities inside of the mask.
    """
    _check_fractions(gamma=gamma, lam=lam)
    check_ragged(mask, cu_seqlens, token_rewards=token_rewards, values=values)
    result = AdvantagesAndReturns(np.empty(len(mask), np.float32), np.empty(len(mask), np.float32))
    for piece, bounds in pieces(cu_seqlens):
        at = trained(mask[piece], bounds)
        here = np.asarray(values[piece][at.where], np.float32)
        deltas = _next(here, at) * np.float32(gamma)
        deltas -= here
        deltas += token_rewards[piece][at.where]
        advantages = reverse_scan(deltas, _decays(gamma * lam, at))
        if not np.isfinite(advantages.sum()):
            check_finite(mask, token_rewards=token_rewards, values=values)
        scatter(advantages, at, result.advantages[piece])
        scatter(advantages + here, at, result.returns[piece])
    return result


def discounted_returns(token_rewards: Floats, mask: Mask, cu_seqlens: Bounds, *, gamma: float = 1.0) -> FloatArray:
    """R_t = r_t + gamma R_(t+1): the reward still to come, [T] float32.

    token_rewards: [T]. Raises ValueError as gae does.
    """
    _check_fractions(gamma=gamma)
    check_ragged(mask, cu_seqlens, token_rewards=token_rewards)
    result = np.empty(len(mask), np.float32)
    for piece, bounds in pieces(cu_seqlens):
        at = trained(mask[piece], bounds)
        returns = reverse_scan(np.asarray(token_rewards[piece][at.where], np.float32), _decays(gamma, at))
        if not np.isfinite(returns.sum()):
            check_finite(mask, token_rewards=token_rewards)
        scatter(returns, at, result[piece])
    return result


def whiten(
    values: Floats, mask: Mask, *, shift: bool = True, eps: float = 1e-8, over: Moments | None = None
) -> FloatArray:
    """(x - mean) / (std + eps) over all positions of the mask: [T] float32, 0 elsewhere. PPO's and REINFORCE++'s.

    The standard deviation is the population's. Without shift the mean is added again, as for rewards, whose zero means
    something. Values that are all equal give exactly 0 (their mean without shift).

    values: [T]. over: moments of all that is whitened together, where this is a part of it; default: of the values.
    Raises ValueError where the shapes differ.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values and mask must both be [T]; got {values.shape} and {mask.shape}")
    chosen = np.asarray(mask) != 0
    result = np.zeros(len(values), np.float32)
    inside = values[chosen].astype(np.float64)
    if len(inside):
        over = moments(inside) if over is None else over
        # Rounding of the mean must not become a signal when a tiny standard deviation divides it.
        white = np.zeros_like(inside) if over.are_equal else (inside - over.mean) / (sqrt(over.variance) + eps)
        result[chosen] = white if shift else white + over.mean
    return result


def token_rewards(
    rewards: Floats, mask: Mask, cu_seqlens: Bounds, *, kl: Floats | None = None, kl_coef: float = 0.0
) -> FloatArray:
    """r_t = -kl_coef * kl_t, and the sample's reward on top at its last trained token: [T] float32.

    KL in the reward: arXiv 1909.08593, equation 2. A sequence without trained tokens has no place for its reward.

    rewards: [S], one a sequence, in the order of cu_seqlens. kl: [T], see kl_penalty; needed where kl_coef is not 0.
    Raises ValueError for other shapes, and where kl_coef is not 0 without kl.
    """
    if kl_coef and kl is None:
        raise ValueError(f"kl_coef is {kl_coef}, but there is no kl to weigh: give kl, or set kl_coef to 0")
    kl = np.zeros(len(mask), np.float32) if kl is None else kl
    check_ragged(mask, cu_seqlens, kl=kl)
    at = trained(mask, cu_seqlens)
    if len(rewards) != len(at.counts):
        raise ValueError(f"one reward a sequence is needed: {len(at.counts)}; got {len(rewards)}")
    inside = -kl_coef * np.asarray(kl[at.where], np.float32)
    inside[at.last] += np.asarray(rewards, np.float32)[at.counts > 0]
    result = np.empty(len(mask), np.float32)
    scatter(inside, at, result)
    return result


def kl_penalty(logprobs: Floats, ref_logprobs: Floats, kind: Literal["k1", "k2", "k3", "abs"]) -> FloatArray:
    """The estimators of megarl.algorithms.kl on arrays, for KL in the reward: [T] float32.

    With d = ref_logprobs - logprobs, clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, abs = |d|.

    logprobs, ref_logprobs: [T], natural log; of the policy that sampled, and of the reference.
    Raises ValueError for another kind.
    """
    d = np.clip(np.asarray(ref_logprobs, np.float64) - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        penalty = -d
    elif kind == "k2":
        penalty = d**2 / 2
    elif kind == "k3":
        penalty = np.expm1(d) - d
    elif kind == "abs":
        penalty = np.abs(d)
    else:
        raise ValueError(f"kind must be k1, k2, k3 or abs; got {kind!r}")
    result: FloatArray = penalty.astype(np.float32)
    return result


def reinforce_pp_advantages(token_rewards: Floats, mask: Mask, cu_seqlens: Bounds, *, gamma: float = 1.0) -> FloatArray:
    """The returns, whitened over all trained tokens of the batch: [T] float32. REINFORCE++, arXiv 2501.03262.

    token_rewards: [T], with the KL in them where there is one. Raises ValueError as discounted_returns does.
    """
    return whiten(discounted_returns(token_rewards, mask, cu_seqlens, gamma=gamma), mask)


def distill_advantages(logprobs: Floats, teacher_logprobs: Floats, mask: Mask) -> FloatArray:
    """A_t = log teacher - log policy of the sampled token, clamped to +-20: [T] float32.

    On-policy distillation: the expectation of -A is the reverse KL(policy || teacher) of each position (arXiv
    2306.08543; 2306.13649). Each token answers for itself: nothing later is added.

    logprobs: [T], natural log, of the policy that sampled. teacher_logprobs: [T], of the same tokens.
    Raises ValueError where the shapes differ.
    """
    if not logprobs.shape == teacher_logprobs.shape == mask.shape:
        raise ValueError(f"all must be [T]; got {logprobs.shape}, {teacher_logprobs.shape} and {mask.shape}")
    chosen = np.asarray(mask) != 0
    result = np.zeros(len(mask), np.float32)
    difference = np.asarray(teacher_logprobs, np.float64)[chosen] - logprobs[chosen]
    result[chosen] = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return result


def explained_variance(residuals: Moments, returns: Moments) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows nothing.

    residuals: of returns - values, returns: of the returns, both merged from parts where there are several. 0 where the returns
    do not vary: there is nothing to explain.
    """
    return 0.0 if returns.are_equal or not returns.variance else 1 - residuals.variance / returns.variance


def _next(values: FloatArray, at: Trained) -> FloatArray:
    """The value of the next trained token of the same sequence, 0 after the last: [K]."""
    following = np.empty_like(values)
    following[:-1] = values[1:]
    following[at.last] = 0
    return following


def _decays(decay: float, at: Trained) -> FloatArray:
    """How much what follows counts: nothing after the last trained token of a sequence: [K]."""
    decays = np.full(at.num, decay, np.float32)
    decays[at.last] = 0
    return decays


def _check_fractions(**settings: float) -> None:
    for name, value in settings.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1]; got {value}")
