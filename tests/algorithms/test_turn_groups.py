"""GRPO by turns, by hand and against loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantage import group_advantages
from megarl.algorithms.turn_groups import turn_group_advantages


def test_turns_are_compared_with_the_same_turns_of_the_group() -> None:
    # Three episodes of a group: two turns that end well, two that do not, and one turn that does at once.
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 1], np.float32)
    cu_seqlens = np.array([0, 5, 10, 12])
    rewards = np.array([0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1], np.float32)
    found = turn_group_advantages(rewards, mask, cu_seqlens, np.array([0, 0, 0]), normalize_std=False)
    # First turns: 1, 0, 1, mean 2/3. Second ones: 1, 0, mean 1/2; the third episode has none.
    third = 1 / 3
    wanted = [0, third, third, 0, 0.5, 0, -2 * third, 0, 0, -0.5, third, third]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_what_a_turn_earned_is_not_praised_for_what_was_earned_before() -> None:
    mask = np.array([1, 0, 1, 1, 0, 1], np.float32)
    rewards = np.array([5, 0, 1, 2, 0, 1], np.float32)
    found = turn_group_advantages(rewards, mask, np.array([0, 3, 6]), np.array([0, 0]), normalize_std=False)
    assert found.tolist() == [1.5, 0, 0, -1.5, 0, 0]  # 6 and 3; then 1 and 1


def test_turns_that_are_too_old_to_be_trained_on_are_counted() -> None:
    """Two episodes of two turns; of the first the second turn alone is left: it is not compared with a first one."""
    mask = np.array([0, 0, 1, 1, 0, 1], np.float32)
    rewards = np.array([0, 0, 3, 4, 0, 1], np.float32)
    cu_seqlens, groups = np.array([0, 3, 6]), np.array([0, 0])
    found = turn_group_advantages(rewards, mask, cu_seqlens, groups, np.array([1, 0]), normalize_std=False)
    assert found.tolist() == [0, 0, 1, 0, 0, -1]


def test_groups_are_apart_and_a_turn_alone_gives_nothing() -> None:
    mask = np.array([1, 0, 1, 1, 1, 1], np.float32)
    rewards = np.array([0, 0, 7, 1, 2, 4], np.float32)
    groups = np.array([1, 1, 0, 0])
    found = turn_group_advantages(rewards, mask, np.array([0, 3, 4, 5, 6]), groups, normalize_std=True)
    np.testing.assert_allclose(found, [1, 0, 0, -1, -1, 1], atol=1e-5)


def test_sequences_that_touch_and_empty_ones_are_told_apart() -> None:
    mask = np.ones(4, np.float32)
    rewards = np.array([0, 1, 0, 0], np.float32)
    found = turn_group_advantages(rewards, mask, np.array([0, 0, 2, 2, 4]), np.zeros(4, int), normalize_std=False)
    assert found.tolist() == [0.5, 0.5, -0.5, -0.5]
    nothing = turn_group_advantages(rewards, np.zeros(4), np.array([0, 4]), np.array([0]))
    assert nothing.tolist() == [0, 0, 0, 0]


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_as_a_loop_over_turns_has_it(seed: int, normalize_std: bool) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, rng.integers(1, 12))
    cu_seqlens = np.concatenate([[0], lengths.cumsum()])
    mask = (rng.random(lengths.sum()) < 0.6).astype(np.float32)
    rewards = rng.integers(-2, 3, len(mask)).astype(np.float32)
    groups = rng.integers(0, 3, len(lengths))
    told: dict[tuple[int, int], list[tuple[float, list[int]]]] = {}
    for index, (first, end) in enumerate(pairwise(cu_seqlens)):
        turns: list[list[int]] = []
        for at in range(first, end):
            if mask[at]:
                turns = [*turns[:-1], [*turns[-1], at]] if at > first and mask[at - 1] else [*turns, [at]]
        for number, turn in enumerate(turns):
            to_come = sum(rewards[at] for later in turns[number:] for at in later)
            told.setdefault((groups[index], number), []).append((float(to_come), turn))
    wanted = np.zeros(len(mask), np.float32)
    for same in told.values():
        made = group_advantages(np.array([reward for reward, _ in same]), np.zeros(len(same), int), normalize_std)
        for advantage, (_, turn) in zip(made, same, strict=True):
            wanted[turn] = advantage
    found = turn_group_advantages(rewards, mask, cu_seqlens, groups, normalize_std=normalize_std)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found.dtype == np.float32


def test_other_shapes_and_infinities_are_refused() -> None:
    ones = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="one group a sequence"):
        turn_group_advantages(ones, ones, np.array([0, 4]), np.array([0, 0]))
    with pytest.raises(ValueError, match="must be finite"):
        turn_group_advantages(np.full(4, np.inf), ones, np.array([0, 4]), np.array([0]))
