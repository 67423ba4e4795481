"""KL estimators: hand-computed, unbiased against the exact divergence, never negative, finite at the extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.kl import KlKind, kl_estimate


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2)), ("abs", math.log(2))],
)
def test_hand_computed(kind: KlKind, expected: float) -> None:
    # The policy gives the token twice the reference's probability: d = -log 2.
    estimate = kl_estimate(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), kind)
    assert estimate.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_exact_divergence(kind: KlKind) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=policy), torch.distributions.Categorical(logits=reference)
    )
    estimates = kl_estimate(policy, reference, kind)
    assert (policy.exp() * estimates).sum().item() == pytest.approx(exact.item(), rel=1e-9)


@given(st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0)), min_size=1), st.sampled_from(["k2", "k3", "abs"]))
def test_never_negative(rows: list[tuple[float, float]], kind: KlKind) -> None:
    logprobs, reference = torch.tensor(rows, dtype=torch.float64).unbind(1)
    assert (kl_estimate(logprobs, reference, kind) >= 0).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_gradient_flows_to_the_policy_alone(kind: KlKind) -> None:
    logprobs, reference = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    kl_estimate(logprobs, reference, kind).sum().backward()
    # d = -1: k1' = 1, k2' = -d, k3' = 1 - exp(d), abs' = -sign(d).
    expected = {"k1": 1.0, "k2": 1.0, "k3": 1 - math.exp(-1), "abs": 1.0}[kind]
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(expected, rel=1e-6)
    assert reference.grad is None


@pytest.mark.parametrize(("kind", "holds_back"), [("k1", 0.0), ("k2", 1.0)])
def test_the_mean_gradient_over_the_policy_s_samples(kind: KlKind, holds_back: float) -> None:
    scores = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    logprobs, reference = scores.log_softmax(0), torch.tensor([-2.0, -0.5, -1.3], dtype=torch.float64).log_softmax(0)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), scores, retain_graph=True)[0]
    mean = (logprobs.exp().detach() * kl_estimate(logprobs, reference, kind)).sum()
    assert torch.allclose(torch.autograd.grad(mean, scores)[0], holds_back * exact, atol=1e-12)


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
@pytest.mark.parametrize("difference", [1e4, -1e4, float("inf"), float("-inf")])
def test_extremes_stay_finite(kind: KlKind, difference: float) -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([difference]), kind)
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(estimate).all() and torch.isfinite(logprobs.grad).all()


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3 or abs; got 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def by_loop(logprob: float, reference: float, kind: KlKind) -> float:
    d = reference - logprob
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "abs": abs(d)}[kind]


@given(
    st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=20),
    st.sampled_from(["k1", "k2", "k3", "abs"]),
)
def test_equals_the_loop(rows: list[tuple[float, float]], kind: KlKind) -> None:
    logprobs, reference = torch.tensor(rows, dtype=torch.float64).unbind(1)
    expected = [by_loop(*row, kind) for row in rows]
    assert kl_estimate(logprobs, reference, kind).tolist() == pytest.approx(expected, abs=1e-9)
