"""Reward shaping: DAPO's slope, at its corners and against its three cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.shaping import overlong_penalty


def test_hand_computed() -> None:
    penalty = overlong_penalty([0, 60, 80, 85, 100, 120], max_tokens=100, buffer_tokens=20)
    assert penalty.tolist() == [0, 0, 0, -0.25, -1, -1]
    assert overlong_penalty([90], 100, 20, factor=3.0).tolist() == [-1.5]
    assert overlong_penalty([], 100, 20).shape == (0,)


@given(st.lists(st.integers(0, 300), max_size=10), st.integers(1, 100), st.integers(0, 100))
def test_equals_the_cases_of_the_paper(lengths: list[int], buffer: int, more: int) -> None:
    longest, expected = buffer + more, []
    for length in lengths:
        if length <= longest - buffer:
            expected.append(0.0)
        elif length <= longest:
            expected.append(((longest - buffer) - length) / buffer)
        else:
            expected.append(-1.0)
    assert overlong_penalty(lengths, longest, buffer) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_refuses(buffer: int) -> None:
    with pytest.raises(ValueError, match="0 < buffer_tokens <= max_tokens"):
        overlong_penalty([1], 100, buffer)
