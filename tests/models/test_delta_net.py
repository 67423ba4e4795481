"""The gated delta rule against its definition, token by token; and what the family's layers do beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.models import delta_net
from megarl.models.delta_net import Chunks, causal_conv, gated_delta_rule

CHUNK = 8  # in the place of one that would make these tests slow
LENGTHS = (CHUNK + 5, 1, 3 * CHUNK, 2 * CHUNK + 1)
BEHIND = 3  # tokens of padding
HEADS, EACH, KEY, VALUE = 2, 2, 4, 6


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "CHUNK", CHUNK)


def inputs() -> list[Tensor]:
    """Query, key, value, log_decay, write."""
    random = torch.Generator().manual_seed(7)
    total = sum(LENGTHS) + BEHIND
    query, key = (torch.randn(total, HEADS, KEY, generator=random) for _ in range(2))
    value = torch.randn(total, HEADS, EACH, VALUE, generator=random)
    log_decay = -torch.rand(total, HEADS, EACH, generator=random) * 0.3
    write = torch.rand(total, HEADS, EACH, generator=random)
    key = key / key.norm(dim=-1, keepdim=True)
    return [tensor.requires_grad_() for tensor in (query, key, value, log_decay, write)]


def by_definition(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor) -> Tensor:
    """S <- a S (I - b k k') + b v k', o = S q (arXiv 2412.06464, equation 10), in float64, with S [value, key]."""
    outputs, start = [], 0
    for length in LENGTHS:
        state = torch.zeros(HEADS, EACH, VALUE, KEY, dtype=torch.float64)
        for t in range(start, start + length):
            k, a, b = key[t].double()[:, None], log_decay[t].double().exp()[..., None, None], write[t][..., None, None]
            erased = torch.eye(KEY, dtype=torch.float64) - b * k[..., :, None] * k[..., None, :]
            state = a * state @ erased + b * value[t].double()[..., :, None] * k[..., None, :]
            outputs.append((state @ query[t].double()[:, None, :, None])[..., 0])
        start += length
    return torch.cat([torch.stack(outputs), torch.zeros(BEHIND, HEADS, EACH, VALUE, dtype=torch.float64)])


def test_chunks_give_what_the_recurrence_gives_token_by_token_and_its_gradients() -> None:
    found, weights = [], torch.randn(sum(LENGTHS) + BEHIND, HEADS, EACH, VALUE)
    for rule in (lambda *tensors: gated_delta_rule(*tensors, LENGTHS), by_definition):
        tensors = inputs()
        output = rule(*tensors)
        (output * weights).sum().backward()
        found.append([output, *(tensor.grad for tensor in tensors)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=2e-6 * theirs.abs().max().item(), rtol=1e-5)


def test_decays_of_nearly_all_give_no_infinities() -> None:
    tensors = inputs()
    tensors[3] = (tensors[3].detach() * 1000).requires_grad_()
    output = gated_delta_rule(*tensors, LENGTHS)
    output.sum().backward()
    torch.testing.assert_close(output.double(), by_definition(*tensors), atol=1e-4, rtol=1e-4)
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in tensors)


def test_no_device_is_asked_how_many_tokens_there_are() -> None:
    assert Chunks.of(LENGTHS, torch.device("meta")).places.shape == (sum(LENGTHS),)


def test_first_chunks_come_first_and_those_of_the_longest_sequence_before_others() -> None:
    chunks = Chunks.of((2, CHUNK + 3, 2 * CHUNK + 1), torch.device("cpu"))
    assert (chunks.rows, chunks.steps) == (6, [3, 2, 1])
    rows = (chunks.places // CHUNK).tolist()
    assert rows == [2] * 2 + [1] * CHUNK + [4] * 3 + [0] * CHUNK + [3] * CHUNK + [5]
    tokens = torch.arange(1.0, 3 * CHUNK + 7)
    assert chunks.cut(tokens)[4].tolist() == [*range(CHUNK + 3, CHUNK + 6), *[0] * (CHUNK - 3)]
    assert chunks.joined(chunks.cut(tokens), len(tokens)).equal(tokens)
    assert chunks.joined(chunks.cut(tokens), len(tokens) + 2)[-2:].eq(0).all()


@pytest.mark.parametrize("width", [1, 3])
def test_a_token_sees_those_before_it_in_its_own_sequence(width: int) -> None:
    tokens, weight = torch.randn(9, 2), torch.randn(2, 1, width)
    expected = torch.zeros(9, 2)
    for start, stop in ((0, 1), (1, 5), (5, 7)):  # two tokens stand behind
        for t in range(start, stop):
            for back in range(min(width, t - start + 1)):
                expected[t] += weight[:, 0, width - 1 - back] * tokens[t - back]
    torch.testing.assert_close(causal_conv(tokens, weight, (1, 4, 2)), expected)
