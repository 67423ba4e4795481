"""Linear layers of SGLang on a CPU: weights laid out once as oneDNN's kernels read them, not anew for each product.

A decode step multiplies a few rows by every weight. Plain weights take such a product up to four times as long, for each call
lays them out first; so a layer keeps a second copy. SGLang tells a layer's quantisation method when weights have been
loaded and when they are about to be: there the copy is made, and given up. The plain weights stay, to be loaded into and hashed.

Numbers are of the same precision; the order of summation may differ. Not for deterministic mode, whose products do not depend on
the batch. Written for SGLang 0.5.21.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor
from torch.nn.functional import linear

MOST_BYTES = 2 * 2**30  # of all copies: a larger model keeps its memory
ROWS = 32  # of the products that the layout is chosen for


class PackedLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """The method of one layer: a copy of its weight as oneDNN wants it, or none while weights are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: Tensor | None = None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called by SGLang when a load, or a session of updates, has ended."""
        super().process_weights_after_loading(layer)
        weight: Any = layer.weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        """Called by SGLang before a session of updates."""
        super().restore_weights_before_loading(layer)
        self._packed = None

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [..., K] -> [..., N]. Called by SGLang."""
        if self._packed is None or x.dtype != self._packed.dtype or x.numel() == 0:
            return linear(x, layer.weight, bias)  # type: ignore[arg-type]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return product


def pack(model: torch.nn.Module) -> int:
    """Give a loaded model's plain linear layers such copies, where it is small enough; how many got one."""
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return 0
    layers = [module for module in model.modules() if _suits(module)]
    if sum(layer.weight.nbytes for layer in layers) > MOST_BYTES:  # type: ignore[misc]
        return 0
    for layer in layers:
        method = PackedLinearMethod()
        method.process_weights_after_loading(layer)
        layer.quant_method = method
    return len(layers)


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN lays out weights of it on this CPU: those of bfloat16 need AVX-512, or what came after it."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _suits(layer: torch.nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    if type(getattr(layer, "quant_method", None)) is not UnquantizedLinearMethod or weight is None:
        return False
    return _packs(weight.dtype) and weight.dim() == 2 and bool(weight.is_contiguous())
