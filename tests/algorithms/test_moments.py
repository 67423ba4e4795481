"""Moments of parts make those of the whole; whitening and explained variance of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.moments import Moments, merge, moments
from megarl.algorithms.returns import explained_variance, whiten

parts_of_numbers = st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=8), max_size=5)
seeds = st.integers(0, 2**32 - 1)


def test_hand_computed() -> None:
    one, other = moments(np.array([1, 2, 3], np.float32)), moments(np.array([10], np.float32))
    assert one == Moments(3, 2.0, 2.0, 1.0, 3.0) and other == Moments(1, 10.0, 0.0, 10.0, 10.0)
    assert merge([one, other]) == Moments(4, 4.0, 50.0, 1.0, 10.0)
    assert merge([one, other]).variance == 12.5
    assert not one.are_equal and other.are_equal


def test_numbers_count_as_often_as_they_stand_there() -> None:
    values = np.array([1, 2, 9, 4], np.float32)
    assert moments(values, np.array([1, 3, 0, 2])) == Moments(6, 2.5, 7.5, 1.0, 4.0)
    assert moments(values, np.zeros(4, np.int64)) == Moments()
    found = moments(np.full(3, 0.1, np.float32), np.array([7, 3, 5]))
    assert found.are_equal and found.num == 15


def test_without_numbers() -> None:
    nothing = moments(np.zeros(0, np.float32))
    assert nothing == merge([]) == merge([nothing, nothing]) == Moments()
    assert nothing.variance == 0 and nothing.are_equal
    assert explained_variance(nothing, nothing) == 0


@given(parts_of_numbers)
def test_parts_make_the_whole(parts: list[list[float]]) -> None:
    arrays = [np.array(part, np.float32) for part in parts]
    whole = moments(np.concatenate([np.zeros(0, np.float32), *arrays]))
    together = merge(moments(array) for array in arrays)
    assert together == pytest.approx(whole, rel=1e-9, abs=1e-6)
    assert (together.num, together.least, together.greatest) == (whole.num, whole.least, whole.greatest)
    assert together.are_equal == (len({value for part in parts for value in part}) <= 1)


@given(seeds, st.integers(1, 300), st.floats(0, 1))
def test_of_one_part_they_are_numpys_to_the_bit(seed: int, num: int, share: float) -> None:
    random = np.random.default_rng(seed)
    values, mask = random.normal(3, 2, num).astype(np.float32), (random.random(num) < share).astype(np.float32)
    inside = values[mask > 0].astype(np.float64)
    found = moments(values[mask > 0])
    assert merge([Moments(), found, Moments()]) == found
    white = np.zeros(num, np.float32)
    if len(inside):
        assert (found.mean, found.variance) == (inside.mean(), inside.var())
        white[mask > 0] = 0 if np.ptp(inside) == 0 else (inside - inside.mean()) / (inside.std() + 1e-8)
    assert np.array_equal(whiten(values, mask), white)
    assert np.array_equal(whiten(values, mask, over=found), white)


@given(seeds, st.integers(1, 5), st.integers(0, 60))
def test_parts_whiten_as_the_whole_does(seed: int, num_parts: int, num: int) -> None:
    random = np.random.default_rng(seed)
    values, mask = random.normal(3, 2, num).astype(np.float32), (random.random(num) < 0.8).astype(np.float32)
    part_of = random.integers(num_parts, size=num)
    here = [part_of == part for part in range(num_parts)]
    over = merge(moments(values[part & (mask > 0)]) for part in here)
    white = whiten(values, mask)
    for part in here:
        assert whiten(values[part], mask[part], over=over) == pytest.approx(white[part], rel=1e-6, abs=1e-6)


def test_numbers_that_are_equal_in_all_parts_whiten_to_exactly_0() -> None:
    third = np.full(7, 1 / 3, np.float32)
    over = merge([moments(third), moments(third[:3])])
    assert not whiten(third, np.ones(7), over=over).any()
    # Equal here, but not over the step: that is a signal.
    assert whiten(third, np.ones(7), over=merge([over, moments(np.ones(2))])).all()


@given(seeds, st.integers(2, 60))
def test_explained_variance_of_parts(seed: int, num: int) -> None:
    random = np.random.default_rng(seed)
    returns = random.normal(size=num).astype(np.float32)
    values = (returns + random.normal(0, 0.5, num)).astype(np.float32)
    target = returns.astype(np.float64)
    expected = float(1 - (target - values).var() / target.var())
    assert explained_variance(moments(target - values), moments(target)) == expected
    cut = num // 3
    residuals = merge([moments((target - values)[:cut]), moments((target - values)[cut:])])
    assert explained_variance(residuals, merge([moments(target[:cut]), moments(target[cut:])])) == pytest.approx(
        expected, rel=1e-6, abs=1e-9
    )
