"""Layers whose output a number of their own multiplies (Gemma 4)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class ScaledLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer, and behind it the number, which comes with the model and never learns."""

    def __init__(self, *positions: Any, **options: Any) -> None:
        super().__init__(*positions, **options)
        self.layer_scale = torch.nn.Parameter(torch.empty(1, dtype=self.config.params_dtype), requires_grad=False)

    def forward(self, *positions: Any, **options: Any) -> tuple[Tensor, Any]:
        """As Megatron has it: hidden states [s, b, hidden], and what it hands on beside them."""
        output, context = super().forward(*positions, **options)
        return output * self.layer_scale, context
