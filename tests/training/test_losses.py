import math

import numpy as np
import pytest
import torch

from megarl.core.layout import Layout
from megarl.core.types import MicroBatch
from megarl.recipe.schema import Algorithm
from megarl.training.batch import to_device
from megarl.training.logprob import TokenScores
from megarl.training.losses import policy_loss, sft_loss

OLD = [-1.0, -2.0, -0.5, 0.0]
MASK = [1.0, 1.0, 1.0, 0.0]


def batch(**columns):
    micro = MicroBatch(
        tokens=np.array([5, 6, 7, 8]),
        labels=np.array([6, 7, 8, 0]),
        cu_seqlens=np.array([0, 4], np.int32),
        loss_mask=np.array(MASK, np.float32),
        weights=np.array([0.5, 0.25, 0.25, 0.0], np.float32),
        rollout_logprobs=np.array([-1.1, -2.0, -0.5, 0.0], np.float32),
        sample_index=np.array([0]),
    )
    return to_device(
        micro, {name: np.array(column, np.float32) for name, column in columns.items()}, "cpu", Layout(), 0
    )


def scores(logprobs, entropy=(0.3, 0.6, 0.9, 7.0)):
    return TokenScores(torch.tensor(logprobs, requires_grad=True), torch.tensor(entropy, requires_grad=True))


def test_clipped_policy_loss_by_hand():
    # Ratios 1.5 (clipped to 1.2 by A > 0), 0.5 (clipped to 0.8 by A < 0), 1.1 (inside).
    logprobs = [old + math.log(ratio) for old, ratio in zip(OLD, [1.5, 0.5, 1.1, 1.0], strict=True)]
    loss = policy_loss(Algorithm())
    given = scores(logprobs)
    output = loss.fn(given, batch(old_logprobs=OLD, advantages=[1.0, -1.0, 2.0, 0.0]))
    expected = 0.5 * -1.2 + 0.25 * 0.8 + 0.25 * -2.2
    assert output.loss.item() == pytest.approx(expected, abs=1e-6)
    output.loss.backward()
    # d(-w A ratio)/d logprob = -w A ratio where it is not clipped.
    assert given.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -0.25 * 2.0 * 1.1, 0.0], abs=1e-6)
    assert given.entropy.grad is None
    assert output.num_tokens == 3
    assert output.sums["actor/pg_clipfrac"] == 2
    assert output.sums["actor/entropy"] == pytest.approx(1.8)
    approx_kl = sum(ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 1.1))
    assert output.sums["actor/approx_kl"].item() == pytest.approx(approx_kl, abs=1e-6)
    assert output.sums["rollout/logprob_diff_mean"].item() == pytest.approx(0.1, abs=1e-6)
    assert output.maxima["rollout/logprob_diff_max"].item() == pytest.approx(0.1, abs=1e-6)


def test_kl_and_entropy_enter_the_loss_with_their_coefficients():
    loss = policy_loss(Algorithm(kl_coef=0.1, kl_kind="k2", entropy_coef=0.01))
    assert loss.columns == {"old_logprobs", "advantages", "ref_logprobs"}
    assert loss.entropy_grad
    given = scores(OLD)
    output = loss.fn(given, batch(old_logprobs=OLD, advantages=[0.0] * 4, ref_logprobs=[-1.0, -2.4, -0.5, 9.0]))
    kl = 0.25 * 0.4**2 / 2
    entropy = 0.5 * 0.3 + 0.25 * 0.6 + 0.25 * 0.9
    assert output.weighted["actor/kl_loss"].item() == pytest.approx(kl, abs=1e-6)
    assert output.loss.item() == pytest.approx(0.1 * kl - 0.01 * entropy, abs=1e-6)
    output.loss.backward()
    assert given.entropy.grad.tolist() == pytest.approx([-0.005, -0.0025, -0.0025, 0.0])


def test_without_kl_no_reference_is_read():
    assert policy_loss(Algorithm()).columns == {"old_logprobs", "advantages"}


def test_sft_loss_is_the_weighted_cross_entropy():
    loss = sft_loss()
    assert not loss.with_entropy
    given = TokenScores(torch.tensor([-1.0, -2.0, -4.0, -99.0], requires_grad=True), None)
    output = loss.fn(given, batch())
    assert output.loss.item() == pytest.approx(0.5 * 1 + 0.25 * 2 + 0.25 * 4)
    output.loss.backward()
    assert given.logprobs.grad.tolist() == [-0.5, -0.25, -0.25, 0.0]


def test_what_lies_outside_the_mask_reaches_neither_gradient_nor_metrics():
    infinite = [*OLD[:3], float("-inf")]
    given = scores(OLD, entropy=[0.3, 0.6, 0.9, float("nan")])
    loss = policy_loss(Algorithm(kl_coef=0.1, entropy_coef=0.1))
    output = loss.fn(given, batch(old_logprobs=infinite, advantages=[1.0] * 4, ref_logprobs=infinite))
    output.loss.backward()
    for values in (given.logprobs.grad, given.entropy.grad):
        assert torch.isfinite(values).all()
        assert values[3] == 0
    reported = [*output.weighted.values(), *output.sums.values(), *output.maxima.values()]
    assert all(torch.isfinite(value) for value in reported)


def test_positions_restart_at_every_sequence():
    micro = MicroBatch(
        tokens=np.arange(5),
        labels=np.arange(5),
        cu_seqlens=np.array([0, 2, 5], np.int32),
        loss_mask=np.ones(5, np.float32),
        weights=np.ones(5, np.float32),
        rollout_logprobs=np.zeros(5, np.float32),
        sample_index=np.array([0, 1]),
    )
    assert to_device(micro, {}, "cpu", Layout(), 0).positions.tolist() == [0, 1, 0, 1, 2]
