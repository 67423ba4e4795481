"""Group-relative advantages: hand-computed, against a loop over the formula, and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantage import group_advantages, zero_variance_groups

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
