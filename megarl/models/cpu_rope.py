"""Rotary positions on CPUs in three passes over memory, with their gradient; Megatron's own (0.16.1) makes about ten.

The same sums, each rounded once less. Put in the place of the one function that Megatron's forms of RoPE all end in.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Rotated(torch.autograd.Function):
    """Pairs (a, b) of elements half a head apart become (a cos - b sin, b cos + a sin) (arXiv 2104.09864)."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """heads: [..., d]; cos and sin spread over it."""
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Turned back: each half's gradient comes from the other with that one's sines."""
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin.roll(sin.shape[-1] // 2, -1), -1), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = heads.shape[-1] // 2
    turned = heads * cos
    turned[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-sign)
    turned[..., half:].addcmul_(heads[..., :half], sin[..., half:], value=sign)
    return turned


class _Factors:
    """Cosines and sines of angles; those of the last are kept, which every layer of a pass asks for, queries and keys."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, float, Tensor, Tensor] | None = None

    def of(self, angles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """In float32, times a scale."""
        last = self._last
        if last is None or last[1] != scale or not torch.equal(last[0], angles):
            with torch.inference_mode(False):  # who asks next may want gradients
                # A copy: who gave the angles may change them.
                last = angles.clone(), scale, (angles.cos() * scale).float(), (angles.sin() * scale).float()
            self._last = last
        return last[2:]


def install(rope_utils: ModuleType) -> None:
    """Put it in the place of Megatron's function in its module."""
    theirs: Callable[..., Tensor] = rope_utils._apply_rotary_pos_emb_bshd
    factors = _Factors()

    def apply(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
    ) -> Tensor:
        """t: [s, ..., dim], freqs: [s, ..., rotated] -> t with its first elements rotated."""
        if rotary_interleaved or multi_latent_attention or t.dtype != torch.float32:
            return theirs(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
        width = freqs.shape[-1]
        turned: Tensor = _Rotated.apply(t[..., :width], *factors.of(freqs, mscale))  # type: ignore[no-untyped-call]
        return turned if width == t.shape[-1] else torch.cat([turned, t[..., width:]], -1)

    rope_utils._apply_rotary_pos_emb_bshd = apply  # type: ignore[attr-defined]
