"""Norms for layers without Transformer Engine: plain, over all heads, and behind a linear that sums what ranks put out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable

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


class WholeNorm(RMSNorm):
    """A norm over all heads together, in the place of one over each (OLMo-2, arXiv 2501.00656); each rank has its heads' part.

    heads: of all tensor-parallel ranks; hidden_size is of one. Megatron's globals must be the layout's.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: int, **_: Any) -> None:
        self._tp = parallel_state.get_tensor_model_parallel_group()
        super().__init__(config, heads * hidden_size // self._tp.size(), eps)
        setattr(self.weight, "sequence_parallel", False)  # noqa: B010  # its gradient is of all tokens already
        # A part: the gradient's norm counts every rank's.
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, this rank's heads, head_dim] -> the same."""
        flat = x.flatten(-2)
        if self._tp.size() == 1:
            return super().forward(flat).view_as(x)
        normed: Tensor = _NormedOverRanks.apply(flat, self.weight, self.eps, self._tp)  # type: ignore[no-untyped-call]
        return normed.view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the part for distributed checkpoints."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        return sharded


class _NormedOverRanks(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^-1/2, whose mean is over the elements of all ranks of a group (arXiv 1910.07467).

    With n of them and g the gradient of y: that of x is r g w - x r^3 sum(g w x) / n, that of w the rows' sum of g x r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
        """x: [..., this rank's], weight: [this rank's]. Computed in float32."""
        wide = x.float()
        scale = wide.square().sum(-1, keepdim=True)
        dist.all_reduce(scale, group=group)
        scale.div_(x.shape[-1] * group.size()).add_(eps).rsqrt_()
        ctx.group = group
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).type_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of x and of the weight."""
        x, weight, scale = ctx.saved_tensors
        wide, g = x.float(), grad.float()
        of_weight = (g * wide * scale).flatten(0, -2).sum(0).type_as(weight)
        g = g * weight.float()
        sums = (g * wide).sum(-1, keepdim=True)
        dist.all_reduce(sums, group=ctx.group)
        of_x = g * scale - wide * (scale.pow(3) * sums / (x.shape[-1] * ctx.group.size()))
        return of_x.type_as(x), of_weight, None, None


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear whose summed output is normed before it joins the residual stream."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, this rank's input] -> [s, b, output], and no bias."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
