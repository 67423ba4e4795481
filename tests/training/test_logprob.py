import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.training.logprob import vocab_parallel_logprobs

pytestmark = pytest.mark.usefixtures("on_device")


def seeded(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def reference(logits, labels, vocab_size, temperature):
    logp = torch.log_softmax(logits[:, :vocab_size].float() / temperature, dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)


def test_hand_computed():
    logits = torch.tensor([[math.log(1.0), math.log(3.0), 50.0]])
    scores = vocab_parallel_logprobs(logits, torch.tensor([1]), vocab_size=2, with_entropy=True)
    assert scores.logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert scores.entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 13), st.integers(0, 3)),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_equals_log_softmax_for_every_chunking(shape, temperature, chunk, seed):
    tokens, vocab, padding = shape
    generator = seeded(seed)
    logits = (torch.randn(tokens, vocab + padding, generator=generator) * 5).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    outer = torch.randn(2, tokens, generator=generator)
    scores = vocab_parallel_logprobs(
        logits,
        labels,
        vocab_size=vocab,
        temperature=temperature,
        with_entropy=True,
        entropy_grad=True,
        chunk_elements=chunk,
    )
    logprobs, entropy = reference(logits, labels, vocab, temperature)
    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad((outer * torch.stack([scores.logprobs, scores.entropy])).sum(), logits)[0]
    theirs = torch.autograd.grad((outer * torch.stack([logprobs, entropy])).sum(), logits)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert not ours[:, vocab:].any()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_pass_gradcheck_in_float64(with_entropy):
    logits = torch.randn(5, 7, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    labels = torch.tensor([0, 3, 5, 5, 2])

    def scores(values):
        result = vocab_parallel_logprobs(
            values,
            labels,
            vocab_size=6,
            temperature=0.8,
            with_entropy=with_entropy,
            entropy_grad=with_entropy,
            chunk_elements=14,
        )
        return result[:2] if with_entropy else result.logprobs

    assert torch.autograd.gradcheck(scores, (logits,))


def test_entropy_without_gradient_does_not_change_the_gradient():
    logits = torch.randn(4, 6, generator=seeded(1)).requires_grad_()
    labels = torch.tensor([0, 1, 2, 3])
    plain = vocab_parallel_logprobs(logits, labels, vocab_size=6)
    reported = vocab_parallel_logprobs(logits, labels, vocab_size=6, with_entropy=True)
    assert plain.entropy is None
    assert not reported.entropy.requires_grad
    first = torch.autograd.grad(plain.logprobs.sum(), logits)[0]
    second = torch.autograd.grad(reported.logprobs.sum(), logits)[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_may_take_the_place_of_the_logits(dtype):
    leaf = torch.randn(6, 9, generator=seeded(4)).to(dtype).requires_grad_()
    labels, outer = torch.tensor([0, 7, 3, 3, 1, 5]), torch.arange(1.0, 7.0)

    def gradient(overwrite_logits):
        seen = []
        logits = leaf * 2
        logits.register_hook(seen.append)
        scores = vocab_parallel_logprobs(
            logits,
            labels,
            vocab_size=8,
            temperature=1.3,
            with_entropy=True,
            entropy_grad=True,
            overwrite_logits=overwrite_logits,
            chunk_elements=16,
        )
        loss = (outer * (scores.logprobs + scores.entropy)).sum()
        loss.backward(retain_graph=True)
        return logits, seen[0], loss

    _, kept, _ = gradient(False)
    logits, overwritten, loss = gradient(True)
    assert torch.equal(overwritten, kept)
    assert overwritten.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bfloat16_logits_are_scored_in_float32():
    logits = torch.randn(64, 50, generator=seeded(2)).bfloat16().requires_grad_()
    labels = torch.randint(50, (64,), generator=seeded(3))
    scores = vocab_parallel_logprobs(logits, labels, vocab_size=50)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, reference(logits, labels, 50, 1.0)[0], atol=1e-5, rtol=0)
    assert torch.autograd.grad(scores.logprobs.sum(), logits)[0].dtype == torch.bfloat16


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0], [-1e4, -2e4]])
    scores = vocab_parallel_logprobs(logits, torch.tensor([1, 0]), vocab_size=2, with_entropy=True)
    assert scores.logprobs.tolist() == [-1e4, 0.0]
    assert scores.entropy.tolist() == [0.0, 0.0]


def test_shapes_and_temperature_are_checked():
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(3,\)"):
        vocab_parallel_logprobs(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), vocab_size=3)
    with pytest.raises(ValueError, match="temperature must be positive"):
        vocab_parallel_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), vocab_size=3, temperature=0)
