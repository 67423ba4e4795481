import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.training.logprob import LEAST_LOG_REST, vocab_parallel_logprobs, vocab_parallel_top

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


def top_reference(logits, ids, temperature):
    """Log-probs of ids [T, k] and of all other entries, from whole logits [T, V]."""
    logp = torch.log_softmax(logits / temperature, dim=-1)
    others = torch.ones_like(logp).scatter(1, ids, 0) > 0
    return torch.cat([logp.gather(1, ids), logp.where(others, float("-inf")).logsumexp(1, keepdim=True)], dim=1)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(2, 13), st.integers(0, 3)),
    share=st.floats(0, 1),
    entropy_grad=st.booleans(),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_the_likeliest_entries_and_the_rest_equal_those_of_whole_logits(shape, share, entropy_grad, chunk, seed):
    tokens, vocab, padding = shape
    k, generator = 1 + int(share * (vocab - 2)), seeded(seed)
    logits = (torch.randn(tokens, vocab + padding, generator=generator) * 5).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    other = torch.randn(tokens, vocab + padding, generator=generator)  # whose likeliest these are
    ids = vocab_parallel_top(other, k, vocab_size=vocab, chunk_elements=chunk)
    assert torch.equal(ids, other[:, :vocab].argsort(dim=1, descending=True)[:, :k])
    scores = vocab_parallel_logprobs(
        logits,
        labels,
        vocab_size=vocab,
        temperature=0.7,
        with_entropy=True,
        entropy_grad=entropy_grad,
        chunk_elements=chunk,
        top_ids=ids,
    )
    logprobs, entropy = reference(logits, labels, vocab, 0.7)
    top = top_reference(logits[:, :vocab], ids, 0.7)
    torch.testing.assert_close(scores.top, top, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=1e-5)
    outer = torch.randn(tokens, k + 3, generator=generator)

    def gradient(logprobs, entropy, top):
        loss = (outer * torch.cat([top, logprobs[:, None], entropy[:, None]], dim=1)).sum()
        return torch.autograd.grad(loss, logits)[0]

    ours = gradient(scores.logprobs, scores.entropy, scores.top)
    theirs = gradient(logprobs, entropy if entropy_grad else entropy.detach(), top)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert not ours[:, vocab:].any()


def test_gradients_of_the_likeliest_entries_pass_gradcheck_in_float64():
    logits = torch.randn(5, 7, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    labels, ids = torch.tensor([0, 3, 5, 5, 2]), torch.tensor([[0, 4], [1, 2], [5, 0], [2, 1], [3, 4]])

    def scores(values):
        return tuple(
            vocab_parallel_logprobs(
                values,
                labels,
                vocab_size=6,
                temperature=0.8,
                with_entropy=True,
                entropy_grad=True,
                chunk_elements=14,
                top_ids=ids,
            )
        )

    assert torch.autograd.gradcheck(scores, (logits,))


def test_a_rest_of_almost_no_probability_has_the_gradient_of_its_own():
    """One entry has all but e^-30: of 1 - p nothing is left in float32, and the rest is shared out evenly all the same."""
    logits = torch.tensor([[30.0, 0.0, 0.0, -1.0]], requires_grad=True)
    [found] = vocab_parallel_logprobs(logits, torch.tensor([0]), vocab_size=4, top_ids=torch.tensor([[0]])).top
    others = 2 + math.exp(-1)
    assert found.tolist() == pytest.approx([0, math.log(others) - 30], abs=1e-5)
    (0.1 * found[1] + 0.9 * found[0]).backward()
    expected = [-0.1, 0.1 / others, 0.1 / others, 0.1 * math.exp(-1) / others]
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_where_all_entries_are_given_nothing_is_left_and_has_a_logarithm():
    logits = torch.tensor([[1.0, 2.0, 9.0]], requires_grad=True)
    [found] = vocab_parallel_logprobs(logits, torch.tensor([0]), vocab_size=2, top_ids=torch.tensor([[1, 0]])).top
    assert found[-1] == LEAST_LOG_REST
    found.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([1 - 2 / (1 + math.e), 1 - 2 * math.e / (1 + math.e), 0], abs=1e-6)


@pytest.mark.parametrize("k", [0, 4])
def test_no_more_entries_than_the_vocabulary_has(k):
    with pytest.raises(ValueError, match="k must be from 1 to the vocabulary of 3"):
        vocab_parallel_top(torch.zeros(2, 5), k, vocab_size=3)
