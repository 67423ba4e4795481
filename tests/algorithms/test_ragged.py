"""Ragged arithmetic: the scan against a loop, across blocks and pieces; sums, means and their way back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import ragged
from megarl.algorithms.ragged import check_ragged, pieces, reverse_scan, sequence_sums, spread, trained
from tests.algorithms.ragged_cases import Ragged, batches


def scan_by_loop(terms: np.ndarray, decays: np.ndarray) -> list[float]:
    result, following = [0.0] * len(terms), 0.0
    for t in reversed(range(len(terms))):
        following = result[t] = float(terms[t]) + float(decays[t]) * following
    return result


@given(st.integers(0, 1500), st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_scan_equals_the_loop(num: int, seed: int, decay: float) -> None:
    random = np.random.default_rng(seed)
    terms = random.normal(size=num)
    decays = np.where(random.random(num) < 0.01, 0.0, decay)
    before = terms.copy(), decays.copy()
    assert reverse_scan(terms, decays) == pytest.approx(scan_by_loop(terms, decays), rel=1e-9, abs=1e-9)
    assert np.array_equal(terms, before[0]) and np.array_equal(decays, before[1])


@pytest.mark.parametrize("num", [1, 31, 32, 33, 64, 1023, 1024, 1025, 32**3 + 1])
def test_scan_at_the_edges_of_blocks_counts_exactly(num: int) -> None:
    ones = np.ones(num, np.float32)
    result = reverse_scan(ones, ones)
    assert result.dtype == np.float32
    assert result.tolist() == list(range(num, 0, -1))


@given(batches)
def test_trained_is_where_the_mask_is_set(batch: Ragged) -> None:
    at = trained(batch.mask, batch.cu_seqlens)
    positions = np.arange(len(batch.mask))[at.where]
    bounds = zip(at.bounds[:-1], at.bounds[1:], strict=True)
    assert [positions[a:b].tolist() for a, b in bounds] == batch.sequences
    assert positions[at.last].tolist() == [sequence[-1] for sequence in batch.sequences if sequence]
    assert at.counts.tolist() == [len(sequence) for sequence in batch.sequences]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60))
def test_pieces_are_whole_sequences_one_after_another(lengths: list[int], size: int) -> None:
    bounds = np.cumsum([0, *lengths])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "PIECE", size)
        found = list(pieces(bounds))
    joined = [0]
    for piece, inner in found:
        assert piece.start == joined[-1] and inner[0] == 0 and inner[-1] == piece.stop - piece.start
        assert inner[-1] <= size or len(inner) == 2
        joined += (inner[1:] + piece.start).tolist()
    assert joined == bounds.tolist()


@given(batches)
def test_sums_and_spread_equal_the_loop(batch: Ragged) -> None:
    values = batch.columns[0]
    sums = [sum(float(values[t]) for t in sequence) for sequence in batch.sequences]
    assert sequence_sums(values, batch.mask, batch.cu_seqlens) == pytest.approx(sums, abs=1e-5)
    column = spread(np.arange(1.0, len(sums) + 1), batch.mask, batch.cu_seqlens)
    expected = np.zeros(len(values))
    for number, sequence in enumerate(batch.sequences):
        expected[sequence] = number + 1
    assert column.dtype == np.float32 and column.tolist() == expected.tolist()


@pytest.mark.parametrize("bounds", [[], [0], [1, 3], [0, 2], [0, 2, 1, 3]])
def test_bounds_that_do_not_fit_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="must rise from 0 to 3"):
        check_ragged(np.ones(3), np.array(bounds, int))


def test_other_misfits_are_refused() -> None:
    mask, bounds = np.ones(3), np.array([0, 1, 3])
    with pytest.raises(ValueError, match=r"values must be \[T\] as mask is, \(3,\); got \(2,\)"):
        sequence_sums(np.ones(2), mask, bounds)
    with pytest.raises(ValueError, match="one number a sequence is needed: 2; got 3"):
        spread(np.ones(3), mask, bounds)


@given(batches)
def test_a_sequences_sum_is_the_same_to_the_bit_wherever_it_lies(batch: Ragged) -> None:
    whole = sequence_sums(batch.columns[0], batch.mask, batch.cu_seqlens)
    bounds = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    alone = [
        sequence_sums(batch.columns[0][start:stop], batch.mask[start:stop], np.array([0, stop - start]))[0]
        for start, stop in bounds
    ]
    assert whole.tolist() == alone
