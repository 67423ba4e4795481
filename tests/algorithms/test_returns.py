"""Token-level advantages and returns: hand-computed, against loops over the formulas, and properties of masks and ends."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import ragged
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.moments import moments
from megarl.algorithms.returns import (
    discounted_returns,
    distill_advantages,
    explained_variance,
    gae,
    kl_penalty,
    reinforce_pp_advantages,
    token_rewards,
    whiten,
)
from tests.algorithms.ragged_cases import Ragged, batches, make

fractions = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def gae_by_loop(batch: Ragged, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the paper, term by term, for every token by itself."""
    rewards, values = batch.columns
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    for sequence in batch.sequences:
        deltas = []
        for number, here in enumerate(sequence):
            following = float(values[sequence[number + 1]]) if number + 1 < len(sequence) else 0.0
            deltas.append(float(rewards[here]) + gamma * following - float(values[here]))
        for number, t in enumerate(sequence):
            advantages[t] = math.fsum((gamma * lam) ** later * d for later, d in enumerate(deltas[number:]))
            returns[t] = advantages[t] + float(values[t])
    return advantages, returns


def test_gae_hand_computed() -> None:
    # One sequence of 3 with the reward at its end, after a prompt of 2; then one of 1. gamma = 1/2, lam = 1/2.
    mask = np.array([0, 0, 1, 1, 1, 1])
    rewards = np.array([9, 9, 0, 0, 1, 3], np.float32)
    values = np.array([9, 9, 2, 4, 2, 1], np.float32)
    # delta: 0 + 4/2 - 2 = 0; 0 + 2/2 - 4 = -3; 1 + 0 - 2 = -1; and 3 - 1 = 2.
    advantages, returns = gae(rewards, values, mask, np.array([0, 5, 6]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [0, 0, -3 / 4 - 1 / 16, -3 - 1 / 4, -1, 2]
    assert returns.tolist() == [0, 0, 2 - 13 / 16, 4 - 3.25, 1, 3]


@given(batches, fractions, fractions)
def test_gae_equals_the_loop(batch: Ragged, gamma: float, lam: float) -> None:
    advantages, returns = gae(*batch.columns, batch.mask, batch.cu_seqlens, gamma=gamma, lam=lam)
    expected = gae_by_loop(batch, gamma, lam)
    assert advantages.dtype == returns.dtype == np.float32
    assert advantages == pytest.approx(expected[0], rel=1e-4, abs=1e-4)
    assert returns == pytest.approx(expected[1], rel=1e-4, abs=1e-4)


def test_gae_in_pieces_is_gae_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make([700, 0, 3, 1200, 64, 1], 0.8, seed=3)
    whole = gae(*batch.columns, batch.mask, batch.cu_seqlens, gamma=0.99, lam=0.95)
    monkeypatch.setattr(ragged, "PIECE", 100)
    parts = gae(*batch.columns, batch.mask, batch.cu_seqlens, gamma=0.99, lam=0.95)
    np.testing.assert_allclose(parts.advantages, whole.advantages, rtol=1e-5, atol=1e-5)


@given(batches)
def test_gae_at_its_limits(batch: Ragged) -> None:
    rewards, values = (np.where(batch.mask, column, 0) for column in batch.columns)
    # lam = 1: returns do not depend on the critic. lam = 0: one step ahead. gamma = 0: the next reward alone.
    monte_carlo = gae(*batch.columns, batch.mask, batch.cu_seqlens, gamma=0.9, lam=1.0).returns
    expected = discounted_returns(batch.columns[0], batch.mask, batch.cu_seqlens, gamma=0.9)
    np.testing.assert_allclose(monte_carlo, expected, atol=1e-4)
    at_once = gae(*batch.columns, batch.mask, batch.cu_seqlens, gamma=0.0, lam=0.5).advantages
    np.testing.assert_allclose(at_once, rewards - values, atol=1e-5)


@given(batches, st.integers(0, 99))
def test_order_of_sequences_does_not_matter(batch: Ragged, seed: int) -> None:
    advantages = gae(*batch.columns, batch.mask, batch.cu_seqlens, gamma=0.9, lam=0.8).advantages
    order = np.random.default_rng(seed).permutation(len(batch.cu_seqlens) - 1)
    places = [np.arange(batch.cu_seqlens[number], batch.cu_seqlens[number + 1]) for number in order]
    index = np.concatenate([*places, np.zeros(0, int)]).astype(int)
    bounds = np.cumsum([0, *map(len, places)])
    columns = (column[index] for column in batch.columns)
    shuffled = gae(*columns, batch.mask[index], bounds, gamma=0.9, lam=0.8).advantages
    np.testing.assert_allclose(shuffled, advantages[index], rtol=1e-4, atol=1e-4)


@given(batches, fractions)
def test_discounted_returns_equal_the_loop(batch: Ragged, gamma: float) -> None:
    rewards, expected = batch.columns[0], np.zeros(len(batch.mask))
    for sequence in batch.sequences:
        for number, t in enumerate(sequence):
            expected[t] = math.fsum(gamma**later * float(rewards[u]) for later, u in enumerate(sequence[number:]))
    returns = discounted_returns(rewards, batch.mask, batch.cu_seqlens, gamma=gamma)
    assert returns == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_returns_hand_computed() -> None:
    rewards = np.array([0, 0, 8, 1], np.float32)
    assert discounted_returns(rewards, np.ones(4), np.array([0, 3, 4]), gamma=0.5).tolist() == [2, 4, 8, 1]


def test_no_tokens() -> None:
    empty = np.zeros(0, np.float32)
    assert gae(empty, empty, empty, np.array([0, 0])).advantages.shape == (0,)
    assert whiten(empty, empty).shape == discounted_returns(empty, empty, np.array([0])).shape == (0,)
    nothing = np.zeros(3, np.float32)
    assert gae(nothing, nothing, nothing, np.array([0, 3])).returns.tolist() == [0, 0, 0]
    assert token_rewards(np.array([5.0]), nothing, np.array([0, 3])).tolist() == [0, 0, 0]


def test_infinities_inside_of_the_mask_are_refused() -> None:
    rewards, values = np.zeros(4, np.float32), np.array([0, 1, np.nan, np.inf], np.float32)
    with pytest.raises(ValueError, match="values must be finite where the mask is set; position 2 is nan"):
        gae(rewards, values, np.ones(4), np.array([0, 4]))
    with pytest.raises(ValueError, match="token_rewards must be finite where the mask is set; position 3 is inf"):
        discounted_returns(values, np.array([1, 1, 0, 1]), np.array([0, 4]))
    assert np.isfinite(gae(rewards, values, np.array([1, 1, 0, 0]), np.array([0, 4])).advantages).all()


@pytest.mark.parametrize("setting", [{"gamma": 1.1}, {"lam": -0.1}])
def test_settings_outside_of_their_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        gae(np.zeros(1), np.zeros(1), np.ones(1), np.array([0, 1]), **setting)


def test_whiten_hand_computed() -> None:
    values, mask = np.array([1, 100, 3, 5], np.float32), np.array([1, 0, 1, 1])
    std = math.sqrt(8 / 3)
    assert whiten(values, mask, eps=0) == pytest.approx([-2 / std, 0, 0, 2 / std])
    assert whiten(values, mask, eps=0, shift=False) == pytest.approx([3 - 2 / std, 0, 3, 3 + 2 / std])


@given(batches)
def test_whitened_values_have_mean_0_and_std_1(batch: Ragged) -> None:
    inside = whiten(batch.columns[0], batch.mask)[batch.mask > 0].astype(float)
    assert not whiten(batch.columns[0], batch.mask)[batch.mask == 0].any()
    if len(inside) > 1:
        assert inside.mean() == pytest.approx(0, abs=1e-5)
        assert inside.std() == pytest.approx(1, abs=1e-4)


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 50))
def test_equal_values_whiten_to_exactly_zero(value: float, size: int) -> None:
    assert not whiten(np.full(size, value, np.float32), np.ones(size)).any()


def test_token_rewards_hand_computed() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 0])
    kl = np.array([9, 1, 2, 9, 9, 4, 9], np.float32)
    rewards = np.array([1.0, 7.0, 2.0])  # the second sequence has no trained token
    result = token_rewards(rewards, mask, np.array([0, 4, 5, 7]), kl=kl, kl_coef=0.5)
    assert result.tolist() == [0, -0.5, 0, 0, 0, 0, 0]
    assert token_rewards(rewards, mask, np.array([0, 4, 5, 7])).tolist() == [0, 0, 1, 0, 0, 2, 0]


@given(batches, st.floats(0, 2))
def test_token_rewards_of_a_sequence_add_up(batch: Ragged, kl_coef: float) -> None:
    rewards = np.arange(len(batch.sequences), dtype=np.float32)
    result = token_rewards(rewards, batch.mask, batch.cu_seqlens, kl=batch.columns[0], kl_coef=kl_coef)
    for reward, sequence in zip(rewards, batch.sequences, strict=True):
        penalty = kl_coef * math.fsum(batch.columns[0][sequence])
        assert math.fsum(result[sequence]) == pytest.approx(reward - penalty if sequence else 0, abs=1e-3)


def test_token_rewards_refuse() -> None:
    with pytest.raises(ValueError, match="there is no kl to weigh"):
        token_rewards(np.ones(1), np.ones(2), np.array([0, 2]), kl_coef=0.1)
    with pytest.raises(ValueError, match="one reward a sequence is needed: 1; got 2"):
        token_rewards(np.ones(2), np.ones(2), np.array([0, 2]))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_penalty_is_the_estimator_on_arrays(kind: Literal["k1", "k2", "k3", "abs"]) -> None:
    logprobs, reference = np.random.default_rng(0).uniform(-9, 0, (2, 64)).astype(np.float32)
    expected = kl_estimate(torch.tensor(logprobs), torch.tensor(reference), kind)
    assert kl_penalty(logprobs, reference, kind) == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-6)
    extreme = kl_penalty(np.array([0, -1e30], np.float32), np.array([-np.inf, 0], np.float32), kind)
    assert np.isfinite(extreme).all()


def test_kl_penalty_hand_computed() -> None:
    twice = np.array([math.log(0.5)]), np.array([math.log(0.25)])
    assert kl_penalty(*twice, "k1") == pytest.approx([math.log(2)])
    assert kl_penalty(*twice, "abs") == pytest.approx([math.log(2)])
    assert kl_penalty(*twice, "k3") == pytest.approx([math.log(2) - 0.5])
    with pytest.raises(ValueError, match="got 'k4'"):
        kl_penalty(*twice, "k4")  # type: ignore[arg-type]


def test_reinforce_pp_hand_computed() -> None:
    # Returns 1, 1, 3, outside of the mask 0: mean 5/3, variance 8/9.
    advantages = reinforce_pp_advantages(np.array([9, 0, 1, 3.0]), np.array([0, 1, 1, 1]), np.array([0, 3, 4]))
    std = math.sqrt(8 / 9)
    assert advantages == pytest.approx([0, -2 / 3 / std, -2 / 3 / std, 4 / 3 / std], rel=1e-5)


@given(batches)
def test_reinforce_pp_equals_the_loop(batch: Ragged) -> None:
    rewards = batch.columns[0]
    returns = {t: math.fsum(rewards[sequence[n:]]) for sequence in batch.sequences for n, t in enumerate(sequence)}
    mean = math.fsum(returns.values()) / max(1, len(returns))
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in returns.values()) / max(1, len(returns)))
    expected = [(returns[t] - mean) / (std + 1e-8) if t in returns else 0.0 for t in range(len(rewards))]
    if len(returns) > 1:
        advantages = reinforce_pp_advantages(rewards, batch.mask, batch.cu_seqlens)
        assert advantages == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_distill_hand_computed() -> None:
    logprobs, teacher = np.log([0.5, 0.5, 0.1]), np.array([math.log(0.25), math.log(1.0), -np.inf])
    advantages = distill_advantages(logprobs, teacher, np.array([1, 1, 1]))
    assert advantages == pytest.approx([-math.log(2), math.log(2), -20])
    assert distill_advantages(logprobs, teacher, np.array([1, 0, 0])).tolist()[1:] == [0, 0]
    with pytest.raises(ValueError, match=r"all must be \[T\]"):
        distill_advantages(logprobs, teacher[:2], np.ones(3))


def test_minus_the_expected_distillation_advantage_is_the_reverse_kl() -> None:
    student, teacher = torch.randn(2, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(
        -1
    )
    advantages = distill_advantages(student.numpy(), teacher.numpy(), np.ones(30))
    exact = torch.nn.functional.kl_div(teacher, student, reduction="sum", log_target=True)
    assert -(student.exp().numpy() * advantages).sum() == pytest.approx(exact.item(), rel=1e-5)


def test_explained_variance() -> None:
    returns = np.array([1.0, 2.0, 3.0])

    def explained(values: np.ndarray, returns: np.ndarray = returns) -> float:
        return explained_variance(moments(returns - values), moments(returns))

    assert explained(returns) == 1
    assert explained(returns + 5) == 1  # a constant error is no variance
    assert explained(np.zeros(3)) == 0
    assert explained(-returns) == pytest.approx(-3)
    assert explained(returns, np.ones(3)) == 0
    assert explained(np.zeros(0), np.zeros(0)) == 0
