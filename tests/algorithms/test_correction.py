"""Off-policy weights: hand-computed, against loops, and that no ratio however extreme gets through."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.correction import (
    Correction,
    Level,
    add_up,
    both,
    importance_ratios,
    mask_outside,
    reject,
    truncate,
    weight_sums,
)
from tests.algorithms.ragged_cases import Ragged, batches

LEVELS: list[Level] = ["token", "sequence", "geometric"]
levels = st.sampled_from(LEVELS)

# Two sequences: ratios 2, (a gap), 1/2, 8; and 1/4.
MASK = np.array([1, 0, 1, 1, 1], np.float32)
BOUNDS = np.array([0, 4, 5])
LOGPROBS = np.log(np.array([0.5, 0.9, 0.2, 0.8, 0.1]))
ROLLOUT = np.log(np.array([0.25, 0.1, 0.4, 0.1, 0.4]))


def ratios_by_loop(batch: Ragged, level: Level) -> np.ndarray:
    result = np.zeros(len(batch.mask))
    for sequence in batch.sequences:
        logs = {t: float(batch.columns[0][t]) - float(batch.columns[1][t]) for t in sequence}
        total = math.fsum(logs.values())
        for t in sequence:
            result[t] = math.exp({"token": logs[t], "sequence": total, "geometric": total / len(sequence)}[level])
    return result


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [2, 0, 0.5, 8, 0.25]), ("sequence", [8, 0, 8, 8, 0.25]), ("geometric", [2, 0, 2, 2, 0.25])],
)
def test_ratios_hand_computed(level: Level, expected: list[float]) -> None:
    assert importance_ratios(LOGPROBS, ROLLOUT, MASK, BOUNDS, level) == pytest.approx(expected, rel=1e-6)


@given(batches, levels)
def test_ratios_equal_the_loop(batch: Ragged, level: Level) -> None:
    ratios = importance_ratios(*batch.columns, batch.mask, batch.cu_seqlens, level)
    bound = math.exp(20)
    assert ratios.dtype == np.float32
    assert ratios == pytest.approx(np.clip(ratios_by_loop(batch, level), batch.mask / bound, bound), rel=1e-3)


@given(batches, levels)
def test_equal_policies_have_weight_1(batch: Ragged, level: Level) -> None:
    ratios = importance_ratios(batch.columns[0], batch.columns[0], batch.mask, batch.cu_seqlens, level)
    assert ratios.tolist() == batch.mask.tolist()
    for correction in (
        truncate(ratios, batch.mask, 2.0),
        mask_outside(ratios, batch.mask, 0.5, 2.0),
        reject(ratios, batch.mask, batch.cu_seqlens, 0.5, 2.0),
    ):
        assert correction.weights.tolist() == batch.mask.tolist() and not correction.touched.any()


def test_truncate_hand_computed() -> None:
    ratios = importance_ratios(LOGPROBS, ROLLOUT, MASK, BOUNDS, "token")
    weights, touched = truncated = truncate(ratios, MASK, 3.0)
    assert weights == pytest.approx([2, 0, 0.5, 3, 0.25])
    assert touched.tolist() == [False, False, False, True, False]
    assert weight_sums(truncated, MASK).share_touched == 0.25


def test_mask_outside_hand_computed() -> None:
    ratios = importance_ratios(LOGPROBS, ROLLOUT, MASK, BOUNDS, "token")
    weights, touched = mask_outside(ratios, MASK, 0.4, 3.0)
    assert weights == pytest.approx([2, 0, 0.5, 0, 0])
    assert touched.tolist() == [False, False, False, True, True]
    of_sequences = mask_outside(importance_ratios(LOGPROBS, ROLLOUT, MASK, BOUNDS, "geometric"), MASK, 0.5, 2.5)
    assert of_sequences.weights == pytest.approx([2, 0, 2, 2, 0])


def test_reject_hand_computed() -> None:
    ratios = importance_ratios(LOGPROBS, ROLLOUT, MASK, BOUNDS, "token")
    weights, touched = reject(ratios, MASK, BOUNDS, 0.2, 3.0)
    assert weights.tolist() == [0, 0, 0, 0, 1]  # one token of the first sequence is beyond
    assert touched.tolist() == [True, False, True, True, False]
    assert reject(ratios, MASK, BOUNDS, 0.3, 9.0).weights.tolist() == [1, 0, 1, 1, 0]


def test_one_correction_on_top_of_another_hand_computed() -> None:
    of_tokens = truncate(importance_ratios(LOGPROBS, ROLLOUT, MASK, BOUNDS, "token"), MASK, 3.0)
    means = importance_ratios(LOGPROBS, ROLLOUT, MASK, BOUNDS, "geometric")
    weights, touched = both(of_tokens, reject(means, MASK, BOUNDS, 0.5, 3.0))
    assert weights == pytest.approx([2, 0, 0.5, 3, 0])  # the second sequence's mean, 1/4, is too low
    assert touched.tolist() == [False, False, False, True, True]


@given(batches, levels, st.floats(0.1, 0.9), st.floats(1.1, 3))
def test_corrections_equal_the_loop(batch: Ragged, level: Level, low: float, high: float) -> None:
    ratios = importance_ratios(*batch.columns, batch.mask, batch.cu_seqlens, level)
    truncated = truncate(ratios, batch.mask, high)
    masked = mask_outside(ratios, batch.mask, low, high)
    rejected = reject(ratios, batch.mask, batch.cu_seqlens, low, high)
    for sequence in batch.sequences:
        whole = all(low <= ratios[t] <= high for t in sequence)
        for t in sequence:
            ratio, inside = float(ratios[t]), low <= ratios[t] <= high
            assert truncated.weights[t] == pytest.approx(min(ratio, high), rel=1e-6)
            assert truncated.touched[t] == (ratio > high)
            assert masked.weights[t] == (pytest.approx(ratio) if inside else 0)
            assert masked.touched[t] == (not inside)
            assert rejected.weights[t] == float(whole)
            assert rejected.touched[t] == (not whole)
    for correction in (truncated, masked, rejected):
        assert not correction.weights[batch.mask == 0].any() and not correction.touched[batch.mask == 0].any()


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_ratios_stay_finite_and_bounded(level: Level) -> None:
    logprobs, rollout = np.array([0.0, -1e30, -5e3, 0]), np.array([-1e30, 0.0, 0, -5e3])
    ratios = importance_ratios(logprobs, rollout, np.ones(4), np.array([0, 1, 2, 4]), level)
    assert np.isfinite(ratios).all() and (ratios >= 0).all()
    assert truncate(ratios, np.ones(4), 2.0).weights.max() <= 2


def effective_sample_size(weights: np.ndarray, mask: np.ndarray) -> float:
    return weight_sums(Correction(weights, np.zeros(len(mask), np.bool_)), mask).effective_sample_size


def test_effective_sample_size() -> None:
    mask = np.array([1, 1, 0, 1, 1])
    assert effective_sample_size(np.array([3, 3, 99, 3, 3.0]), mask) == 1
    assert effective_sample_size(np.array([5, 0, 99, 0, 0.0]), mask) == 0.25
    assert effective_sample_size(np.array([1, 3, 99, 0, 0.0]), mask) == pytest.approx(16 / 40)
    assert effective_sample_size(np.zeros(5), mask) == effective_sample_size(np.zeros(0), np.zeros(0)) == 0


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=20), st.floats(0.01, 100))  # squares above 0, too
def test_effective_sample_size_is_a_share_that_no_scale_changes(weights: list[float], scale: float) -> None:
    values, mask = np.array(weights), np.ones(len(weights))
    share = effective_sample_size(values, mask)
    assert 0 <= share <= 1 + 1e-9
    assert effective_sample_size(values * scale, mask) == pytest.approx(share, rel=1e-6, abs=1e-9)


@given(batches, st.integers(1, 4))
def test_the_sums_of_parts_add_up(batch: Ragged, parts: int) -> None:
    ratios = importance_ratios(*batch.columns, batch.mask, batch.cu_seqlens, "token")
    whole = weight_sums(truncate(ratios, batch.mask, 1.1), batch.mask)
    pieces = [(ratios[part::parts], batch.mask[part::parts]) for part in range(parts)]
    together = add_up(weight_sums(truncate(ratio, mask, 1.1), mask) for ratio, mask in pieces)
    assert together == pytest.approx(whole, rel=1e-9)
    assert together.share_touched == whole.share_touched


def test_no_tokens() -> None:
    empty, bounds = np.zeros(0), np.array([0])
    for level in LEVELS:
        assert importance_ratios(empty, empty, empty, bounds, level).shape == (0,)
    assert weight_sums(truncate(empty, empty, 2.0), empty).share_touched == 0
    assert reject(empty, empty, bounds, 0.5, 2).weights.shape == (0,)


def test_refuses() -> None:
    ones, bounds = np.ones(2), np.array([0, 2])
    with pytest.raises(ValueError, match=r"at position 1 the trainer has 1\.0, the rollout -inf"):
        importance_ratios(ones, np.array([1, -np.inf]), ones, bounds, "token")
    with pytest.raises(ValueError, match="got 'word'"):
        importance_ratios(ones, ones, ones, bounds, "word")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_ratio must be above 0"):
        truncate(ones, ones, 0)
    for low, high in ((-0.1, 2), (2, 2), (3, 2)):
        with pytest.raises(ValueError, match="0 <= min_ratio < max_ratio"):
            mask_outside(ones, ones, low, high)
        with pytest.raises(ValueError, match="0 <= min_ratio < max_ratio"):
            reject(ones, ones, bounds, low, high)
