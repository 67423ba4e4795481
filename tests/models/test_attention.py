"""Core attention against the formula written out, and the norm against its own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.attention import CoreAttention, RMSNorm, _chunk_order
from megarl.models.gpt import packed_params

D = 8
ONE = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))


def core(**settings: Any) -> CoreAttention:
    config = SimpleNamespace(kv_channels=D)
    return CoreAttention(config, 1, None, "self", pg_collection=ONE, **settings)  # type: ignore[arg-type]


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V below the diagonal, one query head at a time. [s, heads, d], [s, kv heads, d]."""
    length, heads, _ = query.shape
    outputs = []
    for head in range(heads):
        group = head * key.shape[1] // heads
        scores = query[:, head] @ key[:, group].T / math.sqrt(D)
        hidden = torch.arange(length)[None] > torch.arange(length)[:, None]
        outputs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[:, group])
    return torch.cat(outputs, dim=-1)


def random_qkv(length: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = [(length, heads, D) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(size, generator=random, dtype=torch.float64, requires_grad=True) for size in sizes)
    return q, k, v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_sequence_is_the_formula(kv_heads: int) -> None:
    q, k, v = random_qkv(11, kv_heads)
    ours = core()(q[:, None], k[:, None], v[:, None])
    torch.testing.assert_close(ours[:, 0], by_hand(q, k, v))


@pytest.mark.parametrize("lengths", [[11], [4, 1, 6], [3, 0, 5]])
def test_packed_sequences_and_their_gradients_are_those_of_each_alone(lengths: list[int]) -> None:
    q, k, v = random_qkv(sum(lengths), 2)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    output = core()(q, k, v, packed_seq_params=packed_params(bounds))[:, 0]
    expected = torch.cat([by_hand(*part) for part in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)])
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad((output * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_padding_behind_the_sequences_is_zero_and_seen_by_none() -> None:
    q, k, v = random_qkv(9, 2)
    output = core()(q, k, v, packed_seq_params=packed_params(torch.tensor([0, 4, 7], dtype=torch.int32)))[:, 0]
    assert output.shape == (9, 4 * D)
    assert not output[7:].any()
    torch.testing.assert_close(output[4:7], by_hand(q[4:7], k[4:7], v[4:7]))


def test_a_scale_may_be_given() -> None:
    q, k, v = random_qkv(5, 2)
    doubled = core(softmax_scale=2 / math.sqrt(D))(q[:, None], k[:, None], v[:, None])
    torch.testing.assert_close(doubled[:, 0], by_hand(2 * q, k, v))


def test_chunks_of_context_parallel_ranks_are_put_in_order() -> None:
    # Two ranks hold 0 3 | 1 2, three hold 0 5 | 1 4 | 2 3.
    assert _chunk_order(2) == [0, 2, 3, 1]
    assert _chunk_order(3) == [0, 2, 4, 5, 3, 1]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_norm_is_its_formula_and_marks_its_weight(sequence_parallel: bool) -> None:
    config = SimpleNamespace(params_dtype=torch.float64, sequence_parallel=sequence_parallel)
    norm = RMSNorm(config, 6, eps=0.1)  # type: ignore[arg-type]
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6.0))
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * torch.arange(6.0)
    torch.testing.assert_close(norm(x), expected)
    assert norm.weight.sequence_parallel is sequence_parallel
