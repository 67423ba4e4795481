"""Advantages of samples: hand-computed, against a loop over the formula, and properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantage import (
    egpo_advantages,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    grpo_loo_advantages,
    opo_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    zero_variance_groups,
)
from megarl.algorithms.returns import whiten

groups_of_rewards = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, 3.0]), min_size=1, max_size=6), min_size=1, max_size=6
)


def flat(groups: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    rewards = np.array([reward for group in groups for reward in group], dtype=np.float32)
    return rewards, np.array([index for index, group in enumerate(groups) for _ in group])


def by_loop(groups: list[list[float]], normalize_std: bool, eps: float = 1e-6) -> list[float]:
    """GRPO's formula, one number at a time."""
    advantages = []
    for group in groups:
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in group) / len(group))
        if len(set(group)) == 1:
            advantages += [0.0] * len(group)
        else:
            advantages += [(reward - mean) / ((std + eps) if normalize_std else 1) for reward in group]
    return advantages


def test_hand_computed_with_std() -> None:
    # Mean 0.25, population standard deviation sqrt(3) / 4.
    advantages = group_advantages(np.array([1, 0, 0, 0], np.float32), np.zeros(4, int), normalize_std=True, eps=0)
    assert advantages == pytest.approx(
        [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)], rel=1e-6
    )


def test_hand_computed_without_std() -> None:
    rewards, groups = flat([[1, 0, 0, 0], [2, 4]])
    assert group_advantages(rewards, groups, normalize_std=False).tolist() == [0.75, -0.25, -0.25, -0.25, -1, 1]


@given(groups_of_rewards, st.booleans())
def test_equals_the_loop(groups: list[list[float]], normalize_std: bool) -> None:
    advantages = group_advantages(*flat(groups), normalize_std)
    assert advantages.dtype == np.float32
    assert advantages == pytest.approx(by_loop(groups, normalize_std), rel=1e-4, abs=1e-5)


@given(groups_of_rewards, st.booleans(), st.randoms())
def test_order_of_samples_does_not_matter(groups: list[list[float]], normalize_std: bool, random: object) -> None:
    rewards, index = flat(groups)
    order = np.array(random.sample(range(len(rewards)), len(rewards)))  # type: ignore[attr-defined]
    shuffled = group_advantages(rewards[order], index[order], normalize_std)
    assert shuffled == pytest.approx(group_advantages(rewards, index, normalize_std)[order], abs=1e-6)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9), st.booleans())
def test_equal_rewards_and_groups_of_one_give_exactly_zero(reward: float, size: int, normalize_std: bool) -> None:
    rewards = np.full(size, reward, np.float32)
    assert not group_advantages(rewards, np.zeros(size, int), normalize_std).any()
    assert not group_advantages(rewards, np.arange(size), normalize_std).any()


@given(groups_of_rewards)
def test_each_group_sums_to_zero_and_has_unit_std(groups: list[list[float]]) -> None:
    rewards, index = flat(groups)
    advantages, zero = group_advantages(rewards, index, True), zero_variance_groups(rewards, index)
    for group in range(len(groups)):
        mine = advantages[index == group]
        assert abs(mine.sum()) < 1e-4
        assert mine.std() == pytest.approx(0.0 if zero[group] else 1.0, abs=1e-3)


def test_zero_variance_groups() -> None:
    rewards = np.array([1, 0, 1, 1, 0.5], np.float32)
    # Group 1 is all equal, 2 has nobody, 3 has one sample; samples come in any order.
    assert zero_variance_groups(rewards, np.array([0, 0, 1, 1, 3])).tolist() == [False, True, True, True]
    assert zero_variance_groups(rewards, np.array([0, 0, 1, 0, 1])).tolist() == [False, False]
    assert zero_variance_groups(np.array([], np.float32), np.array([], int)).tolist() == []


def test_no_samples() -> None:
    assert group_advantages(np.array([], np.float32), np.array([], int), True).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "says"),
    [
        ([1.0, 2.0], [0], r"both be \[N\]"),
        ([1.0, 2.0], [0, -1], "count from 0"),
        ([1.0, float("nan")], [0, 0], "reward 1 is nan"),
        ([float("inf"), 1.0], [0, 0], "reward 0 is inf"),
    ],
)
def test_refuses(rewards: list[float], groups: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        group_advantages(np.array(rewards, np.float32), np.array(groups), True)


def lengths_like(rewards: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 9, len(rewards))


def entropy_like(rewards: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 3, len(rewards)).astype(np.float32)


# Every estimator that compares a sample with its group, as a function of rewards and groups alone.
ESTIMATORS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": lambda r, g: group_advantages(r, g, True),
    "rloo": rloo_advantages,
    "grpo_loo": grpo_loo_advantages,
    "reinforce_pp_baseline": lambda r, g: reinforce_pp_baseline_advantages(r, g, lengths_like(r)),
    "opo": lambda r, g: opo_advantages(r, g, lengths_like(r)),
    "gpg": gpg_advantages,
    "gpg_std": lambda r, g: gpg_advantages(r, g, True),
    "egpo": lambda r, g: egpo_advantages(r, g, entropy_like(r)),
}
estimators = pytest.mark.parametrize("name", ESTIMATORS)


@estimators
@given(groups=groups_of_rewards)
def test_estimators_are_finite_float32(name: str, groups: list[list[float]]) -> None:
    rewards, index = flat(groups)
    advantages = ESTIMATORS[name](rewards, index)
    assert advantages.dtype == np.float32 and advantages.shape == rewards.shape
    assert np.isfinite(advantages).all()


@estimators
def test_estimators_take_no_samples_and_extreme_rewards(name: str) -> None:
    assert ESTIMATORS[name](np.zeros(0, np.float32), np.zeros(0, int)).shape == (0,)
    extreme = np.array([1e30, -1e30, 1e-30, 0, 1e30, 1e30], np.float32)
    assert np.isfinite(ESTIMATORS[name](extreme, np.array([0, 0, 1, 1, 2, 3]))).all()


@estimators
@given(reward=st.floats(0.5, 1e6, width=32), size=st.integers(1, 9))
def test_equal_right_answers_and_groups_of_one_teach_nothing(name: str, reward: float, size: int) -> None:
    rewards = np.full(size, reward, np.float32)
    assert not ESTIMATORS[name](rewards, np.zeros(size, int)).any()
    assert not ESTIMATORS[name](rewards, np.arange(size)).any()


@given(groups=groups_of_rewards, seed=st.integers(0, 1000))
def test_order_of_samples_does_not_matter_to_any(groups: list[list[float]], seed: int) -> None:
    rewards, index = flat(groups)
    lengths, entropy = lengths_like(rewards), entropy_like(rewards)
    order = np.random.default_rng(seed).permutation(len(rewards))
    both = [
        (
            rloo_advantages(r, g),
            reinforce_pp_baseline_advantages(r, g, n),
            opo_advantages(r, g, n),
            egpo_advantages(r, g, h),
        )
        for r, g, n, h in ((rewards, index, lengths, entropy), (x[order] for x in (rewards, index, lengths, entropy)))
    ]
    for straight, shuffled in zip(*both, strict=True):
        assert shuffled == pytest.approx(straight[order], abs=1e-5)


def test_rloo_hand_computed() -> None:
    # Each is held against the mean of the others: 1 - 1/2, 0 - 1, 1 - 1/2; a lone sample has nobody to be held against.
    rewards = np.array([1, 0, 1, 5], np.float32)
    assert rloo_advantages(rewards, np.array([0, 0, 0, 1])).tolist() == [0.5, -1, 0.5, 0]


def test_grpo_loo_hand_computed() -> None:
    """The others of 2 are 0, 0, 1: mean 1/3, sample variance 1/3. Of the only 1 among 0s nothing differs, nor of one other."""
    rewards, groups = np.array([2, 0, 0, 1, 1, 0, 0, 3, 1], np.float32), np.array([0] * 4 + [1] * 3 + [2] * 2)
    found = grpo_loo_advantages(rewards, groups)
    assert found[0] == pytest.approx((2 - 1 / 3) / (3**-0.5 + 1e-6))
    assert found[3] == pytest.approx((1 - 2 / 3) / ((4 / 3) ** 0.5 + 1e-6))
    assert found[4] == 1 and found[5] == pytest.approx(-0.5 / (0.5**0.5 + 1e-6))
    assert found[7:].tolist() == [2, -2]


@given(groups_of_rewards)
def test_grpo_loo_equals_the_loop(groups: list[list[float]]) -> None:
    expected = []
    for group in groups:
        for i, reward in enumerate(group):
            others = np.array(group[:i] + group[i + 1 :], np.float64)
            lead = reward - others.mean() if len(others) else 0.0
            std = others.std(ddof=1) if len(others) > 1 and np.ptp(others) else 0.0
            expected.append(lead / (std + 1e-6) if std else lead)
    assert grpo_loo_advantages(*flat(groups)) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@given(groups_of_rewards)
def test_rloo_equals_the_loop(groups: list[list[float]]) -> None:
    expected = [
        reward - math.fsum(group[:i] + group[i + 1 :]) / (len(group) - 1) if len(group) > 1 else 0.0
        for group in groups
        for i, reward in enumerate(group)
    ]
    assert rloo_advantages(*flat(groups)) == pytest.approx(expected, abs=1e-5)


def test_reinforce_pp_baseline_hand_computed() -> None:
    # Less their groups' means: 1/2, -1/2, 0. Tokens 1, 3, 4: mean -1/8, mean of squares 1/8, variance 7/64.
    advantages = reinforce_pp_baseline_advantages(
        np.array([1, 0, 7], np.float32), np.array([0, 0, 1]), np.array([1, 3, 4]), eps=0
    )
    std = math.sqrt(7 / 64)
    assert advantages == pytest.approx([0.625 / std, -0.375 / std, 0.125 / std], rel=1e-6)


@given(groups_of_rewards, st.integers(0, 99))
def test_reinforce_pp_baseline_whitens_tokens(groups: list[list[float]], seed: int) -> None:
    rewards, index = flat(groups)
    lengths = lengths_like(rewards, seed)
    tokens = np.repeat(group_advantages(rewards, index, normalize_std=False), lengths)
    advantages = reinforce_pp_baseline_advantages(rewards, index, lengths)
    assert np.repeat(advantages, lengths) == pytest.approx(whiten(tokens, np.ones_like(tokens)), abs=1e-3)


def test_remax_hand_computed() -> None:
    rewards, groups = np.array([1, 0, 1, 0.5], np.float32), np.array([1, 1, 0, 0])
    assert remax_advantages(rewards, groups, np.array([1, 0.25], np.float32)).tolist() == [0.75, -0.25, 0, -0.5]


@given(groups_of_rewards, st.integers(0, 99))
def test_remax_equals_the_loop(groups: list[list[float]], seed: int) -> None:
    greedy = np.random.default_rng(seed).normal(size=len(groups)).astype(np.float32)
    expected = [reward - float(greedy[number]) for number, group in enumerate(groups) for reward in group]
    assert remax_advantages(*flat(groups), greedy) == pytest.approx(expected, abs=1e-5)


def test_opo_hand_computed() -> None:
    # Baseline (1 * 1 + 3 * 0) / 4; the group without a token has none.
    rewards = np.array([1, 0, 2, 3], np.float32)
    assert opo_advantages(rewards, np.array([0, 0, 1, 1]), np.array([1, 3, 0, 0])).tolist() == [0.75, -0.25, 0, 0]


@given(groups_of_rewards, st.integers(0, 99))
def test_opo_equals_the_loop_and_takes_no_side_of_length(groups: list[list[float]], seed: int) -> None:
    rewards, index = flat(groups)
    lengths = lengths_like(rewards, seed) + 1
    advantages = opo_advantages(rewards, index, lengths)
    for group in range(len(groups)):
        mine = index == group
        baseline = math.fsum(lengths[mine] * rewards[mine].astype(float)) / lengths[mine].sum()
        assert advantages[mine] == pytest.approx(rewards[mine] - baseline, abs=1e-5)
        assert (advantages * lengths)[mine].sum() == pytest.approx(0, abs=1e-4)


def test_gpg_hand_computed() -> None:
    # Two of four samples are in a group that teaches: their advantages count twice.
    rewards, groups = np.array([1, 0, 1, 1], np.float32), np.array([0, 0, 1, 1])
    assert gpg_advantages(rewards, groups).tolist() == [1, -1, 0, 0]
    assert gpg_advantages(rewards, groups, normalize_std=True) == pytest.approx([2, -2, 0, 0], rel=1e-5)


@given(groups_of_rewards)
def test_gpg_equals_the_loop(groups: list[list[float]]) -> None:
    teaching = sum(len(group) for group in groups if len(set(group)) > 1)
    alpha = sum(map(len, groups)) / teaching if teaching else 0.0
    expected = [alpha * advantage for advantage in by_loop(groups, normalize_std=False)]
    assert gpg_advantages(*flat(groups)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gdpo_hand_computed() -> None:
    """Whole rewards are equal in group 0, where the scores are not; in group 1 the second grader says nothing of the last."""
    parts = np.array([[1, 0], [1, 0], [0, 1], [0, 1], [5, 2], [1, 4], [3, np.nan]])
    groups, weights = np.array([0, 0, 0, 0, 1, 1, 1]), np.array([1.0, 0.5])
    # Group 0: 1 and -1 of either. Group 1: the first's mean is 3 and its deviation sqrt(8 / 3); of the second 1 and -1 are left.
    first = 2 / math.sqrt(8 / 3)
    sums = np.array([0.5, 0.5, -0.5, -0.5, first - 0.5, 0.5 - first, 0])
    expected = (sums - sums.mean()) / sums.std()
    assert gdpo_advantages(parts, weights, groups, eps=0) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert not gdpo_advantages(parts[:4], np.ones(2), groups[:4]).any(), "1 - 1 everywhere"


@given(groups_of_rewards, st.integers(0, 99), st.booleans())
def test_gdpo_equals_the_loop(groups: list[list[float]], seed: int, some_lack: bool) -> None:
    random = np.random.default_rng(seed)
    rewards, index = flat(groups)
    parts = np.stack([rewards, random.integers(3, size=len(rewards)), random.normal(size=len(rewards))], axis=1)
    parts = parts.astype(np.float64)
    parts[(random.random(parts.shape) < 0.3) & some_lack] = np.nan
    weights = np.array([1.0, 0.0, -2.0])
    sums = np.zeros(len(rewards))
    for k, weight in enumerate(weights):
        for group in range(len(groups)):
            rows = [i for i in np.flatnonzero(index == group) if not np.isnan(parts[i, k])]
            for i, normal in zip(
                rows, by_loop([[float(parts[i, k]) for i in rows]], True) if rows else [], strict=True
            ):
                sums[i] += weight * normal
    found = gdpo_advantages(parts, weights, index)
    if np.ptp(sums) < 1e-6:
        assert found == pytest.approx(np.zeros(len(sums)), abs=1) and (np.ptp(sums) > 0 or not found.any())
    else:
        assert found == pytest.approx((sums - sums.mean()) / sums.std(), rel=1e-3, abs=1e-4)


def test_gdpo_does_not_depend_on_the_scale_of_a_grader_and_refuses_other_shapes() -> None:
    parts, groups = np.array([[1.0, 3], [0, 1], [0, 2], [1, 0]]), np.array([0, 0, 1, 1])
    plain = gdpo_advantages(parts, np.ones(2), groups, eps=0)
    assert gdpo_advantages(parts * [100, 1] + [7, 0], np.ones(2), groups, eps=0) == pytest.approx(plain, rel=1e-5)
    assert gdpo_advantages(np.zeros((0, 2)), np.ones(2), np.zeros(0, int)).shape == (0,)
    with pytest.raises(ValueError, match=r"reward_parts must be \[N, K\], \(4, 3\); got \(4, 2\)"):
        gdpo_advantages(parts, np.ones(3), groups)
    with pytest.raises(ValueError, match="must be finite"):
        gdpo_advantages(np.where(parts == 3, np.inf, parts), np.ones(2), groups)


def test_egpo_hand_computed() -> None:
    # Mean entropy 1. Sure of itself (1/2): u = 2. Unsure (3/2): u = 2/3. Right keeps max(1, u), wrong min(1, u).
    rewards = np.array([1, 1, 0, 0], np.float32)
    entropy = np.array([0.5, 1.5, 0.5, 1.5], np.float32)
    advantages = egpo_advantages(rewards, np.zeros(4, int), entropy, normalize_std=False, eps=0)
    assert advantages == pytest.approx([0.5 * 2, 0.5, -0.5, -0.5 * 2 / 3], rel=1e-6)
    all_wrong = egpo_advantages(np.zeros(2, np.float32), np.zeros(2, int), np.array([0.5, 1.5]), eps=0)
    assert all_wrong == pytest.approx([-1, -2 / 3], rel=1e-6)


@given(groups_of_rewards, st.integers(0, 99), st.booleans())
def test_egpo_equals_the_loop(groups: list[list[float]], seed: int, normalize_std: bool) -> None:
    rewards, index = flat(groups)
    entropy = entropy_like(rewards, seed)
    base, expected = by_loop(groups, normalize_std), []
    for i, reward in enumerate(rewards):
        mine = entropy[index == index[i]]
        u = min(max((float(mine.mean()) + 1e-6) / (float(entropy[i]) + 1e-6), 0.5), 2.0)
        weight = max(1.0, u) if reward >= 0.5 else min(1.0, u)
        lost = reward < 0.5 and len(set(groups[index[i]])) == 1
        expected.append(-weight if lost else weight * base[i])
    assert egpo_advantages(rewards, index, entropy, normalize_std) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@given(groups_of_rewards, st.floats(0, 5))
def test_egpo_with_equal_uncertainty_is_grpo_where_grpo_has_a_signal(groups: list[list[float]], entropy: float) -> None:
    rewards, index = flat(groups)
    advantages = egpo_advantages(rewards, index, np.full(len(rewards), entropy))
    expected = group_advantages(rewards, index, True)
    lost = zero_variance_groups(rewards, index)[index] & (rewards < 0.5)
    assert advantages == pytest.approx(np.where(lost, -1, expected), abs=1e-6)


def test_refuses_what_does_not_fit() -> None:
    rewards, groups = np.array([1, 0], np.float32), np.array([0, 1])
    with pytest.raises(ValueError, match=r"one greedy reward a group is needed: 2; got 1"):
        remax_advantages(rewards, groups, np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="greedy_rewards must be finite"):
        remax_advantages(rewards, groups, np.array([0, np.nan]))
    for lengths in ([1], [1, -1]):
        with pytest.raises(ValueError, match=r"lengths must be \[N\]"):
            opo_advantages(rewards, groups, np.array(lengths))
        with pytest.raises(ValueError, match=r"lengths must be \[N\]"):
            reinforce_pp_baseline_advantages(rewards, groups, np.array(lengths))
    for entropy in ([1.0], [1.0, -0.1], [1.0, np.inf]):
        with pytest.raises(ValueError, match=r"mean_nll must be \[N\]"):
            egpo_advantages(rewards, groups, np.array(entropy))
    with pytest.raises(ValueError, match=r"in this order; got 1\.5 and 2"):
        egpo_advantages(rewards, groups, np.ones(2), min_weight=1.5)
