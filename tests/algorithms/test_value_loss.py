"""The critic's clipped loss: hand-computed, against the formula, its gradient, extremes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.algorithms.value_loss import clipped_value_loss

numbers = st.floats(-5, 5)
tokens = st.lists(st.tuples(numbers, numbers, numbers), max_size=20)


def by_loop(value: float, old: float, target: float, clip: float) -> float:
    near = old + min(max(value - old, -clip), clip)
    return max((value - target) ** 2, (near - target) ** 2) / 2


def columns(rows: list[tuple[float, float, float]]) -> tuple[torch.Tensor, ...]:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)


def test_hand_computed() -> None:
    values, old = torch.tensor([1.0, 1.0, -1.0, 0.1]), torch.zeros(4)
    returns = torch.tensor([2.0, 0.0, 1.0, 0.0])
    # Towards the return and beyond the range: the clip decides. Away from it: the plain loss is larger.
    loss, clipped = clipped_value_loss(values, old, returns, clip_range=0.2)
    assert loss.tolist() == pytest.approx([1.8**2 / 2, 0.5, 2.0, 0.005])
    assert clipped.tolist() == [True, False, False, False]
    plain, nowhere = clipped_value_loss(values, old, returns)
    assert plain.tolist() == pytest.approx([0.5, 0.5, 2.0, 0.005]) and not nowhere.any()


@given(tokens, st.floats(0.05, 2))
def test_equals_the_loop(rows: list[tuple[float, float, float]], clip: float) -> None:
    loss = clipped_value_loss(*columns(rows), clip).loss
    assert loss.tolist() == pytest.approx([by_loop(*row, clip) for row in rows])


@given(tokens)
@example([(0.02, 0.125, 0.0)])  # 0.125 + (0.02 - 0.125) is more than 0.02
def test_gradient_is_the_error_and_none_where_clipped(rows: list[tuple[float, float, float]]) -> None:
    values, old, returns = columns(rows)
    values.requires_grad_()
    result = clipped_value_loss(values, old, returns, 0.2)
    result.loss.sum().backward()
    torch.testing.assert_close(values.grad, (values - returns).detach().masked_fill(result.clipped, 0.0))


def test_only_values_receive_a_gradient() -> None:
    values, old, returns = (torch.randn(4, requires_grad=True) for _ in range(3))
    clipped_value_loss(values, old, returns, 0.2).loss.sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None


@pytest.mark.parametrize("value", [1e15, -1e15])
def test_extremes_stay_finite(value: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(1), torch.zeros(1), 0.2).loss
    loss.sum().backward()
    assert values.grad is not None and torch.isfinite(loss).all() and torch.isfinite(values.grad).all()


def test_a_range_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_range must be above 0"):
        clipped_value_loss(*torch.zeros(3, 1), clip_range=0)
