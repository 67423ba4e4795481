"""RMSNorm's gradient on CPUs against its formula, differentiated by torch step by step; forward equal to the bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megarl.models.cpu_norm import rms_norm


def formula(x: Tensor, weight: Tensor | None, dims: int, eps: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(tuple(range(-dims, 0)), keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(50, 1, 96), (5, 3, 8, 32), (0, 1, 16), (16,)])
@pytest.mark.parametrize(("dims", "weighted"), [(1, True), (2, True), (1, False)])
@pytest.mark.parametrize("columns", [False, True])
def test_norm_and_gradients_are_the_formula_s(dtype, shape, dims, weighted, columns):
    torch.manual_seed(1)
    dims = min(dims, len(shape))
    plain = (
        torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
        if columns
        else torch.randn(shape, dtype=dtype)
    )
    x, weight = plain.detach().requires_grad_(), torch.randn(shape[-dims:], dtype=dtype).requires_grad_()
    inputs = [x, weight] if weighted else [x]
    expected = formula(x, weight if weighted else None, dims, 1e-6)
    ours, scale = rms_norm(x, list(shape[-dims:]), weight if weighted else None, 1e-6)
    if columns:  # summed in another order
        torch.testing.assert_close(ours, expected)
    else:
        assert torch.equal(ours, expected)
    assert scale.shape == (*shape[:-dims], *[1] * dims)
    grad = torch.randn_like(ours)
    wanted, found = (torch.autograd.grad(output, inputs, grad) for output in (expected, ours))
    rtol, atol = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.02, 0.05)}[dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_epsilon_that_nobody_gives_is_torch_s(dtype):
    x, wide = torch.full((2, 8), 1e-4, dtype=dtype), torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(rms_norm(x, [8], None, None)[0], formula(x, None, 1, torch.finfo(wide).eps))


def test_a_frozen_weight_and_a_frozen_input():
    x, weight = torch.randn(4, 8), torch.randn(8)
    for inputs in ((x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_())):
        rms_norm(*inputs[:1], [8], inputs[1], 1e-6)[0].sum().backward()
        expected = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        formula(expected[0], expected[1], 1, 1e-6).sum().backward()
        for ours, theirs in zip(inputs, expected, strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch
from megarl.models import cpu_norm
norm, x = torch.nn.RMSNorm(64, eps=1e-6), torch.randn(30, 64, requires_grad=True)
before = norm(x)
wanted = torch.autograd.grad(before.sum(), [x, norm.weight])
assert cpu_norm.install() is cpu_norm.install() is not None
called = []
backward = cpu_norm._Normed.backward
cpu_norm._Normed.backward = staticmethod(lambda *values: called.append(1) or backward(*values))
after = norm(x)
found = torch.autograd.grad(after.sum(), [x, norm.weight])
assert called and torch.equal(before, after)
torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
with torch.no_grad():
    assert torch.equal(norm(x), before)
with torch.inference_mode():
    assert torch.equal(norm(x), before)
"""


def test_torch_takes_it(tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, check=True, timeout=120)
