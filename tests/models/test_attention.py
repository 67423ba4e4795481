"""Core attention against the formula written out."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.models.attention import CoreAttention, _chunk_order, _with_sink
from megarl.models.packed import packed_params

pytestmark = pytest.mark.usefixtures("on_device")
D = 8
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
ONE = SimpleNamespace(cp=ALONE, tp=ALONE)
SINKS = torch.tensor([-1.5, 0.0, 2.0, 5.0], dtype=torch.float64)


def core(window: int | None = None, sinks: Tensor | None = None, **settings: Any) -> CoreAttention:
    """Layer 2 of two, the one that may have a window."""
    config = SimpleNamespace(
        kv_channels=D,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=[0, 1],
        softmax_type="vanilla" if sinks is None else "learnable",
        num_attention_heads=4,
        params_dtype=torch.float64,
    )
    made = CoreAttention(config, 2, None, "self", pg_collection=ONE, **settings)  # type: ignore[arg-type]
    if sinks is not None:
        assert made.softmax_offset is not None
        made.softmax_offset.data.copy_(sinks)
    return made


def by_hand(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V below the diagonal, one query head at a time. [s, heads, d], [s, kv heads, d | v].

    window: how many tokens each sees, itself among them. sinks: [heads], of each one more logit, which no value follows.
    """
    length, heads, _ = query.shape
    outputs = []
    for head in range(heads):
        group = head * key.shape[1] // heads
        scores = query[:, head] @ key[:, group].T / math.sqrt(D)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        hidden = (distance < 0) | (distance >= (window or length))
        logits = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks[head].expand(length, 1)], -1)
        outputs.append(logits.softmax(-1)[:, :length] @ value[:, group])
    return torch.cat(outputs, dim=-1)


def random_qkv(length: int, kv_heads: int, seed: int = 0, v_dim: int = D) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator(torch.get_default_device()).manual_seed(seed)
    sizes = [(length, 4, D), (length, kv_heads, D), (length, kv_heads, v_dim)]
    q, k, v = (torch.randn(size, generator=random, dtype=torch.float64, requires_grad=True) for size in sizes)
    return q, k, v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_sequence_is_the_formula(kv_heads: int) -> None:
    q, k, v = random_qkv(11, kv_heads)
    ours = core()(q[:, None], k[:, None], v[:, None])
    torch.testing.assert_close(ours[:, 0], by_hand(q, k, v))


@pytest.mark.parametrize("lengths", [[11], [4, 1, 6], [3, 0, 5], [2, 5, 1, 2, 5, 2]])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 30])
@pytest.mark.parametrize("v_dim", [D, 5, 13])
def test_packed_sequences_and_their_gradients_are_those_of_each_alone(
    lengths: list[int], window: int | None, v_dim: int
) -> None:
    q, k, v = random_qkv(sum(lengths), 2, v_dim=v_dim)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    output = core(window)(q, k, v, packed_seq_params=packed_params(bounds))[:, 0]
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    expected = torch.cat([by_hand(*part, window=window) for part in parts])
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad((output * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_and_their_gradients_are_the_formula(window: int | None) -> None:
    lengths = [7, 1, 5]
    q, k, v = random_qkv(sum(lengths), 2)
    sinks = SINKS.to(q.device).requires_grad_()
    attention = core(window, sinks.detach())
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    output = attention(q, k, v, packed_seq_params=packed_params(bounds))[:, 0]
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    expected = torch.cat([by_hand(*part, window=window, sinks=sinks) for part in parts])
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    ours = torch.autograd.grad((output * weights).sum(), (q, k, v, attention.softmax_offset))
    for found, wanted in zip(ours, torch.autograd.grad((expected * weights).sum(), (q, k, v, sinks)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_sinks_of_a_narrow_type_are_not_rounded_once_more() -> None:
    q, k, v = (tensor.detach().bfloat16() for tensor in random_qkv(6, 4))
    sinks, scale = torch.tensor([0.3, 2.7, 5.3, -1.1]).bfloat16(), 0.3
    wide, keys, _ = _with_sink(*(tensor.permute(1, 0, 2)[None] for tensor in (q, k, v)), sinks, scale)
    products = (wide.double() @ keys[:, :, :1].double().mT)[0, :, 0, 0] * scale
    torch.testing.assert_close(products, sinks.double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("lengths", [[11], [5, 11, 5]])
def test_attention_with_a_mask_is_what_cudas_kernel_for_masks_takes(
    lengths: list[int], sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # can_use_mem_efficient_attention, in torch's sdp_utils.cpp: as many heads of keys as of queries, an even number of 16 bytes
    # in a head of 16 bits, and no holes between its elements. Else torch holds [queries, keys] of each head in float32.
    found = []
    attend = F.scaled_dot_product_attention

    def spied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        if mask is not None:
            assert q.shape[:2] == k.shape[:2] == v.shape[:2] and not options.get("enable_gqa")
            assert {each.shape[-1] % 8 for each in (q, k, v)} == {0} and {each.stride(-1) for each in (q, k, v)} == {1}
            assert mask.dim() == 2 and mask.dtype == torch.bool
            found.append((k.shape[0], k.stride(0)))
        return attend(q, k, v, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    q, k, v = random_qkv(sum(lengths), 2)
    sinks = None if sinks is None else sinks.to(q.device)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    output = core(3, sinks)(q, k, v, packed_seq_params=packed_params(bounds))[:, 0]
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    expected = torch.cat([by_hand(*part, window=3, sinks=sinks) for part in parts])
    torch.testing.assert_close(output, expected)
    # Two of the four heads share keys, which lie in memory once.
    assert set(found) == {(2, 0)}


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


def test_a_window_is_of_the_layers_that_have_it() -> None:
    config = SimpleNamespace(kv_channels=D, window_size=(2, 0), window_attn_skip_freq=[0, 1], softmax_type="vanilla")
    q, k, v = random_qkv(9, 2)
    for layer, window in ((1, None), (2, 3)):
        attention = CoreAttention(config, layer, None, "self", pg_collection=ONE)  # type: ignore[arg-type]
        torch.testing.assert_close(attention(q[:, None], k[:, None], v[:, None])[:, 0], by_hand(q, k, v, window))


@given(st.integers(0, 12), st.integers(1, 12), st.integers(1, 30))
def test_the_last_queries_of_a_sequence_are_those_of_the_whole(first: int, count: int, window: int) -> None:
    q, k, v = random_qkv(first + count, 2)
    tail = core(window)._attend(q[first:, None], k[:, None], v[:, None], first)[:, 0].flatten(1)
    torch.testing.assert_close(tail, by_hand(q, k, v, window)[first:])


def test_chunks_of_context_parallel_ranks_are_put_in_order() -> None:
    # Two ranks hold 0 3 | 1 2, three hold 0 5 | 1 4 | 2 3.
    assert _chunk_order(2) == [0, 2, 3, 1]
    assert _chunk_order(3) == [0, 2, 4, 5, 3, 1]


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_heads_wider_than_the_kernel_for_shared_ones_are_batches(
    sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads that share keys, of more than 256 elements, CUDA has no kernel but that which holds all products."""
    random = torch.Generator(torch.get_default_device()).manual_seed(2)
    query, key, value = (
        torch.randn((11, heads, 264), generator=random, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    plain, asked = F.scaled_dot_product_attention, []

    def seen(*tensors: Any, **options: Any) -> Tensor:
        asked.append(options.get("enable_gqa", False))
        return plain(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    output = core(sinks=sinks)(query[:, None], key[:, None], value[:, None])[:, 0]
    assert asked == [False]
    expected = by_hand(query, key, value, sinks=sinks)
    torch.testing.assert_close(output, expected)
    weights = torch.randn(output.shape, generator=random, dtype=torch.float64)
    found = torch.autograd.grad((output * weights).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    torch.testing.assert_close(found, wanted)
