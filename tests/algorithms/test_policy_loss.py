"""The clipped policy loss: hand-computed, against a loop over the formula, its gradient, and extreme ratios."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.policy_loss import clipped_policy_loss

tokens = st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3)), min_size=1, max_size=20)


def by_loop(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    """PPO's formula for one token."""
    ratio = math.exp(logprob - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def columns(rows: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs, old, advantages = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return logprobs, old, advantages


def test_hand_computed() -> None:
    old = torch.zeros(6)
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 1.25])
    advantages = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    result = clipped_policy_loss(ratio.log(), old, advantages, clip_low=0.2, clip_high=0.28)
    assert result.loss.tolist() == pytest.approx([-2.0, -1.28, 1.5, -0.5, 0.8, -1.25])
    assert result.clipped.tolist() == [False, True, False, False, True, False]
    assert result.ratio.tolist() == pytest.approx(ratio.tolist())


@given(tokens, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_equals_the_loop(rows: list[tuple[float, float, float]], low: float, high: float) -> None:
    result = clipped_policy_loss(*columns(rows), low, high)
    assert result.loss.tolist() == pytest.approx([by_loop(*row, low, high) for row in rows])


@given(tokens)
def test_gradient_is_minus_ratio_times_advantage_and_none_where_clipped(rows: list[tuple[float, float, float]]) -> None:
    logprobs, old, advantages = columns(rows)
    result = clipped_policy_loss(logprobs.requires_grad_(), old, advantages, 0.2, 0.28)
    result.loss.sum().backward()
    expected = (-result.ratio * advantages).masked_fill(result.clipped, 0.0)
    torch.testing.assert_close(logprobs.grad, expected)


def test_only_logprobs_receives_a_gradient() -> None:
    logprobs, old, advantages = (torch.randn(4, requires_grad=True) for _ in range(3))
    result = clipped_policy_loss(logprobs, old, advantages, 0.2, 0.2)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None and advantages.grad is None and not result.ratio.requires_grad


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 300.0, -300.0, float("inf"), float("-inf")])
@pytest.mark.parametrize("advantage", [5.0, -5.0, 0.0])
def test_extreme_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    result = clipped_policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    for values in (result.loss, result.ratio, logprobs.grad):
        assert torch.isfinite(values).all()


def test_no_tokens() -> None:
    empty = torch.zeros(0)
    assert clipped_policy_loss(empty, empty, empty, 0.2, 0.2).loss.shape == (0,)
