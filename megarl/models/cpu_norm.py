"""The gradient of RMSNorm on CPUs in seven passes over memory.

torch 2.13 differentiates each step of the norm there, in about twenty: two to four times the seconds. Forward are the same
operations in the same order: equal to the bit. Put in the place of torch's own by `torch.library`, in processes of ranks alone:
servers take no gradients.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Normed(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^-1/2 (arXiv 1910.07467).

    With n elements in a row and g the gradient of y: that of x is r g w - x r^3 sum(g w x) / n, that of w the rows' sum of g x r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """x: [..., n], weight: [n] -> y, r: [..., 1]. Computed in float32 at least."""
        normed, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.mark_non_differentiable(scale)
        return normed, scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor | None, None]:
        """The gradients of x and of the weight."""
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        wide, g = (tensor.to(scale.dtype).reshape(-1, size) for tensor in (x, grad))
        rows, factor = scale.reshape(-1, 1), None if weight is None else weight.to(scale.dtype)
        products = g * wide
        sums = products.sum(-1, keepdim=True) if factor is None else torch.mv(products, factor).unsqueeze(-1)
        of_weight = (
            None if weight is None or not ctx.needs_input_grad[1] else products.mul_(rows).sum(0).to(weight.dtype)
        )
        of_x = torch.mul(g, rows if factor is None else factor, out=products)
        if factor is not None:
            of_x.mul_(rows)
        of_x.addcmul_(wide, sums.mul_(rows.pow(3)).div_(-size))
        return of_x.reshape(x.shape).to(x.dtype), of_weight, None


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As torch's own: see aten's `rms_norm_composite`."""
    wide = x if x.dtype == torch.float64 else x.float()
    squares = wide * wide
    scale = squares.mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = torch.mul(wide, scale, out=squares)  # memory that is there already
    if weight is not None:
        normed = normed.mul_(weight)
    return normed.to(x.dtype), scale


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """aten's `_fused_rms_norm`: the norm over the last dimensions, `shape`, and what each row was multiplied by."""
    lead = x.shape[: x.dim() - len(shape)]
    flat = None if weight is None else weight.reshape(-1)
    exact = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    normed, scale = _Normed.apply(x.reshape(*lead, math.prod(shape)), flat, exact)  # type: ignore[no-untyped-call]
    return normed.reshape(x.shape), scale.reshape(*lead, *[1] * len(shape))


@cache
def install() -> torch.library.Library:
    """Put it in the place of torch's own in this process; that ends with what is returned."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that they are overridden
        library.impl("_fused_rms_norm", rms_norm, "AutogradCPU", allow_override=True)
    return library
