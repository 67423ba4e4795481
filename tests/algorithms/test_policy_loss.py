"""Policy losses: hand-computed, against loops over their formulas, their gradients, and extreme ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.policy_loss import (
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    distill_loss,
    distill_top_loss,
    gmpo_loss,
    gspo_loss,
    reinforce_loss,
)
from megarl.algorithms.sequences import sequence_log_ratio

Row = tuple[float, float, float]
tokens = st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3)), min_size=1, max_size=20)


def by_loop(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    """PPO's formula for one token."""
    ratio = math.exp(logprob - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def columns(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
def test_equals_the_loop(rows: list[Row], low: float, high: float) -> None:
    result = clipped_policy_loss(*columns(rows), low, high)
    assert result.loss.tolist() == pytest.approx([by_loop(*row, low, high) for row in rows])


@given(tokens)
def test_gradient_is_minus_ratio_times_advantage_and_none_where_clipped(rows: list[Row]) -> None:
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


def test_dual_clip_hand_computed() -> None:
    ratio = torch.tensor([5.0, 5.0, 2.0, 0.5])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    result = clipped_policy_loss(ratio.log(), torch.zeros(4), advantages, 0.2, 0.2, dual_clip=3.0)
    assert result.loss.tolist() == pytest.approx([3.0, -1.2, 2.0, 0.8])
    assert result.clipped.tolist() == [True, True, False, True]
    with pytest.raises(ValueError, match="must be above 1; got 1"):
        clipped_policy_loss(ratio, ratio, ratio, 0.2, 0.2, dual_clip=1)


@given(tokens, st.floats(1.1, 5))
def test_dual_clip_equals_the_loop(rows: list[Row], most: float) -> None:
    expected = []
    for logprob, old, advantage in rows:
        loss = by_loop(logprob, old, advantage, 0.2, 0.28)
        expected.append(min(loss, -most * advantage) if advantage < 0 else loss)
    result = clipped_policy_loss(*columns(rows), 0.2, 0.28, dual_clip=most)
    assert result.loss.tolist() == pytest.approx(expected)


def test_gspo_hand_computed() -> None:
    # Log ratios 0.2 and 0.6: their mean is 0.4, whatever each token's own is.
    logprobs, old = torch.tensor([-0.8, -0.4]), torch.tensor([-1.0, -1.0])
    mean = sequence_log_ratio(logprobs, old, torch.ones(2), torch.tensor([0, 2]))
    good = gspo_loss(logprobs, torch.ones(2), mean, 0.1, 1.0)
    assert good.loss.tolist() == pytest.approx([-math.exp(0.4)] * 2) and not good.clipped.any()
    bounded = gspo_loss(logprobs, torch.ones(2), mean, 0.1, 0.2)
    assert bounded.loss.tolist() == pytest.approx([-1.2] * 2) and bounded.clipped.all()


@given(tokens, st.floats(0.05, 2), st.integers(1, 20))
def test_gspo_is_the_gradient_of_the_sequence_form(rows: list[Row], clip: float, cut: int) -> None:
    logprobs, old, _ = columns(rows)
    bounds = torch.tensor([0, min(cut, len(rows)), len(rows)])
    lengths = bounds.diff()
    of_sequences = torch.tensor([1.5, -0.5], dtype=torch.float64)
    token_form, sequence_form = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()

    mean = sequence_log_ratio(token_form, old, torch.ones_like(old), bounds)
    result = gspo_loss(token_form, of_sequences.repeat_interleave(lengths), mean, clip, clip)
    weights = (1 / lengths.clamp(min=1).double()).repeat_interleave(lengths)
    token_loss = (weights * result.loss).sum()
    token_loss.backward()

    # As the paper writes it: one ratio a sequence, differentiated through.
    sequence_loss = torch.zeros((), dtype=torch.float64)
    for start, stop, advantage in zip(bounds[:-1], bounds[1:], of_sequences, strict=True):
        if stop > start:
            ratio = (sequence_form[start:stop] - old[start:stop]).mean().exp()
            sequence_loss = sequence_loss - torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    sequence_loss.backward()
    torch.testing.assert_close(token_loss, sequence_loss)
    torch.testing.assert_close(token_form.grad, sequence_form.grad)


def test_gmpo_hand_computed() -> None:
    # Log ratios 0.2, 0.6 and -1 of one sequence, bounded to 0.4 above where it is good, to -0.4 below where it is bad.
    old, new = torch.full((3,), -1.0), torch.tensor([-0.8, -0.4, -2.0])
    whole = partial(mean_of_one, num=3)
    good = gmpo_loss(new.requires_grad_(), old, torch.ones(3), whole, 0.4, 0.4)
    assert good.clipped.tolist() == [False, True, False]
    assert good.loss.tolist() == pytest.approx([-math.exp((0.2 + 0.4 - 1) / 3)] * 3)
    good.loss.sum().backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-math.exp(-0.4 / 3), 0, -math.exp(-0.4 / 3)])
    bad = gmpo_loss(new, old, -torch.ones(3), whole, 0.4, 0.3)
    assert bad.clipped.tolist() == [False, False, True]
    assert bad.loss.tolist() == pytest.approx([math.exp((0.2 + 0.6 - 0.4) / 3)] * 3)


def mean_of_one(values: torch.Tensor, num: int) -> torch.Tensor:
    return (values.sum() / num).expand(num)


@given(tokens, st.floats(0.05, 1), st.floats(0.05, 2), st.sampled_from([1.5, -0.5]))
def test_gmpo_is_the_gradient_of_the_sequence_form(rows: list[Row], low: float, high: float, advantage: float) -> None:
    """The paper's: the product of |min(ratio A, clip(ratio) A)|, to the power of 1 / length, with the sign of A."""
    logprobs, old, _ = columns(rows)
    token_form, sequence_form = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    num, advantages = len(rows), torch.full_like(old, advantage)
    token_loss = gmpo_loss(token_form, old, advantages, partial(mean_of_one, num=num), low, high).loss.mean()
    token_loss.backward()
    ratio = (sequence_form - old).exp()
    least = torch.min(ratio * advantage, ratio.clamp(math.exp(-low), math.exp(high)) * advantage).abs()
    sequence_loss = -math.copysign(1, advantage) * least.log().mean().exp()
    sequence_loss.backward()
    torch.testing.assert_close(token_loss, sequence_loss)
    torch.testing.assert_close(token_form.grad, sequence_form.grad)


def test_cispo_hand_computed() -> None:
    old, ratio = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([0.5, 1.0, 3.0])
    advantages = torch.tensor([1.0, -2.0, 1.0])
    logprobs = (old + ratio.log()).requires_grad_()
    result = cispo_loss(logprobs, old, advantages, clip_low=0.2, clip_high=1.0)
    result.loss.sum().backward()
    # The weight is bounded to [0.8, 2]; the gradient is -weight * A at every token, the bounded ones too.
    assert result.clipped.tolist() == [True, False, True]
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-0.8, 2.0, -2.0])
    assert result.loss.tolist() == pytest.approx([0.8 * (-1 - math.log(2)) * -1, -2.0, -2 * (-1 + math.log(3))])


@given(tokens, st.floats(0.05, 1), st.floats(0.05, 5))
def test_cispo_and_reinforce_equal_the_loop(rows: list[Row], low: float, high: float) -> None:
    cispo, plain = cispo_loss(*columns(rows), low, high), reinforce_loss(*columns(rows))
    for number, (logprob, old, advantage) in enumerate(rows):
        ratio = math.exp(logprob - old)
        weight = min(max(ratio, 1 - low), 1 + high)
        assert cispo.loss[number].item() == pytest.approx(-weight * advantage * logprob)
        assert cispo.ratio[number].item() == plain.ratio[number].item() == pytest.approx(ratio)
        assert plain.loss[number].item() == pytest.approx(-advantage * logprob)
        assert not plain.clipped[number]


def test_reinforce_hand_computed() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = reinforce_loss(logprobs, torch.tensor([-1.0, -1.0]), torch.tensor([2.0, -3.0]))
    result.loss.sum().backward()
    assert result.loss.tolist() == [2, -6]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2, 3]


def test_distill_hand_computed() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.5)], requires_grad=True)
    old = torch.tensor([math.log(0.25), math.log(0.5)])
    teacher = torch.tensor([math.log(0.125), math.log(1.0)])
    result = distill_loss(logprobs, old, teacher)
    result.loss.sum().backward()
    expected = [
        2 * 2 * math.log(2),
        -math.log(2),
    ]  # twice as likely as before, four times as likely as the teacher has it
    assert result.loss.tolist() == pytest.approx(expected)
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(expected)


@given(tokens)
def test_distill_equals_the_loop(rows: list[Row]) -> None:
    logprobs, old, teacher = columns(rows)
    expected = [
        -math.exp(a - b) * (c - a) for a, b, c in zip(*(x.tolist() for x in (logprobs, old, teacher)), strict=True)
    ]
    assert distill_loss(logprobs, old, teacher).loss.tolist() == pytest.approx(expected)


def test_distillation_s_expected_gradient_is_that_of_the_reverse_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, generator=generator, dtype=torch.float64, requires_grad=True)
    old, teacher = torch.randn(2, 20, generator=generator, dtype=torch.float64).log_softmax(-1)
    (old.exp() * distill_loss(logits.log_softmax(-1), old, teacher).loss).sum().backward()
    found, logits.grad = logits.grad, None
    student = logits.log_softmax(-1)
    (student.exp() * (student - teacher)).sum().backward()
    torch.testing.assert_close(found, logits.grad)


def distill_top(policy: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    zero = policy.new_zeros(len(policy))
    return distill_top_loss(zero, zero, policy, teacher, beta).loss


def test_distill_top_hand_computed() -> None:
    """Teacher 1/2, 1/4 and a rest of 1/4; policy 1/4, 1/4 and 1/2. In the middle, at beta 1/2: 3/8, 1/4, 3/8."""
    teacher, policy = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    forward, reverse = 0.5 * math.log(2) - 0.25 * math.log(2), 0.5 * math.log(2) - 0.25 * math.log(2)
    middle = 2 * 0.5 * (0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3))
    assert distill_top(policy, teacher, 0.0).tolist() == pytest.approx([forward], rel=1e-5)
    assert distill_top(policy, teacher, 1.0).tolist() == pytest.approx([reverse], rel=1e-5)
    assert distill_top(policy, teacher, 0.5).tolist() == pytest.approx([middle], rel=1e-5)
    # Of two classes, where the two KLs differ: 0.9 and 0.1 against 0.5 and 0.5.
    teacher, policy = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = [0.9 * math.log(1.8) + 0.1 * math.log(0.2), 0.5 * math.log(5 / 9) + 0.5 * math.log(5)]
    assert [float(distill_top(policy, teacher, beta)) for beta in (0.0, 1.0)] == pytest.approx(expected, rel=1e-5)
    # beta 1/4: the middle has 0.6 and 0.4.
    skewed = 0.25 * (0.9 * math.log(1.5) + 0.1 * math.log(0.25)) + 0.75 * (0.5 * math.log(5 / 6) + 0.5 * math.log(1.25))
    assert float(distill_top(policy, teacher, 0.25)) == pytest.approx(skewed, rel=1e-5)
    # A sum of the two, of which the forward one has a quarter.
    mixed = distill_top_loss(policy[:, 0], policy[:, 0], policy, teacher, 1.0, distill_forward_weight=0.25).loss
    assert float(mixed) == pytest.approx(0.25 * expected[0] + 0.75 * expected[1], rel=1e-5)


def test_distill_top_s_gradients_are_those_of_the_formulas() -> None:
    """With P the teacher's and Q the policy's: by logits, Q - P of the forward KL, and Q (log Q / P - KL) of the reverse one."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 6, generator=generator, dtype=torch.float64).log_softmax(-1).requires_grad_()
    policy = logits.log_softmax(-1)
    p, q = teacher.exp(), policy.exp()
    apart = policy - teacher
    reverse = (q * apart).sum(-1, keepdim=True)
    for beta, expected in ((0.0, q - p), (1.0, q * (apart - reverse))):
        [found] = torch.autograd.grad(distill_top(policy, teacher, beta).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, expected)
    assert not torch.autograd.grad(distill_top(policy, teacher, 0.5).sum(), teacher, allow_unused=True)[0]


@given(beta=st.floats(0, 1), seed=st.integers(0, 99), k=st.integers(1, 7))
def test_one_class_for_the_rest_makes_a_divergence_smaller_and_never_negative(beta: float, seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    teacher, policy = (2 * torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)).log_softmax(-1)
    cut = [torch.cat([x[:, :k], x[:, k:].logsumexp(-1, keepdim=True)], dim=1) for x in (policy, teacher)]
    whole, some = distill_top(policy, teacher, beta), distill_top(*cut, beta)
    assert (some <= whole + 1e-12).all() and (some >= -1e-12).all()
    missing = None
    if beta == 0:  # chain rule: what the two disagree about within the rest
        within = [x[:, k:].log_softmax(-1) for x in (teacher, policy)]
        missing = cut[1][:, -1].exp() * (within[0].exp() * (within[0] - within[1])).sum(-1)
        torch.testing.assert_close(whole - some, missing)


# Every loss, as a function of log-probs, old log-probs and advantages alone.
LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": lambda p, o, a: clipped_policy_loss(p, o, a, 0.2, 0.28),
    "dual": lambda p, o, a: clipped_policy_loss(p, o, a, 0.2, 0.28, dual_clip=3.0),
    "gspo": lambda p, o, a: gspo_loss(p, a, p - o, 0.2, 0.28),
    "gmpo": lambda p, o, a: gmpo_loss(p, o, a, lambda x: x, 0.2, 0.28),
    "cispo": lambda p, o, a: cispo_loss(p, o, a, 1.0, 4.0),
    "reinforce": reinforce_loss,
    "distill": distill_loss,
}
losses = pytest.mark.parametrize("name", LOSSES)


@losses
@given(rows=tokens)
def test_on_policy_every_loss_has_the_policy_gradient(name: str, rows: list[Row]) -> None:
    logprobs, _, advantages = columns(rows)
    policy = logprobs.clone().requires_grad_()
    result = LOSSES[name](policy, logprobs, advantages)
    result.loss.sum().backward()
    assert not result.clipped.any() and result.ratio.tolist() == pytest.approx([1.0] * len(rows))
    expected = logprobs - advantages if name == "distill" else -advantages
    torch.testing.assert_close(policy.grad, expected)


@losses
@given(rows=tokens, seed=st.integers(0, 99))
def test_order_of_tokens_does_not_matter(name: str, rows: list[Row], seed: int) -> None:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    straight, shuffled = LOSSES[name](*columns(rows)), LOSSES[name](*(x[order] for x in columns(rows)))
    torch.testing.assert_close(shuffled.loss, straight.loss[order])


@losses
@pytest.mark.parametrize(("logprob", "old"), [(0, -1e4), (-1e4, 0), (0, -1e30), (-300, 0), (0, -float("inf"))])
@pytest.mark.parametrize("advantage", [5.0, -5.0, 0.0])
def test_every_loss_stays_finite_at_extremes(name: str, logprob: float, old: float, advantage: float) -> None:
    policy = torch.tensor([float(logprob)], requires_grad=True)
    result = LOSSES[name](policy, torch.tensor([float(old)]), torch.tensor([advantage]))
    result.loss.sum().backward()
    assert policy.grad is not None
    for values in (result.loss, result.ratio, policy.grad):
        assert torch.isfinite(values).all()


@losses
def test_every_loss_moves_logprobs_alone_and_takes_no_tokens(name: str) -> None:
    policy, old, advantages = (torch.randn(4, requires_grad=True) for _ in range(3))
    result = LOSSES[name](policy, old, advantages)
    result.loss.sum().backward()
    assert policy.grad is not None and old.grad is None and advantages.grad is None
    assert not result.ratio.requires_grad and result.clipped.dtype == torch.bool
    assert LOSSES[name](*torch.zeros(3, 0)).loss.shape == (0,)


@given(tokens, st.floats(0, 3))
def test_a_weight_may_multiply_the_advantage_or_the_loss(rows: list[Row], weight: float) -> None:
    logprobs, old, advantages = columns(rows)
    for name in LOSSES.keys() - {"distill"}:
        weighted = LOSSES[name](logprobs, old, advantages * weight).loss
        torch.testing.assert_close(weighted, weight * LOSSES[name](logprobs, old, advantages).loss)
