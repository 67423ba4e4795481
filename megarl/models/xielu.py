"""The activation of Apertus' MLPs, xIELU (arXiv 2411.13010): two numbers of each layer are learned, and two are not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

CONSTANTS = ("beta", "eps")


class Xielu(MegatronModule):  # type: ignore[misc]
    """p x^2 + beta x for x over 0, else n (exp(min(x, eps)) - 1 - x) + beta x.

    p is softplus(alpha_p), n is beta + softplus(alpha_n), which learn. beta and eps lie in the folder, and stay float32 whatever
    the model is cast to.
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, config: TransformerConfig, group: ProcessGroup) -> None:
        """group: tensor parallel's, each of whose ranks has columns of its own."""
        super().__init__(config=config)
        self._group = group
        self.alpha_p = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype))
        self.alpha_n = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype))
        for name in CONSTANTS:
            self.register_buffer(name, torch.zeros(1))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: getattr(self, name) for name in CONSTANTS}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            if (now := getattr(self, name)).dtype != torch.float32:
                setattr(self, name, value.to(now.device))
        return self

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> the same, in its dtype."""
        # Every rank's columns have these in common: their gradients are the sums over the ranks.
        positive, negative = (
            copy_to_tensor_model_parallel_region(alpha, group=self._group) for alpha in (self.alpha_p, self.alpha_n)
        )
        beta, eps = self.beta.to(x.dtype), self.eps.to(x.dtype)
        p, n = F.softplus(positive), beta + F.softplus(negative)
        return torch.where(x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)
