"""Rotary positions on CPUs against Megatron's own function and their formula, with gradients."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models import cpu_rope


def both() -> tuple[Any, Any]:
    """Megarl's form, and what stood there."""
    asked: list[tuple[Any, ...]] = []

    def theirs(t: Tensor, _: Tensor, *options: Any) -> Tensor:
        asked.append(options)
        return t

    module = SimpleNamespace(_apply_rotary_pos_emb_bshd=theirs)
    cpu_rope.install(module)  # type: ignore[arg-type]
    return module._apply_rotary_pos_emb_bshd, asked


def formula(t: Tensor, freqs: Tensor, mscale: float) -> Tensor:
    """Pair by pair, in float64."""
    half, out = freqs.shape[-1] // 2, [t[..., index] for index in range(t.shape[-1])]
    for index in range(half):
        a, b = t[..., index], t[..., half + index]
        first, second = freqs[..., index], freqs[..., half + index]
        out[index] = mscale * (a * first.cos() - b * first.sin())
        out[half + index] = mscale * (b * second.cos() + a * second.sin())
    return torch.stack(out, -1)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("mscale", [1.0, 0.7])
def test_heads_and_gradients_are_the_formula_s(heads, rotated, mscale):
    torch.manual_seed(1)
    t = torch.randn(5, 2, heads, 8, requires_grad=True)
    freqs = torch.randn(5, 1, 1, rotated)  # whose halves differ
    ours, asked = both()
    found, wanted = ours(t, freqs, mscale=mscale), formula(t.double(), freqs.double(), mscale)
    assert not asked
    torch.testing.assert_close(found, wanted.float())
    grad = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, t, grad), torch.autograd.grad(wanted, t, grad.double()))


def test_angles_that_change_are_noticed():
    ours, _ = both()
    t = torch.randn(5, 1, 2, 8)
    for seed, scale in ((1, 1.0), (1, 1.0), (2, 1.0), (2, 0.7), (1, 0.7)):
        freqs = torch.randn(5, 1, 1, 8, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(ours(t, freqs, mscale=scale), formula(t.double(), freqs.double(), scale).float())
    torch.testing.assert_close(ours(t[:3], freqs[:3]), formula(t[:3].double(), freqs[:3].double(), 1.0).float())


def test_gradients_come_after_a_pass_without_any_at_the_same_angles():
    ours, _ = both()
    t, freqs = torch.randn(5, 1, 2, 8, requires_grad=True), torch.randn(5, 1, 1, 8)
    with torch.inference_mode():
        before = ours(t, freqs * 1)
    found = ours(t, freqs)
    assert torch.equal(found, before)
    [grad] = torch.autograd.grad(found.sum(), t)
    [wanted] = torch.autograd.grad(formula(t.double(), freqs.double(), 1.0).sum(), t)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.bfloat16, ()), (torch.float32, (True,)), (torch.float32, (False, True))]
)
def test_other_dtypes_and_forms_are_left_to_megatron(dtype, options):
    ours, asked = both()
    t = torch.ones(2, 1, 1, 4, dtype=dtype)
    assert ours(t, torch.ones(2, 1, 1, 4), *options) is t
    assert asked == [(*options, *(False, False)[len(options) :], 1.0)]


@pytest.mark.host_only
def test_megatron_takes_it_on_a_cpu(on_device: None):
    module = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    assert module._apply_rotary_pos_emb_bshd.__module__ == cpu_rope.__name__
