"""Advantages: how much better a sample was than what it is compared with. One number a sample; numpy, no tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FloatArray, IntArray

VARIANCE_ROUNDING = 1e-12  # of a float64 variance, in parts of the sum of squares that it is made of


def group_advantages(rewards: FloatArray, group_index: IntArray, normalize_std: bool, eps: float = 1e-6) -> FloatArray:
    """A_i = r_i - mean(r of i's group), divided by std(r of i's group) + eps where normalize_std.

    With the standard deviation: GRPO (arXiv 2402.03300, section 4.1.2); without: Dr.GRPO (arXiv 2503.20783).
    The standard deviation is the population's. Groups of one, and groups whose rewards are all equal, give exactly 0.

    rewards: [N]. group_index: [N] integers from 0, in any order; groups may differ in size. Returns [N] float32.
    Raises ValueError where the shapes differ, an index is negative, or a reward is not finite.
    """
    rewards64, groups = _checked(rewards, group_index)
    advantages = _centered(rewards64, groups)
    if normalize_std:
        sizes = np.maximum(np.bincount(groups), 1)
        scale = np.sqrt(np.bincount(groups, weights=advantages**2) / sizes)[groups] + eps
        np.divide(advantages, scale, out=advantages, where=scale > 0)
    result: FloatArray = advantages.astype(np.float32)
    return result


def rloo_advantages(rewards: FloatArray, group_index: IntArray) -> FloatArray:
    """A_i = r_i - mean(r of the others of i's group), which is n / (n - 1) (r_i - mean(r of i's group)).

    RLOO, REINFORCE leave-one-out (arXiv 2402.14740). Groups of one, which have no others, give 0.

    rewards, group_index, errors: as for group_advantages. Returns [N] float32.
    """
    rewards64, groups = _checked(rewards, group_index)
    sizes = np.bincount(groups)[groups]
    advantages: FloatArray = (_centered(rewards64, groups) * sizes / np.maximum(sizes - 1, 1)).astype(np.float32)
    return advantages


def grpo_loo_advantages(rewards: FloatArray, group_index: IntArray, eps: float = 1e-6) -> FloatArray:
    """A_i = (r_i - mean(r of the others of i's group)) / (std(r of the others) + eps); undivided where that std is 0.

    NeMo-RL's GRPO as it comes (use_leave_one_out_baseline and normalize_rewards). The standard deviation is the sample's, over
    one less than the others. It is 0 in groups of one or two, and for the only one that differs from all others.

    rewards, group_index, errors: as for group_advantages. Returns [N] float32.
    """
    rewards64, groups = _checked(rewards, group_index)
    sizes = np.bincount(groups)[groups]
    others = np.maximum(sizes - 1, 1)
    centered = _centered(rewards64, groups)
    squares = np.bincount(groups, weights=centered**2)[groups]
    # Of the others, about the group's mean: their sum is -c_i.
    variance = (squares - centered**2 * sizes / others) / np.maximum(others - 1, 1)
    # What is left of equal rewards by rounding is no deviation.
    std = np.sqrt(np.where((sizes > 2) & (variance > VARIANCE_ROUNDING * squares), variance, 0))
    advantages = centered * sizes / others
    np.divide(advantages, std + eps, out=advantages, where=std > 0)
    result: FloatArray = advantages.astype(np.float32)
    return result


def reinforce_pp_baseline_advantages(
    rewards: FloatArray, group_index: IntArray, lengths: IntArray, eps: float = 1e-8
) -> FloatArray:
    """a_i = r_i - mean(r of i's group), then A_i = (a_i - mean(a)) / (std(a) + eps) over the whole batch.

    REINFORCE++ with a baseline (arXiv 2501.03262). Mean and standard deviation are those of all trained tokens
    of the batch, each with its sample's a: samples count by their lengths. All-equal a, and no tokens at all, give 0.

    lengths: [N] trained tokens. rewards, group_index, errors: as for group_advantages. Returns [N] float32.
    """
    rewards64, groups = _checked(rewards, group_index)
    tokens = _checked_lengths(lengths, rewards64)
    centered = _centered(rewards64, groups)
    if not tokens.sum() or np.ptp(centered[tokens > 0]) == 0:
        return np.zeros(len(centered), np.float32)
    centered -= np.average(centered, weights=tokens)
    std = np.sqrt(np.average(centered**2, weights=tokens))
    advantages: FloatArray = (centered / (std + eps)).astype(np.float32)
    return advantages


def remax_advantages(rewards: FloatArray, group_index: IntArray, greedy_rewards: FloatArray) -> FloatArray:
    """A_i = r_i - r of the greedy answer to i's prompt. ReMax (arXiv 2310.10505).

    greedy_rewards: [G], of one answer a prompt at temperature 0, by group index; of the same weights as the samples.
    rewards, group_index: as for group_advantages. Returns [N] float32.
    Raises ValueError as group_advantages does, and where greedy_rewards has too few numbers or one that is not finite.
    """
    rewards64, groups = _checked(rewards, group_index)
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    if len(greedy_rewards) < num_groups:
        raise ValueError(f"one greedy reward a group is needed: {num_groups}; got {len(greedy_rewards)}")
    advantages = rewards64 - np.asarray(greedy_rewards, np.float64)[groups]
    if not np.isfinite(advantages).all():
        raise ValueError(f"greedy_rewards must be finite; got {list(greedy_rewards)[:8]}")
    result: FloatArray = advantages.astype(np.float32)
    return result


def opo_advantages(rewards: FloatArray, group_index: IntArray, lengths: IntArray) -> FloatArray:
    """A_i = r_i - b, with b = sum(L_j r_j) / sum(L_j) over i's group: the mean weighted by lengths.

    OPO (arXiv 2505.23585): the baseline of least variance, where a sample's squared gradient grows with its
    length. A group without any trained token gives 0.

    lengths: [N] trained tokens. rewards, group_index, errors: as for group_advantages. Returns [N] float32.
    """
    rewards64, groups = _checked(rewards, group_index)
    advantages: FloatArray = _centered(rewards64, groups, _checked_lengths(lengths, rewards64)).astype(np.float32)
    return advantages


def gpg_advantages(rewards: FloatArray, group_index: IntArray, normalize_std: bool = False) -> FloatArray:
    """A_i = alpha (r_i - mean(r of i's group)) / F, with alpha = N / number of samples in groups whose rewards differ.

    GPG (arXiv 2504.02546): alpha makes up for the groups that give no gradient, so that a batch with
    many of them does not take a smaller step. F is 1, or the group's standard deviation where normalize_std.

    rewards, group_index, errors: as for group_advantages. Returns [N] float32; all 0 where no group's rewards differ.
    """
    advantages = group_advantages(rewards, group_index, normalize_std)
    groups = np.asarray(group_index, dtype=np.int64)
    teaching = int((~zero_variance_groups(rewards, group_index))[groups].sum())
    return advantages * np.float32(len(groups) / max(teaching, 1))


def egpo_advantages(
    rewards: FloatArray,
    group_index: IntArray,
    mean_nll: FloatArray,
    normalize_std: bool = True,
    right_reward: float = 0.5,
    min_weight: float = 0.5,
    max_weight: float = 2.0,
    eps: float = 1e-6,
) -> FloatArray:
    """A_i = w_i GRPO_i, with w_i from how uncertain the sample was beside its group; -w_i in groups that are all wrong.

    EGPO (arXiv 2602.22751). H_i is the entropy proxy mean_nll, and u_i = clip((mean of H in i's group + eps) / (H_i + eps),
    min_weight, max_weight), which is above 1 for the confident.
    Right samples: w_i = max(1, u_i), so that a right answer never counts less; wrong ones: w_i = min(1, u_i), so that a
    wrong answer never counts more, and one that was uncertain counts less than one that was sure of itself.
    A group whose rewards are all equal and wrong, where GRPO has no signal, gets -w_i for each sample. A group that is
    all right keeps GRPO's 0. The eps above the line is ours: equal uncertainty then means weight 1, also at H = 0.

    mean_nll: [N], minus the mean log-prob of the sample's trained tokens under the policy that sampled, nats.
    right_reward: a sample with at least this reward is right. rewards, group_index: as for group_advantages.
    Returns [N] float32. Raises ValueError as group_advantages does, for a mean_nll that is negative, not finite or not [N],
    and unless 0 <= min_weight <= 1 <= max_weight.
    """
    if not 0 <= min_weight <= 1 <= max_weight:
        raise ValueError(f"min_weight, 1, max_weight must be in this order; got {min_weight} and {max_weight}")
    rewards64, groups = _checked(rewards, group_index)
    entropy = np.asarray(mean_nll, np.float64)
    if entropy.shape != rewards64.shape or not np.isfinite(entropy).all() or (entropy < 0).any():
        raise ValueError(f"mean_nll must be [N], finite and not negative; got {list(mean_nll)[:8]}")
    sizes = np.maximum(np.bincount(groups), 1)
    usual = (np.bincount(groups, weights=entropy) / sizes)[groups]
    confidence = np.clip((usual + eps) / (entropy + eps), min_weight, max_weight)
    right = rewards64 >= right_reward
    weights = np.where(right, np.maximum(1, confidence), np.minimum(1, confidence))
    advantages = group_advantages(rewards, group_index, normalize_std, eps)
    all_wrong = zero_variance_groups(rewards, group_index)[groups] & ~right
    result: FloatArray = np.where(all_wrong, -weights, weights * advantages).astype(np.float32)
    return result


def gdpo_advantages(
    reward_parts: NDArray[np.float64], reward_weights: NDArray[np.float64], group_index: IntArray, eps: float = 1e-6
) -> FloatArray:
    """a_i = sum over k of w_k (s_ik - mean of s_k) / (std of s_k + eps), over i's group; A_i = (a_i - mean(a)) / (std(a) + 1e-8).

    GDPO (arXiv 2601.05242): each grader's scores s_k are normalised for themselves, so that one that varies more does not drown
    the others, and different mixtures of the same sum stay apart; then their weighted sum a is, over all samples of the batch.
    A score that is not there is in no mean and adds nothing. Sums that are all equal give exactly 0.

    reward_parts: [N, K], nan where there is no score. reward_weights: [K]. group_index: [N], as for group_advantages.
    Returns [N] float32. Raises ValueError as group_advantages does, and for other shapes.
    """
    parts, weights = np.asarray(reward_parts, np.float64), np.asarray(reward_weights, np.float64)
    groups = np.asarray(group_index, np.int64)
    if parts.shape != (len(groups), len(weights)):
        raise ValueError(f"reward_parts must be [N, K], {(len(groups), len(weights))}; got {parts.shape}")
    total = np.zeros(len(groups), np.float64)
    for weight, scores in zip(weights, parts.T, strict=True):
        there = ~np.isnan(scores)
        total[there] += weight * group_advantages(scores[there], groups[there], True, eps)
    if not len(total) or np.ptp(total) == 0:
        return np.zeros(len(total), np.float32)
    advantages: FloatArray = ((total - total.mean()) / (total.std() + 1e-8)).astype(np.float32)
    return advantages


def zero_variance_groups(rewards: FloatArray, group_index: IntArray) -> NDArray[np.bool_]:
    """Which groups teach nothing, because all their rewards are equal: [G] bool, G = largest index + 1.

    rewards: [N]. group_index: [N] integers from 0. An index that no sample has counts as a group without variance.
    Raises ValueError as group_advantages does.
    """
    rewards64, groups = _checked(rewards, group_index)
    return _equal(rewards64, groups)


def _centered(
    rewards: NDArray[np.float64], groups: IntArray, weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """r_i less its group's (weighted) mean; exactly 0 where a group's rewards are all equal, or all its weights 0."""
    weights = np.ones_like(rewards) if weights is None else weights
    totals = np.bincount(groups, weights=weights)
    sums = np.bincount(groups, weights=weights * rewards)
    means = np.divide(sums, totals, out=np.zeros(len(sums)), where=totals > 0)
    centered: NDArray[np.float64] = rewards - means[groups]
    # Rounding of the mean must not become an advantage when a tiny standard deviation divides it.
    centered[(_equal(rewards, groups) | (totals == 0))[groups]] = 0.0
    return centered


def _equal(rewards: NDArray[np.float64], groups: IntArray) -> NDArray[np.bool_]:
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, groups, rewards)
    np.maximum.at(high, groups, rewards)
    return low >= high


def _checked_lengths(lengths: IntArray, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens = np.asarray(lengths, np.float64)
    if tokens.shape != rewards.shape or (tokens < 0).any():
        raise ValueError(f"lengths must be [N], as rewards, and not negative; got {list(lengths)[:8]}")
    return tokens


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
