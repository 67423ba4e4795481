"""RMSNorm and rotary positions of SGLang on a CPU, in fewer calls of torch than its own code makes.

A decode step is a few rows a layer: each operation costs its dispatch more than its arithmetic. Sines and cosines are
looked up once a pass and not once a layer. Layers with options that are not covered here keep SGLang's own code.

Numbers are of the same precision; roundings may differ. Not for deterministic mode. Written for SGLang 0.5.21.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch import Tensor
from torch.nn.functional import rms_norm


class Norm:
    """SGLang's RMSNorm without options (arXiv 1910.07467)."""

    def __init__(self, layer: RMSNorm) -> None:
        self._layer, self._shape = layer, (layer.hidden_size,)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        post_residual_addition: Tensor | None = None,
        quant_linear: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: [..., hidden_size] -> the same, and the sum with the residual where there is one. Called by SGLang."""
        weight, epsilon = self._layer.weight, self._layer.variance_epsilon
        others = (each for each in (residual, post_residual_addition) if each is not None)
        if any(each.dtype != x.dtype for each in (weight, *others)):
            normed: Tensor | tuple[Tensor, Tensor] = self._layer.forward_native(x, residual, post_residual_addition)
            return normed
        if residual is None:
            return rms_norm(x.contiguous(), self._shape, weight, epsilon)
        x = x + residual
        if post_residual_addition is not None:
            x = x + post_residual_addition
        return rms_norm(x, self._shape, weight, epsilon), x


class Rotation:
    """SGLang's rotary embedding of whole heads in two halves (arXiv 2104.09864)."""

    def __init__(self, layer: RotaryEmbedding) -> None:
        self._layer = layer
        self._positions: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None

    def forget(self) -> None:
        """A new pass begins: the same tensor may hold other positions."""
        self._positions = self._factors = None

    def __call__(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        offsets: Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """query, key: [B, heads x dim] -> the same. Called by SGLang."""
        if offsets is not None or fused_set_kv_buffer_arg is not None:
            turned: tuple[Tensor, Tensor] = self._layer.forward_native(
                positions, query, key, offsets, fused_set_kv_buffer_arg
            )
            return turned
        if self._factors is None or positions is not self._positions:
            self._positions, self._factors = positions, self._look_up(positions, query.dtype)
        return self._turn(query, *self._factors), self._turn(key, *self._factors)

    def _look_up(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[B, 1, dim] each: cosines of both halves; sines, minus in the first."""
        cos, sin = self._layer.cos_sin_cache[positions.flatten()].to(dtype).unsqueeze(1).chunk(2, -1)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dim = self._layer.head_size
        each = heads.view(cos.shape[0], -1, dim)
        return (each * cos).addcmul_(each.roll(dim // 2, -1), sin).view(heads.shape)


def shorten(model: torch.nn.Module) -> Callable[[], None]:
    """Have a loaded model's plain layers computed here. What is returned has to be called when a pass begins."""
    rotations = []
    for layer in model.modules():
        if type(layer) is RMSNorm and _plain_norm(layer):
            layer._forward_method = Norm(layer)  # type: ignore[assignment]
        elif isinstance(layer, RotaryEmbedding) and _plain_rotation(layer):
            rotations.append(Rotation(layer))
            layer._forward_method = rotations[-1]

    def begin() -> None:
        for rotation in rotations:
            rotation.forget()

    return begin


def _plain_norm(layer: RMSNorm) -> bool:
    options = (
        layer.cast_x_before_out_mul,
        layer.fp32_residual,
        layer.override_orig_dtype,
        layer.variance_size_override,
    )
    return layer.has_weight and layer._forward_method is None and not any(options)


def _plain_rotation(layer: RotaryEmbedding) -> bool:
    ours = type(layer).forward_native is RotaryEmbedding.forward_native and layer._forward_method is None
    return ours and layer.is_neox_style and layer.rotary_dim == layer.head_size and not hasattr(layer, "sin_cos_cache")
