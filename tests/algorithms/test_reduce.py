"""Weights of tokens: a weighted sum equals the reduction that each mode names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.reduce import Reduction, sample_weights

lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=12)
MODES: list[Reduction] = ["token-mean", "sequence-mean", "constant"]


def by_loop(losses: list[np.ndarray], mode: Reduction, max_tokens: int) -> float:
    """The reduction of per-token losses, sample by sample, as its paper writes it."""
    filled = [loss for loss in losses if len(loss)]
    if not filled:
        return 0.0
    if mode == "token-mean":
        return float(np.concatenate(filled).mean())
    if mode == "sequence-mean":
        return float(np.mean([loss.mean() for loss in filled]))
    return float(sum(loss.sum() for loss in filled) / (len(losses) * max_tokens))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 10, 1 / 10, 0, 1 / 10]),
        ("sequence-mean", [1 / 6, 1 / 15, 0, 1 / 9]),
        # The first two are one prompt's: 7 tokens; the third has none, so there are 2 groups with tokens.
        ("group-mean", [1 / 14, 1 / 14, 0, 1 / 6]),
        ("constant", [1 / 32, 1 / 32, 0, 1 / 32]),
    ],
)
def test_hand_computed(mode: Reduction, expected: list[float]) -> None:
    weights = sample_weights(np.array([2, 5, 0, 3]), mode, max_tokens=8, group_index=[0, 0, 1, 2])
    assert weights.dtype == np.float32
    assert weights == pytest.approx(expected, rel=1e-6)


@given(lengths_lists, st.sampled_from(MODES), st.integers(30, 60), st.integers(0, 2**32 - 1))
def test_weighted_sum_equals_the_loop(lengths: list[int], mode: Reduction, max_tokens: int, seed: int) -> None:
    losses = [np.random.default_rng(seed).normal(size=length) for length in lengths]
    weights = sample_weights(lengths, mode, max_tokens)
    total = sum(float(weight) * loss.sum() for weight, loss in zip(weights, losses, strict=True))
    assert total == pytest.approx(by_loop(losses, mode, max_tokens), rel=1e-4, abs=1e-6)


@given(lengths_lists, st.sampled_from(MODES))
def test_sums_of_weights(lengths: list[int], mode: Reduction) -> None:
    total = float((sample_weights(lengths, mode, 30) * np.array(lengths)).sum())
    expected = sum(lengths) / (len(lengths) * 30) if mode == "constant" else float(any(lengths))
    assert total == pytest.approx(expected, rel=1e-5)


@given(lengths_lists, st.sampled_from(MODES))
def test_order_does_not_matter_and_empty_samples_weigh_nothing(lengths: list[int], mode: Reduction) -> None:
    weights = sample_weights(lengths, mode, 30)
    assert weights[::-1].tolist() == pytest.approx(sample_weights(lengths[::-1], mode, 30).tolist())
    assert [weight == 0 for weight in weights] == [length == 0 for length in lengths]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_weigh(mode: Reduction) -> None:
    assert sample_weights([0, 0], mode, 4).tolist() == [0, 0]
    assert sample_weights([], mode, 4).shape == (0,)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        sample_weights([2, -1], "token-mean", 4)
    with pytest.raises(ValueError, match="max_tokens of at least 1; got 0"):
        sample_weights([2], "constant", 0)
    with pytest.raises(ValueError, match="got 'mean'"):
        sample_weights([2], "mean", 4)  # type: ignore[arg-type]


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 999))
def test_group_mean_equals_the_loop(groups: list[list[int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    losses = [[random.normal(size=length) for length in group] for group in groups]
    means = [np.concatenate(group).mean() for group in losses if sum(map(len, group))]
    lengths = np.array([length for group in groups for length in group])
    index = np.array([number for number, group in enumerate(groups) for _ in group])
    flat = [loss for group in losses for loss in group]
    order = random.permutation(len(lengths))
    weights = sample_weights(lengths[order], "group-mean", 20, index[order])
    total = sum(float(weight) * flat[sample].sum() for weight, sample in zip(weights, order, strict=True))
    assert total == pytest.approx(np.mean(means) if means else 0, rel=1e-4, abs=1e-6)


def test_group_mean_of_groups_of_one_is_sequence_mean() -> None:
    lengths = [3, 0, 7, 1]
    expected = sample_weights(lengths, "sequence-mean", 9)
    assert sample_weights(lengths, "group-mean", 9, [3, 0, 1, 2]).tolist() == expected.tolist()
    assert sample_weights([], "group-mean", 9, []).shape == (0,)
    for groups in (None, [0]):
        with pytest.raises(ValueError, match="needs a group_index for each of 4 samples"):
            sample_weights(lengths, "group-mean", 9, groups)
