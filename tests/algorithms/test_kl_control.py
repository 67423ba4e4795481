"""Controllers of the KL's weight: hand-computed, their direction, their bounds, and that they reach the target."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.kl_control import AdaptiveKl, FixedKl

positive = st.floats(1e-6, 1e6)


def test_hand_computed() -> None:
    controller = AdaptiveKl(coef=0.2, target=6.0, horizon=1000)
    # 10% over the target for 500 samples: 1 + 0.1 * 0.5. Far over: the error counts as 20%.
    assert controller.updated(6.6, 500).coef == pytest.approx(0.2 * 1.05)
    assert controller.updated(60, 500).coef == pytest.approx(0.2 * 1.1)
    assert controller.updated(0, 500).coef == pytest.approx(0.2 * 0.9)
    assert controller.updated(6, 500) == controller
    assert controller.coef == 0.2  # the record of before stays


@given(positive, positive, positive, st.floats(0, 1e9), st.integers(0, 10**6))
def test_moves_towards_the_target_and_stays_positive(
    coef: float, target: float, horizon: float, kl: float, num_samples: int
) -> None:
    after = AdaptiveKl(coef, target, horizon).updated(kl, num_samples)
    assert after.coef > 0
    assert after.coef >= coef if kl >= target else after.coef <= coef
    assert after.target == target and after.horizon == horizon


def test_steers_a_kl_that_falls_with_its_weight_to_the_target() -> None:
    controller = AdaptiveKl(coef=0.001, target=2.0, horizon=1000)
    for _ in range(300):
        controller = controller.updated(kl=1 / controller.coef, num_samples=128)
    assert 1 / controller.coef == pytest.approx(2.0, rel=0.01)


def test_a_fixed_weight_stays() -> None:
    assert FixedKl(0.1).updated(99.0, 10**6) == FixedKl(0.1)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_refuses(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        AdaptiveKl(*wrong)
