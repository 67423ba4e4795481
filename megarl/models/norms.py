"""Norms for layers without Transformer Engine, and the linear that norms what it puts out (Gemma's sandwich)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# transformers' DeepSeek-V3 gives the norms of its latents this epsilon, whatever the config says.
LATENT_EPS = 1e-6


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm (arXiv 1910.07467) under Megatron's constructor; knows sequence parallel and Gemma's 1 + weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Megatron sums the gradients of such weights over the tensor-parallel ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self._offset = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        if not self._offset:
            return super().forward(x)
        # In float32, as Gemma has it: 1 + weight would lose the weight's last bits in a narrower type.
        normed = F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps)
        return normed.type_as(x)


class LatentNorm(RMSNorm):
    """The norm of a compressed query or key-value."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = LATENT_EPS, **_: Any) -> None:
        super().__init__(config, hidden_size, LATENT_EPS)


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose summed output is normed before it joins the residual stream."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, this rank's input] -> [s, b, output], and no bias."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
