"""Losses of pairs: hand-computed numbers, properties, and loops written from the formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.preference import (
    accuracy,
    apo_down_loss,
    apo_zero_loss,
    bradley_terry_loss,
    hinge_loss,
    ipo_loss,
    log_odds,
    robust_loss,
)

LEADS = st.lists(st.floats(-30, 30), min_size=1, max_size=8)


def test_bradley_terry_by_hand() -> None:
    # sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4
    lead = torch.tensor([0.0, math.log(3), -math.log(3)], dtype=torch.float64)
    expected = torch.tensor([math.log(2), math.log(4 / 3), math.log(4)], dtype=torch.float64)
    torch.testing.assert_close(bradley_terry_loss(lead), expected)


def test_smoothing_by_hand() -> None:
    # 0.9 log(4/3) + 0.1 log 4
    lead = torch.tensor([math.log(3)], dtype=torch.float64)
    assert bradley_terry_loss(lead, 0.1).item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))


def test_ipo_by_hand() -> None:
    # h = 3 and beta = 0.25: (3 - 1 / (2 x 0.25))^2 = 1
    assert ipo_loss(torch.tensor([0.25 * 3.0]), beta=0.25).tolist() == [1.0]


def test_robust_and_hinge_by_hand() -> None:
    # sigmoid(log 3) = 3/4: (0.9 log(4/3) - 0.1 log 4) / 0.8
    lead = torch.tensor([math.log(3)], dtype=torch.float64)
    expected = (0.9 * math.log(4 / 3) - 0.1 * math.log(4)) / 0.8
    assert robust_loss(lead, 0.1).item() == pytest.approx(expected)
    assert hinge_loss(torch.tensor([-1.0, 0.25, 1.0, 3.0])).tolist() == [2.0, 0.75, 0.0, 0.0]


@given(LEADS, st.floats(0, 0.49))
def test_labels_of_which_a_share_is_wrong_have_robust_losses_of_the_mean_of_right_ones(
    leads: list[float], flipped: float
) -> None:
    lead = torch.tensor(leads, dtype=torch.float64)
    mean = (1 - flipped) * robust_loss(lead, flipped) + flipped * robust_loss(-lead, flipped)
    torch.testing.assert_close(mean, bradley_terry_loss(lead), rtol=1e-6, atol=1e-9)


def test_anchored_by_hand() -> None:
    # sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4, sigmoid(log 9) = 9/10
    up, down = torch.tensor([math.log(3)]), torch.tensor([-math.log(3)])
    assert apo_zero_loss(up, down).item() == pytest.approx(1 - 3 / 4 + 1 / 4)
    assert apo_zero_loss(down, up).item() == pytest.approx(1 - 1 / 4 + 3 / 4)
    assert apo_down_loss(up, up - down).item() == pytest.approx(3 / 4 + 1 - 9 / 10)


@given(LEADS, st.floats(0, 0.49))
def test_bradley_terry_is_the_slow_loop(leads: list[float], smoothing: float) -> None:
    found = bradley_terry_loss(torch.tensor(leads, dtype=torch.float64), smoothing)
    for value, lead in zip(found.tolist(), leads, strict=True):
        right, wrong = 1 / (1 + math.exp(-lead)), 1 / (1 + math.exp(lead))
        expected = -(1 - smoothing) * math.log(right) - smoothing * math.log(wrong)
        assert value == pytest.approx(expected, abs=1e-9)


@given(LEADS, st.floats(0.01, 5))
def test_ipo_is_the_slow_loop(leads: list[float], beta: float) -> None:
    found = ipo_loss(torch.tensor([beta * h for h in leads], dtype=torch.float64), beta)
    assert found.tolist() == pytest.approx([(h - 1 / (2 * beta)) ** 2 for h in leads], rel=1e-6, abs=1e-9)


@given(LEADS)
def test_a_pair_the_other_way_round_has_the_opposite_gradient_at_equal_scores(leads: list[float]) -> None:
    lead = torch.tensor(leads, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(bradley_terry_loss(lead).sum(), lead)
    # d/dx -log sigmoid(x) = sigmoid(x) - 1: never positive, so that training always widens the lead.
    torch.testing.assert_close(grad, torch.sigmoid(lead.detach()) - 1)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_leads_stay_finite(size: float) -> None:
    lead = torch.tensor([-size, size], requires_grad=True)
    loss = bradley_terry_loss(lead, 0.1)
    (grad,) = torch.autograd.grad(loss.sum(), lead)
    assert torch.isfinite(loss).all() and torch.isfinite(grad).all()


def test_odds_by_hand() -> None:
    # p = 3/4 has odds of 3, p = 1/2 of 1
    found = log_odds(torch.tensor([math.log(0.75), math.log(0.5)], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([math.log(3), 0.0], dtype=torch.float64))


def test_odds_of_what_is_certain_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -1e-9, -1e-5, -1e4], requires_grad=True)
    odds = log_odds(logprobs)
    (grad,) = torch.autograd.grad(odds.sum(), logprobs)
    assert odds.tolist() == pytest.approx([math.log(1e6), math.log(1e6), math.log(1e5), -1e4], rel=1e-4)
    # d/dx x - log(1 - e^x) = 1 / (1 - e^x)
    assert grad.tolist() == pytest.approx([0.0, 0.0, 1e5, 1.0], rel=1e-4)


def test_a_tie_counts_half() -> None:
    assert accuracy(torch.tensor([2.0, 0.0, -1e-9])).tolist() == [1.0, 0.5, 0.0]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"below 0\.5; got 0\.5"):
        bradley_terry_loss(torch.zeros(1), 0.5)
    with pytest.raises(ValueError, match=r"below 0\.5; got -0\.1"):
        robust_loss(torch.zeros(1), -0.1)
    with pytest.raises(ValueError, match="above 0; got 0"):
        ipo_loss(torch.zeros(1), 0.0)
